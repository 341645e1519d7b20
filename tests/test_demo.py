"""The demo: a real layer on CPU ranks, and a verdict that can also be bad."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

import weft
from weft import demo
from weft.errors import InvalidArgument


@pytest.fixture(scope="module")
def outcome():
    """One run on four processes: the plan, what the ranks returned, and the verdict."""
    plan = replace(demo.Plan.of(4, 20), hidden=256, intermediate=64)
    kept: list[list[demo.Outcome]] = []

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
    assert 0 < verdict.error < 0.1
    assert plan.tokens == (20, 18, 15, 0), "the last rank brings no token, and takes part"
    assert verdict.rows[3].tolist() == [0, 0, 0, 0]
    assert int(verdict.rows.max()) <= 20
    for rank in range(4):
        assert ranks[rank].result.shape == (plan.tokens[rank], 256)


def test_demo_notices_a_wrong_choice(outcome):
    plan, ranks, _ = outcome
    assert demo._routing_is_exact(plan, ranks)
    wrong = ranks[1].ids.copy()
    wrong[2] = wrong[2, ::-1]
    assert not demo._routing_is_exact(plan, [ranks[0], replace(ranks[1], ids=wrong), *ranks[2:]])


@pytest.mark.parametrize("spoil", ["received", "received_ids", "result"])
def test_demo_notices_a_wrong_exchange(outcome, spoil):
    plan, ranks, verdict = outcome
    wrong = getattr(ranks[0], spoil).copy()
    wrong.flat[np.flatnonzero(wrong)[5]] ^= 1
    assert not demo._exchange_is_exact(plan, [replace(ranks[0], **{spoil: wrong}), *ranks[1:]])
    assert not replace(verdict, exact=False).right
    assert not replace(verdict, error=float("nan")).right
    assert not replace(verdict, error=0.2 * verdict.largest).right


def test_demo_shows_and_draws(outcome, tmp_path):
    verdict = outcome[2]
    text = io.StringIO()
    demo.print_verdict(Console(file=text, width=110), verdict)
    for piece in ("4 ranks (cpu)", "rank 3", "bit by bit", "max abs error", "dispatch us"):
        assert piece in text.getvalue()
    demo.save_picture(tmp_path / "sub" / "demo.png", verdict)
    assert (tmp_path / "sub" / "demo.png").read_bytes().startswith(b"\x89PNG")
    text = io.StringIO()
    demo.print_verdict(Console(file=text, width=110), replace(verdict, exact=False))
    assert "WRONG" in text.getvalue()


def test_plan():
    plan = demo.Plan.of(2, 8)
    assert plan.tokens == (8, 6)
    assert torch.equal(plan.x(1), plan.x(1))
    assert not torch.equal(plan.x(0)[:6], plan.x(1))
    for ranks in (1, 17):
        with pytest.raises(InvalidArgument, match=f"not on {ranks}"):
            demo.Plan.of(ranks)
