# SPDX-License-Identifier: Apache-2.0
"""`weft bench allreduce`, run for real on CPU ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.bench.allreduce import EPILOGUES, ReduceCase, wire_bytes
from weft.bench.harness import Measured, Report, run
from weft.bench.limits import allreduce_floor_us
from weft.bench.report import rows_of
from weft.errors import InvalidArgument

SMALL = ReduceCase(
    ranks=2,
    device="cpu",
    tokens=(1, 5),
    hidden=256,
    backends=("oneshot", "twoshot"),
    samples=3,
    seed=1,
)
H200 = replace(
    SMALL,
    ranks=8,
    device="cuda",
    tokens=(8, 128, 4096),
    hidden=7168,
    backends=("auto",),
    samples=11,
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"backends": ()}, "nothing to measure"),
        ({"ranks": 73}, "all-reduce of 73 ranks; it takes 1 to 72"),
        ({"ranks": 73}, "of 73 ranks"),
        ({"hidden": 100}, "multiple of 8"),
        ({"hidden": 200, "epilogue": "fp8-group"}, "multiple of 128"),
    ],
)
def test_settings_that_do_not_fit(change, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(SMALL, **change)


def test_rows_have_bytes_and_floors():
    payload = 128 * 7168 * 2
    assert wire_bytes("oneshot", payload, 8) == 7 * payload
    assert wire_bytes("twoshot", payload, 8) == 2 * 7 / 8 * payload
    found = Measured("auto", 128, "by hand", {"call": [[40.0]] * 8}, {"chosen": "twoshot"})
    (row,) = rows_of(Report(H200, {"gpus": ["NVIDIA H200"] * 8}, [found]))
    assert row.moved == wire_bytes("twoshot", payload, 8)
    assert row.logical == pytest.approx(payload / 40 / 1e3)
    assert row.floor == allreduce_floor_us(payload, 8, ["NVIDIA H200"] * 8)
    assert row.more == {"chosen": "twoshot"}


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_epilogue_is_checked_and_timed(threads, epilogue):
    backends = ("oneshot", "twoshot", "twoshot_bulk", "auto")
    report = run(replace(SMALL, epilogue=epilogue, backends=backends), quiet=True)
    assert report.problem is None
    assert report.refused == []
    assert [(m.tokens, m.variant) for m in report.measured] == [
        (tokens, backend) for tokens in (1, 5) for backend in backends
    ]
    for found in report.measured:
        assert [len(samples) for samples in found.samples_us["call"]] == [3, 3]
        assert all(us > 0 for samples in found.samples_us["call"] for us in samples)
        assert found.method == "host clock, 3 calls with a barrier before each"
        assert (found.facts["chosen"] == found.variant) == (found.variant != "auto")
        assert ("H200" in found.facts["why"]) == (found.variant == "auto")
        assert found.facts["memory_bytes"] > 0


def test_the_command(weft_command, tmp_path):
    full, picture = tmp_path / "all.json", tmp_path / "all.png"
    code, out, err = weft_command(
        *("bench", "allreduce", "--device", "cpu", "--ranks", "2", "--quiet", "--iters", "3"),
        *("--hidden", "64", "--tokens", "1,6", "--backend", "twoshot,twoshot_bulk,auto"),
        *("--peers", "--json", str(full), "--plot", str(picture)),
    )
    assert code == 0, err
    assert "bit by bit" in out
    data = json.loads(full.read_text())
    sizes = [(found["tokens"], found["variant"]) for found in data["results"]]
    assert sizes == [(n, b) for n in (1, 6) for b in ("twoshot", "twoshot_bulk", "auto")]
    status = {run["name"]: run["status"] for run in data["peers"]}
    assert status["torch all_reduce"] == "measured"
    assert status["torch symm_mem two-shot"] == "needs GPUs"
    assert data["rows"][0]["baselines"], "measured in this run"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_size_that_a_backend_refuses_is_left_out(threads):
    report = run(replace(SMALL, tokens=(1, 600), hidden=8, epilogue="none"), quiet=True)
    assert report.problem is None
    assert [(m.tokens, m.variant) for m in report.measured] == [
        (1, "oneshot"),
        (1, "twoshot"),
        (600, "twoshot"),
    ]
    (text,) = report.refused
    assert text.startswith("oneshot, 600 tokens: ")
    nothing = run(replace(SMALL, tokens=(600,), hidden=8, backends=("oneshot",)), quiet=True)
    assert nothing.problem == nothing.refused[0], "a run of which nothing is left fails"
