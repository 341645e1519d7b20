"""The all-reduce bench, its rivals and the tuner, run for real on CPU ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from dataclasses import replace

import pytest
import torch

import weft
from tests.bench.test_allreduce_cases import SMALL
from weft import cli
from weft.bench import allreduce_rivals
from weft.bench.allreduce import run
from weft.bench.allreduce_adapters import FlashInferReduce, SymmetricReduce, forbid_multicast
from weft.bench.allreduce_rivals import REDUCE_RIVALS, ReduceRival, measure_reduce_rivals
from weft.bench.allreduce_trial import Rows, make_rows
from weft.bench.allreduce_tune import tune, tuning_plan
from weft.errors import DriverError, InvalidArgument
from weft.ops.allreduce_table import Table

EPILOGUES = ("none", "norm", "fp8-static", "fp8-token", "fp8-group")
SHELL = ("--device", "cpu", "--ranks", "2", "--quiet", "--iters", "3", "--hidden", "64")


@pytest.fixture
def weft_command(monkeypatch, capsys):
    """`weft_command(*arguments)` -> (exit code, stdout, stderr), in this process."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *arguments])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capsys.readouterr()
        return int(leaving.value.code or 0), out, err

    return call


@pytest.fixture
def threads(monkeypatch):
    """Ranks that a test may spoil: threads of this process."""
    launch = weft.launch

    def as_threads(*args, **options):
        return launch(*args, **{**options, "device": "threads"})

    for module in ("allreduce", "allreduce_rivals", "allreduce_tune"):
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


