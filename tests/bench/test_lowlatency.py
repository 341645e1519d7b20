# SPDX-License-Identifier: Apache-2.0
"""`weft bench lowlatency`: checked, timed, traced, reported, on CPU ranks."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import weft
from weft.bench.harness import run
from weft.bench.lowlatency import LowCase, LowTrial
from weft.bench.report import as_json, print_report
from weft.bench.trace import trace
from weft.errors import InvalidArgument

SETTINGS = LowCase(
    ranks=2,
    device="cpu",
    tokens=(1, 6),
    hidden=128,
    top_k=3,
    experts=8,
    routing="uniform",
    samples=3,
    seed=1,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reduce": "sender", "combine_dtype": "fp8", "scale": "ue8m0"},
        {"quantize": None, "routing": "perfect"},
    ],
)
def test_a_run_is_checked_timed_and_reported(threads, changes):
    case = replace(SETTINGS, **changes)
    report = run(case, quiet=True)
    assert report.problem is None
    assert [found.tokens for found in report.measured] == [1, 6]
    for found in report.measured:
        assert list(found.samples_us) == ["dispatch", "combine", "pair"]
        assert all(len(samples) == 3 for samples in found.samples_us["pair"])
    text = io.StringIO()
    print_report(Console(file=text, width=200), report)
    assert f"weft bench lowlatency {case.title()}" in " ".join(text.getvalue().split())
    written = json.loads(json.dumps(as_json(report)))
    assert written["settings"]["reduce"] == case.reduce
    assert len(written["rows"]) == 6


ROWS = "rows of experts differ from the reference"


def spoiled(group: weft.Group) -> tuple[str | None, str | None, str | None]:
    """A sum that is wrong, and a row that is, must be found; also by one rank alone."""
    with contextlib.closing(replace(SETTINGS, tokens=(6,)).trials(group)) as trials:
        trial = next(trials)
        assert isinstance(trial, LowTrial)
        assert trial.check() is None
        trial.out[2, 5] += 1
        wrong_sum = trial.compare()
        sent = trial.rows[0].clone()
        trial.rows[0][:] += group.rank
        one_rank = trial.check()
        trial.rows[0].copy_(sent)
        trial.rows[0][:] += 1  # what rank 0 is believed to send; rank 0 sends it, too
        trial.x = trial.x.clone() if group.rank else trial.x - 1
        wrong_row = trial.check()
        group.barrier()
    return wrong_sum, one_rank, wrong_row


def test_what_is_wrong_is_said(ranks):
    for rank, (wrong_sum, one_rank, wrong_row) in enumerate(ranks(2, "threads")(spoiled)):
        assert wrong_sum is not None
        assert wrong_sum.startswith(f"rank {rank}: sum of token 2 of 6 is [")
        assert "in columns [5]" in wrong_sum
        assert one_rank == (f"rank 1: {ROWS}" if rank else None)
        assert wrong_row == f"rank {rank}: {ROWS}"


def test_a_trace_of_all_ranks_is_written(threads, tmp_path):
    path = tmp_path / "trace.json"
    assert trace(path, SETTINGS) is None
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"receive rows", "copy"}


def test_traffic_is_counted_by_rank_out_and_by_choice_back():
    case = replace(SETTINGS, experts=4)
    ids = [torch.tensor([[0, 2, 3], [2, 3, -1]]), torch.tensor([[0, 1, 2], [3, -1, -1]])]
    # Rank 0 sends both tokens to rank 1, for two choices each; rank 1 one token for two.
    found, shape = case.traffic(ids), case.config.shape
    assert (found["chosen"], found["rows_out"], found["rows_back"]) == (5, 2, 4)
    assert found["out_bytes"] == 2 * shape.sent_bytes
    assert found["back_bytes"] == 4 * shape.back_bytes
    assert replace(case, reduce="sender").traffic(ids)["rows_back"] == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 100, "quantize": None}, "hidden is 100"),
        ({"combine_dtype": "fp4"}, "combine_dtype is 'fp4'"),
        ({"ranks": 99}, "ranks is 99"),
        ({"routing": "best"}, "choose one of uniform"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(SETTINGS, **changes)
