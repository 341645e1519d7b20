"""`weft bench allreduce`, run for real on CPU ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import weft
from weft.bench.allreduce import ReduceCase, wire_bytes
from weft.bench.limits import allreduce_floor_us
from weft.bench.peers import matching
from weft.bench.report import rows_of
from weft.bench.run import Measurement, Report, run
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
EPILOGUES = ("none", "norm", "fp8-static", "fp8-token", "fp8-group")
SHELL = ("--device", "cpu", "--ranks", "2", "--quiet", "--iters", "3", "--hidden", "64")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "fp64"}, "dtype is 'fp64'"),
        ({"epilogue": "fp4"}, "epilogue is 'fp4'"),
        ({"backends": ("nccl",)}, "backend is 'nccl'; choose one of oneshot, twoshot"),
        ({"backends": ()}, "nothing to measure"),
        ({"tokens": ()}, "nothing to measure"),
        ({"tokens": (0, 4)}, "0 tokens"),
        ({"max_tokens": 4}, "5 tokens do not fit max_tokens=4"),
        ({"ranks": 1}, "all-reduce of 1 ranks; it takes 2 to 8"),
        ({"ranks": 9}, "of 9 ranks"),
        ({"hidden": 100}, "multiple of 8"),
        ({"hidden": 200, "epilogue": "fp8-group"}, "multiple of 128"),
        ({"samples": 0}, "0 samples"),
    ],
)
def test_settings_that_do_not_fit(change, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(SMALL, **change)


def test_what_settings_mean():
    assert SMALL.capacity == 5
    assert replace(SMALL, max_tokens=9).capacity == 9
    assert SMALL.row_bytes == 512
    assert replace(SMALL, dtype="fp32").row_bytes == 1024
    texts = {
        replace(SMALL, epilogue=name).title()
        for name in ("none", "norm", "fp8-static", "fp8-token", "fp8-group")
    }
    assert len(texts) == 5


def test_rows_have_bytes_floors_and_baselines():
    payload = 128 * 7168 * 2
    assert wire_bytes("oneshot", payload, 8) == 7 * payload
    assert wire_bytes("twoshot", payload, 8) == 2 * 7 / 8 * payload
    found = Measurement("auto", 128, "by hand", {"call": [[40.0]] * 8}, {"chosen": "twoshot"})
    report = Report(H200, {"gpus": ["NVIDIA H200"] * 8}, [found])
    peers = matching(H200)
    (row,) = rows_of(report, peers)
    assert row.moved == wire_bytes("twoshot", payload, 8)
    assert row.logical == pytest.approx(payload / 40 / 1e3)
    assert row.floor == allreduce_floor_us(payload, 8, ["NVIDIA H200"] * 8)
    assert row.more == {"chosen": "twoshot"}
    assert set(row.baselines) == {peer.label for peer in peers if 128 in peer.us}
    assert any(label.startswith("torch all_reduce") for label in row.baselines)
    assert rows_of(replace(report, machine={"gpus": []}), peers)[0].baselines == {}
    quantised = matching(replace(H200, epilogue="fp8-token"))
    assert quantised == peers, "what quantises stands beside their norm"
    for other in (replace(H200, ranks=2), replace(H200, hidden=512), replace(H200, dtype="fp16")):
        assert matching(other) == []


@pytest.fixture
def threads(monkeypatch):
    """Ranks that a test may spoil: threads of this process."""
    launch = weft.launch

    def as_threads(*args, **options):
        return launch(*args, **{**options, "device": "threads"})

    monkeypatch.setattr("weft.bench.run.launch", as_threads)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_epilogue_is_checked_and_timed(threads, epilogue):
    backends = ("oneshot", "twoshot", "twoshot_bulk", "auto")
    report = run(replace(SMALL, epilogue=epilogue, backends=backends), quiet=True)
    assert report.problem is None
    assert report.refused == []
    assert [(m.tokens, m.variant) for m in report.measurements] == [
        (tokens, backend) for tokens in (1, 5) for backend in backends
    ]
    for found in report.measurements:
        assert [len(samples) for samples in found.samples_us["call"]] == [3, 3]
        assert all(us > 0 for samples in found.samples_us["call"] for us in samples)
        assert found.method == "host clock, 3 calls with a barrier before each"
        assert (found.facts["chosen"] == found.variant) == (found.variant != "auto")
        assert ("H200" in found.facts["why"]) == (found.variant == "auto")
    assert report.facts["memory_bytes"] > 0


def test_the_command(weft_command, tmp_path):
    full, picture = tmp_path / "all.json", tmp_path / "all.png"
    code, out, err = weft_command(
        *("bench", "allreduce", *SHELL, "--tokens", "1,6", "--backend", "twoshot,collective,auto"),
        *("--peers", "--json", str(full), "--plot", str(picture)),
    )
    assert code == 0, err
    assert "bit by bit" in out
    data = json.loads(full.read_text())
    sizes = [(found["tokens"], found["variant"]) for found in data["results"]]
    assert sizes == [(n, b) for n in (1, 6) for b in ("twoshot", "collective", "auto")]
    status = {run["name"]: run["status"] for run in data["peers"]}
    assert status["torch all_reduce"] == "measured"
    assert status["torch symm_mem two-shot"] == "needs GPUs"
    assert data["rows"][0]["baselines"], "measured in this run"
    assert picture.read_bytes().startswith(b"\x89PNG")


class _Wrong(weft.AllReduce):
    """Spoils what rank 1 gets, after some good calls."""

    calls = good_calls = 0

    def fused(self, *args, **kwargs):
        result = super().fused(*args, **kwargs)
        self.calls += 1
        if self.group.rank == 1 and self.calls > self.good_calls:
            assert result.norm is not None
            result.norm[0, 0] += 1
        return result


@pytest.mark.parametrize(
    ("good_calls", "text"),
    [(0, "oneshot, 1 tokens: rank 1: norm of token 0 of 1"), (2, "after timing, rank 1: norm")],
)
def test_a_wrong_all_reduce_is_not_timed(threads, monkeypatch, good_calls, text):
    monkeypatch.setattr(weft, "AllReduce", _Wrong)
    monkeypatch.setattr(_Wrong, "good_calls", good_calls)
    report = run(SMALL, quiet=True)
    assert text in (report.problem or "")
    assert report.measurements == []


def test_a_wrong_all_reduce_ends_the_command(threads, weft_command, monkeypatch, tmp_path):
    monkeypatch.setattr(weft, "AllReduce", _Wrong)
    code, out, err = weft_command("bench", "allreduce", *SHELL, "--tokens", "1")
    assert (code, out) == (1, "")
    assert "check failed, nothing timed" in err


class _Silent(weft.AllReduce):
    """Writes nothing once it was checked."""

    calls = 0

    def fused(self, *args, **kwargs):
        self.calls += 1
        return super().fused(*args, **kwargs) if self.calls <= 2 else None


def test_calls_that_write_nothing_are_noticed(threads, monkeypatch):
    monkeypatch.setattr(weft, "AllReduce", _Silent)
    assert "after timing, rank 0" in (run(SMALL, quiet=True).problem or "")


def test_a_size_that_a_backend_refuses_is_left_out(threads):
    report = run(replace(SMALL, tokens=(1, 600), hidden=8, epilogue="none"), quiet=True)
    assert report.problem is None
    assert [(m.tokens, m.variant) for m in report.measurements] == [
        (1, "oneshot"),
        (1, "twoshot"),
        (600, "twoshot"),
    ]
    (text,) = report.refused
    assert text.startswith("oneshot, 600 tokens: ")
