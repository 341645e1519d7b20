# SPDX-License-Identifier: Apache-2.0
"""benchmarks/compat/run_rivals_tests.py with small programs: each is run, counted and ended."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compat" / "run_rivals_tests.py"
CASES = """\
import pytest, torch
from mpi4py import MPI
import flashinfer.comm as comm
from flashinfer.comm import MoeAlltoAll

def test_cuda_is_replaced_by_cpu():
    assert MoeAlltoAll.__module__.startswith("weft.")
    assert torch.cuda.device_count() == 2
    assert torch.zeros(1, device="cuda:1").cuda().device.type == "cpu"

def test_ranks_speak():
    world = MPI.COMM_WORLD
    assert world.allgather(world.Get_rank()) == [0, 1]
    assert world.bcast(world.Get_rank() + 5, root=1) == 6

def test_one_rank_says_why():
    assert MPI.COMM_WORLD.Get_rank() == 0, "rank 1 is not 0"

@pytest.mark.skip(reason="made up")
def test_skipped(): ...

def test_unsupported_calls_are_missing():
    with pytest.raises(AttributeError, match="weft.compat.flashinfer"):
        comm.of_nobody
"""


@pytest.fixture
def runner(tmp_path, monkeypatch) -> Any:
    """Import the script as a module, with a store of the programs above."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    module = importlib.import_module(SCRIPT.stem)
    for path, text in {
        "flashinfer/tests/comm/test_made.py": CASES,
        "flashinfer/flashinfer/tllm_enums.py": "SfLayout = None\n",
        "DeepEP/deep_ep/utils/testing.py": "marked = True\nbench_kineto = None\n",
    }.items():
        (tmp_path / "store" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / path).write_text(text)
    monkeypatch.setattr(module, "STORE", tmp_path / "store")
    monkeypatch.setattr(module, "GRACE", 0.5)
    return module


def line_of(module: Any, program: Any, out: Path, cpu: bool = False) -> dict[str, Any]:
    """Return the record of a program; it imports torch to run on a CPU."""
    out.mkdir()
    line: dict[str, Any] = module.play(program, 2, cpu, 600.0, out, named=False)
    assert f"| {program.row} |" in module.table([json.loads(json.dumps(line))])
    return line


@pytest.mark.slow
def test_cases_are_counted_by_their_worst_rank(runner, tmp_path):
    line = line_of(runner, runner.flashinfer("made", each_rank=True), tmp_path / "out", cpu=True)
    assert (line["cases"], line["passed"], line["failed"], line["skipped"]) == (5, 3, 1, 1)
    assert "rank 1 is not 0" in line["error"]
