"""`weft bench lowlatency`: checked, timed, traced, reported, on CPU ranks."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import weft
from weft.bench.lowlatency import run, trace
from weft.bench.lowlatency_cases import LowSettings
from weft.bench.lowlatency_report import low_rows, print_low, write_low_json
from weft.bench.lowlatency_trial import LowTrial, low_traffic, make_low
from weft.bench.peers import matching_peers
from weft.errors import InvalidArgument

SETTINGS = LowSettings(
    ranks=2,
    device="cpu",
    tokens=(1, 6),
    max_tokens=None,
    hidden=128,
    top_k=3,
    experts=8,
    router="random",
    quant="fp8",
    scale="fp32_row",
    reduce="receiver",
    combine_by="push",
    graph=True,
    samples=3,
    seed=1,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reduce": "sender", "combine_by": "fp8", "scale": "ue8m0"},
        {"quant": "none", "router": "perfect", "halves": True},
    ],
)
def test_a_run_is_checked_timed_and_reported(changes, tmp_path):
    settings = replace(SETTINGS, **changes)
    report = run(settings, quiet=True)
    assert report.problem is None
    assert [found.tokens for found in report.measurements] == [1, 6]
    for found in report.measurements:
        assert set(found.samples) == {"dispatch", "combine", "pair"}
        assert all(len(samples) == 3 for samples in found.samples["pair"])
    text = io.StringIO()
    print_low(Console(file=text, width=160), report, [])
    assert "weft bench lowlatency" in text.getvalue()
    assert settings.wire in " ".join(text.getvalue().split())
    write_low_json(tmp_path / "low.json", report, [])
    written = json.loads((tmp_path / "low.json").read_text())
    assert written["settings"]["reduce"] == settings.reduce
    assert len(written["rows"]) == 2
    assert all(row.floor is None and not row.rivals for row in low_rows(report, []))


def spoiled(group: weft.Group) -> tuple[str | None, str | None]:
    """A sum that is wrong, and a row that is, must be found."""
    with make_low(group, SETTINGS) as a2a:
        trial = LowTrial(group, SETTINGS, a2a, 6)
        assert trial.check() is None
        trial.out[2, 5] += 1
        wrong_sum = trial.compare()
        trial.rows[0][:] += 1  # what rank 0 is believed to send; rank 0 sends it, too
        trial.x = trial.x.clone() if group.rank else trial.x - 1
        wrong_row = trial.check()
        group.barrier()
        return wrong_sum, wrong_row


def test_what_is_wrong_is_said(ranks):
    for wrong_sum, wrong_row in ranks(2, "threads")(spoiled):
        assert wrong_sum == "1 of 6 sums differ, the first of token 2"
        assert wrong_row == "rows of experts differ from the reference"


def test_a_trace_of_all_ranks_is_written(tmp_path):
    path = tmp_path / "trace.json"
    assert trace(path, SETTINGS) is None
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"take rows", "copy"}


def test_traffic_is_counted_by_rank_out_and_by_choice_back():
    settings = replace(SETTINGS, experts=4)
    ids = [torch.tensor([[0, 2, 3], [2, 3, -1]]), torch.tensor([[0, 1, 2], [3, -1, -1]])]
    # Rank 0 sends both tokens to rank 1, for two choices each; rank 1 one token for two.
    assert low_traffic(settings, ids).out == 2
    assert low_traffic(settings, ids).back == 4
    assert low_traffic(replace(settings, reduce="sender"), ids).back == 2
    assert low_traffic(settings, ids).chosen == 5


def test_recorded_rivals_stand_beside_the_published_setting():
    settings = replace(
        SETTINGS, ranks=8, hidden=7168, top_k=8, experts=256, router="perfect", tokens=(128,)
    )
    found = {peer.library: peer.us for peer in matching_peers(settings.as_moe)}
    assert found["DeepEP v1 low-latency"][128] == 104.7


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quant": "int4"}, "quant is 'int4'"),
        ({"scale": "none"}, "scale is 'none'"),
        ({"reduce": "all"}, "reduce is 'all'"),
        ({"tokens": ()}, "nothing to measure"),
        ({"hidden": 100, "quant": "none"}, "hidden is 100"),
        ({"max_tokens": 3}, "6 tokens do not fit max_tokens=3"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, text):
    with pytest.raises((InvalidArgument, ValueError), match=text):
        replace(SETTINGS, **changes)
