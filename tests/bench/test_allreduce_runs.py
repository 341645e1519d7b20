"""The all-reduce bench, its rivals and the tuner, run for real on CPU ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import weft
from tests.bench.test_allreduce_cases import SMALL
from weft.bench.allreduce import run
from weft.bench.allreduce_tune import tune, tuning_plan
from weft.errors import InvalidArgument
from weft.ops.allreduce_table import Table

EPILOGUES = ("none", "norm", "fp8-static", "fp8-token", "fp8-group")
SHELL = ("--device", "cpu", "--ranks", "2", "--quiet", "--iters", "3", "--hidden", "64")


@pytest.fixture
def threads(monkeypatch):
    """Ranks that a test may spoil: threads of this process."""
    launch = weft.launch

    def as_threads(*args, **options):
        return launch(*args, **{**options, "device": "threads"})

    for module in ("allreduce", "allreduce_tune"):
        monkeypatch.setattr(f"weft.bench.{module}.launch", as_threads)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_epilogue_is_checked_and_timed(threads, epilogue):
    backends = ("oneshot", "twoshot", "twoshot_bulk", "auto")
    report = run(replace(SMALL, epilogue=epilogue, backends=backends), quiet=True)
    assert report.problem is None
    assert report.refused == []
    assert [(m.tokens, m.backend) for m in report.measurements] == [
        (tokens, backend) for tokens in (1, 5) for backend in backends
    ]
    for found in report.measurements:
        assert [len(samples) for samples in found.samples] == [3, 3]
        assert all(us > 0 for samples in found.samples for us in samples)
        assert found.method == "host clock, 3 calls with a barrier before each"
        assert (found.chosen == found.backend) == (found.backend != "auto")
        assert ("not measured" in found.why) == (found.backend == "auto")
    assert report.memory_bytes > 0


def test_the_command(weft_command, tmp_path):
    full, picture = tmp_path / "all.json", tmp_path / "all.png"
    code, out, err = weft_command(
        *("bench", "allreduce", *SHELL, "--tokens", "1,6", "--backend", "twoshot,collective,auto"),
        *("--peers", "--json", str(full), "--plot", str(picture)),
    )
    assert code == 0, err
    assert "bit by bit" in out
    data = json.loads(full.read_text())
    sizes = [(found["tokens"], found["backend"]) for found in data["results"]]
    assert sizes == [(n, b) for n in (1, 6) for b in ("twoshot", "collective", "auto")]
    status = {run["name"]: run["status"] for run in data["peers"]}
    assert status["torch all_reduce"] == "measured"
    assert status["torch symm_mem two-shot"] == "needs GPUs"
    assert data["rows"][0]["rivals"], "measured in this run"
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
    assert "rank 1: norm" in (tune(_plan(), quiet=True).problem or "")


def test_a_wrong_all_reduce_ends_the_command(threads, weft_command, monkeypatch, tmp_path):
    monkeypatch.setattr(weft, "AllReduce", _Wrong)
    code, out, err = weft_command("bench", "allreduce", *SHELL, "--tokens", "1")
    assert (code, out) == (1, "")
    assert "check failed, nothing timed" in err
    path = tmp_path / "table.json"
    code, _, err = weft_command("tune", "allreduce", str(path), *SHELL, "--tokens", "1")
    assert code == 1
    assert "check failed" in err
    assert not path.exists()


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
    assert [(m.tokens, m.backend) for m in report.measurements] == [
        (1, "oneshot"),
        (1, "twoshot"),
        (600, "twoshot"),
    ]
    (text,) = report.refused
    assert text.startswith("oneshot, 600 tokens: ")


def _plan(**changes):
    given = {
        "ranks": 2,
        "device": "cpu",
        "tokens": (4, 1, 2),
        "hiddens": (64, 128),
        "dtype": "bf16",
        "epilogues": ("norm", "none"),
        "backends": ("oneshot", "twoshot", "twoshot_bulk"),
        "samples": 3,
    }
    return tuning_plan(**{**given, **changes})


def test_tuning_writes_what_auto_reads(threads):
    found = tune(_plan(), quiet=True)
    assert found.problem is None
    table = found.table
    assert table is not None
    assert (table.gpu, table.ranks, table.source) == ("", 2, "measured")
    assert [(c.hidden, c.epilogue, c.tokens) for c in table.curves] == [
        (hidden, epilogue, (1, 2, 4)) for hidden in (64, 128) for epilogue in ("norm", "none")
    ]
    assert all(us is not None for c in table.curves for times in c.us.values() for us in times)
    choice = table.choose(2, hidden=64, dtype=torch.bfloat16)
    assert choice.source == "measured"
    assert table.date in choice.text


def test_tuning_from_the_command_to_the_choice(weft_command, tmp_path):
    path = tmp_path / "some" / "table.json"
    code, out, err = weft_command(
        *("tune", "allreduce", str(path), *SHELL, "--tokens", "1,2", "--epilogue", "norm")
    )
    assert code == 0, err
    assert "auto: " in out
    table = Table.load(path)
    assert len(table.curves) == 1
    code, out, err = weft_command(
        *("bench", "allreduce", *SHELL, "--tokens", "2", "--table", str(path))
    )
    assert code == 0, err
    assert "Measured" in out


def test_noise_is_no_measurement(threads, monkeypatch):
    """A chain that is not slower than its links: there is nothing to choose by."""
    measured = ("by hand", [5.0])
    monkeypatch.setattr("weft.bench.allreduce_tune.measure_call", lambda *_, **__: measured)
    found = tune(_plan(), quiet=True)
    assert found.table is None
    assert found.problem == "oneshot, 1 tokens: 0.0 us; too noisy: raise --iters"


def test_what_cannot_be_tuned_is_refused():
    for change, text in (
        ({"backends": ("oneshot", "collective")}, "backend is 'collective'; auto chooses among"),
        ({"epilogues": ("norm", "fp4")}, "epilogue is 'fp4'"),
        ({"hiddens": (64, 100)}, "hidden is 100"),
        ({"ranks": 1}, "1 ranks"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            _plan(**change)
