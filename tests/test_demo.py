"""The demo: a real layer on CPU ranks, and a verdict that can also be bad."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

import weft
from weft.cli import demo, demo_report
from weft.cli.demo_ranks import MODES, Outcome, Plan
from weft.errors import InvalidArgument


@pytest.fixture(scope="module")
def outcome():
    """One run on four processes: the plan, what the ranks returned, and the verdict."""
    plan = replace(Plan.of(4, 20), hidden=256, intermediate=128)
    kept: list[list[Outcome]] = []

    def keep(*args, **kwargs):
        kept.append(weft.launch(*args, **kwargs))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "launch", keep)
        verdict = demo.run(plan, "cpu")
    return plan, kept[0], verdict


def test_demo_is_right(outcome):
    plan, ranks, verdict = outcome
    assert verdict.right
    assert verdict.exact
    assert list(verdict.modes) == list(MODES)
    for name, mode in verdict.modes.items():
        assert mode.right, name
        assert 0 < mode.error < (0.3 if "FP8" in name else 0.1), name
    assert {mode.bits_of for mode in verdict.modes.values()} == {None, "none", "by expert"}
    assert plan.tokens == (20, 18, 15, 0), "the last rank brings no token, and takes part"
    assert verdict.rows[3].tolist() == [0, 0, 0, 0]
    assert int(verdict.rows.max()) <= 20
    for rank in range(4):
        for result in ranks[rank].results.values():
            assert result.shape == (plan.tokens[rank], 256)


def test_demo_notices_a_wrong_choice(outcome):
    plan, ranks, _ = outcome
    assert demo._routing_is_exact(plan, ranks)
    wrong = ranks[1].ids.copy()
    wrong[2] = wrong[2, ::-1]
    assert not demo._routing_is_exact(plan, [ranks[0], replace(ranks[1], ids=wrong), *ranks[2:]])


def spoilt(array):
    wrong = array.copy()
    wrong.flat[np.flatnonzero(wrong)[5]] ^= 1
    return wrong


@pytest.mark.parametrize("spoil", ["received", "received_ids", "result"])
def test_demo_notices_a_wrong_exchange(outcome, spoil):
    plan, ranks, verdict = outcome
    if spoil == "result":
        results = {**ranks[0].results, "none": spoilt(ranks[0].results["none"])}
        broken = replace(ranks[0], results=results)
    else:
        broken = replace(ranks[0], **{spoil: spoilt(getattr(ranks[0], spoil))})
    assert demo._exchange_is_exact(plan, ranks)
    assert not demo._exchange_is_exact(plan, [broken, *ranks[1:]])
    assert not replace(verdict, exact=False).right


@pytest.mark.parametrize("name", list(MODES))
def test_demo_notices_a_wrong_mode(outcome, name):
    """One bit where bits must be equal; a number that is far off; one that is none."""
    plan, ranks, verdict = outcome
    results = {**ranks[1].results, name: spoilt(ranks[1].results[name])}
    found = demo._compare(plan, [ranks[0], replace(ranks[1], results=results), *ranks[2:]])
    twins = {other for other, mode in MODES.items() if mode.bits_of == name and other != name}
    assert {other for other in found if not found[other].equal} == (
        twins or ({name} if MODES[name].bits_of else set())
    )
    mode = verdict.modes[name]
    for error in (float("nan"), 0.2 * mode.largest):
        wrong = replace(mode, error=error)
        assert not replace(verdict, modes={**verdict.modes, name: wrong}).right


def test_demo_shows_and_draws(outcome, tmp_path):
    verdict = outcome[2]
    text = io.StringIO()
    demo_report.print_verdict(Console(file=text, width=110), verdict)
    for piece in ("4 ranks (cpu)", "rank 3", "bit by bit", "max abs error", "dispatch us", *MODES):
        assert piece in text.getvalue()
    demo_report.save_picture(tmp_path / "sub" / "demo.png", verdict)
    assert (tmp_path / "sub" / "demo.png").read_bytes().startswith(b"\x89PNG")
    text = io.StringIO()
    demo_report.print_verdict(Console(file=text, width=110), replace(verdict, exact=False))
    assert "WRONG" in text.getvalue()
    text = io.StringIO()
    differs = replace(verdict.modes["gemm_push"], equal=False)
    modes = {**verdict.modes, "gemm_push": differs}
    demo_report.print_verdict(Console(file=text, width=110), replace(verdict, modes=modes))
    assert "WRONG: push" in text.getvalue()
    assert "DIFFER from none" in text.getvalue()


def test_plan():
    plan = Plan.of(2, 8)
    assert plan.tokens == (8, 6)
    assert torch.equal(plan.x(1), plan.x(1))
    assert not torch.equal(plan.x(0)[:6], plan.x(1))
    for ranks in (1, 17):
        with pytest.raises(InvalidArgument, match=f"not on {ranks}"):
            Plan.of(ranks)