def test_what_cannot_be_tuned_is_refused():
    for change, text in (
        ({"backends": ("oneshot", "collective")}, "backend is 'collective'; auto chooses among"),
        ({"epilogues": ("norm", "fp4")}, "epilogue is 'fp4'"),
        ({"hiddens": (64, 100)}, "hidden is 100"),
        ({"ranks": 1}, "1 ranks"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            _plan(**change)


class _Library:
    """torch's sums on threads; `spoil` is added to what rank 1 gets."""

    spoil = 0.0

    def __init__(self, group, settings, most) -> None:
        assert most == 5
        self.group, self.settings = group, settings

    def call(self, rows):
        everyone = [make_rows(self.settings, len(rows.x), rank) for rank in range(self.group.size)]

        def reduce():
            found = weft.reference.allreduce_fused(
                [each.x for each in everyone], rows.residual, rows.weight
            )
            return found.norm + self.spoil * self.group.rank

        return reduce


def _present(monkeypatch, *found):
    monkeypatch.setattr(allreduce_rivals, "REDUCE_RIVALS", found)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)


_FAKE = ReduceRival("Loom", "loom", "torch", _Library, devices=("cpu",), least=lambda n: n, most=9)


def test_a_library_is_measured(threads, monkeypatch):
    _present(monkeypatch, _FAKE)
    (found,) = measure_reduce_rivals(replace(SMALL, tokens=(1, 5, 20)))
    assert (found.name, found.status) == ("Loom", "measured")
    assert list(found.samples_us) == [5], "1 is below its least, 20 above its most"
    assert found.peer("2026-11-20").us[5] > 0
    assert found.library.startswith("Loom 2")


@pytest.mark.parametrize("spoil", [1.0, float("nan")])
def test_a_wrong_library_is_not_timed(threads, monkeypatch, spoil):
    _present(monkeypatch, _FAKE)
    monkeypatch.setattr(_Library, "spoil", spoil)
    (found,) = measure_reduce_rivals(SMALL)
    assert found.status.startswith("check failed, 5 tokens: rank ")
    assert found.samples_us == {}


def test_a_library_that_cannot_is_a_status(threads, monkeypatch):
    def no_gpu(group, settings, most):
        raise DriverError("no such GPU")

    _present(monkeypatch, replace(_FAKE, make=no_gpu))
    (found,) = measure_reduce_rivals(SMALL)
    assert "no such GPU" in found.status
    for change, settings, text in (
        ({"devices": ("cuda",)}, SMALL, "needs GPUs"),
        ({"ranks": (4, 8)}, SMALL, "serves 4, 8 ranks, not 2"),
        ({}, replace(SMALL, tokens=(1,)), "serves none of these sizes"),
        ({}, replace(SMALL, epilogue="fp8-token"), "not compared with epilogue fp8-token"),
    ):
        _present(monkeypatch, replace(_FAKE, **change))
        assert [run.status for run in measure_reduce_rivals(settings)] == [text]
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert [run.status for run in measure_reduce_rivals(SMALL)] == ["not installed"]


def test_nobody_may_use_multicast(monkeypatch):
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.setenv(name, "unset")
    forbid_multicast()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1"
    names = [rival.name for rival in REDUCE_RIVALS]
    assert len(names) == len(set(names)) == 5


def flashinfer(group: weft.Group, epilogue: str, one_shot: bool) -> None:
    """The adapter against a stand-in that takes these calls as FlashInfer documents them."""
    made, calls = {}, []

    def create(**given):
        made.update(given)
        return "workspace"

    def fusion(*, input, workspace, pattern, launch_with_pdl, use_oneshot, fp32_acc, **others):
        assert (workspace, launch_with_pdl, fp32_acc) == ("workspace", True, True)
        calls.append((pattern, use_oneshot))
        if pattern == 0:
            others["output"].copy_(input)
        else:
            others["norm_out"].copy_(input * 2)
            others["residual_out"].copy_(others["residual_in"])
            assert others["rms_gamma"].shape == (SMALL.hidden,)

    comm = types.ModuleType("flashinfer.comm")
    comm.create_allreduce_fusion_workspace = create  # type: ignore[attr-defined]
    comm.allreduce_fusion = fusion  # type: ignore[attr-defined]
    memory = types.ModuleType("flashinfer.comm.mnnvl")
    memory.TorchDistBackend = lambda group: ("backend", group)  # type: ignore[attr-defined]
    sys.modules |= {"flashinfer.comm": comm, "flashinfer.comm.mnnvl": memory}
    settings = replace(SMALL, epilogue=epilogue)
    library = FlashInferReduce(group, settings, 5, one_shot=one_shot)
    assert made["backend"] == "trtllm", "auto and mnnvl probe for multicast"
    assert (made["world_size"], made["rank"], made["max_token_num"]) == (2, group.rank, 5)
    rows = make_rows(settings, 3, group.rank)
    answer = library.call(Rows(rows.x, rows.residual, rows.weight))()
    assert torch.equal(answer, rows.x if epilogue == "none" else rows.x * 2)
    assert calls == [(0 if epilogue == "none" else 1, one_shot)]


@pytest.mark.parametrize(("epilogue", "one_shot"), [("none", True), ("norm", False)])
def test_flashinfer_is_called_as_documented(ranks, epilogue, one_shot):
    ranks(2, "cpu")(flashinfer, epilogue, one_shot)


def symmetric(group: weft.Group, one_shot: bool) -> None:
    """The adapter with stand-ins for torch's operators, which need GPUs."""
    memory = types.ModuleType("torch.distributed._symmetric_memory")
    memory.empty = torch.empty  # type: ignore[attr-defined]
    met = []
    memory.rendezvous = lambda tensor, name: met.append(name)  # type: ignore[attr-defined]
    sys.modules["torch.distributed._symmetric_memory"] = memory
    ops = types.SimpleNamespace(
        one_shot_all_reduce=lambda x, op, name: x + 1,
        two_shot_all_reduce_=lambda x, op, name: x.add_(2),
    )
    setattr(torch.ops, "symm_mem", ops)  # noqa: B010
    settings = replace(SMALL, epilogue="none")
    library = SymmetricReduce(group, settings, 5, one_shot=one_shot)
    rows = make_rows(settings, 3, group.rank)
    answer = library.call(rows)()
    assert met == [group.process_group().group_name]
    assert torch.equal(answer, rows.x + (1 if one_shot else 2))


@pytest.mark.parametrize("one_shot", [True, False])
def test_symmetric_memory_is_called_as_documented(ranks, one_shot):
    ranks(2, "cpu")(symmetric, one_shot)
