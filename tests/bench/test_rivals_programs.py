# SPDX-License-Identifier: Apache-2.0
"""benchmarks/compat/run_rivals_tests.py with a small program."""

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


@pytest.mark.slow
def test_cases_are_counted_by_their_worst_rank(tmp_path, monkeypatch):
    """The script runs with a store of the programs above."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    runner: Any = importlib.import_module(SCRIPT.stem)
    for path, text in {
        "flashinfer/tests/comm/test_small.py": CASES,
        "flashinfer/flashinfer/tllm_enums.py": "SfLayout = None\n",
        "DeepEP/deep_ep/utils/testing.py": "marked = True\nbench_kineto = None\n",
    }.items():
        (tmp_path / "store" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / path).write_text(text)
    monkeypatch.setattr(runner, "STORE", tmp_path / "store")
    monkeypatch.setattr(runner, "GRACE", 0.5)
    program = runner.flashinfer("small", each_rank=True)
    (tmp_path / "out").mkdir()
    line = runner.play(program, 2, True, 600.0, tmp_path / "out", named=False)
    assert (line["cases"], line["passed"], line["failed"], line["skipped"]) == (5, 3, 1, 1)
    assert "rank 1 is not 0" in line["error"]
    assert f"| {program.row} |" in runner.table([json.loads(json.dumps(line))])
