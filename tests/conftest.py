# SPDX-License-Identifier: Apache-2.0
"""Fixtures: `ranks(n, device)` runs one body on n ranks, `weft_command` runs the CLI."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import weft
from tests import patience  # noqa: F401  (deadlines of this process)
from tests.kept import cache_of
from tests.ranks import run_ranks
from weft.cli import commands as cli
from weft.launcher import processes

HERE = Path(__file__).parent

# Workers and ranks share the cores: a second thread of each would spin for the first one's sake. On
# two busy cores tests/moe/test_layer.py takes a quarter of the time by one thread.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of programs that tests start

# How long an example takes says how busy the machine is.
settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not of GPUs: what chooses a device by itself takes the CPU."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """Set a compile cache that all workers share, and later runs of the same sources (kept.py)."""
    folder = cache_of(HERE.parent)
    if folder is None:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if hasattr(request.config, "workerinput") else base) / "weft-cache"
        folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_ready() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_PRELOAD", [*processes._PRELOAD, "tests.ready"])
        yield


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed torch, so that tests draw the same numbers in every run; ranks do too (ready.py)."""
    torch.manual_seed(0)


@pytest.fixture
def ranks() -> Callable[[int, str], Callable[..., list[Any]]]:
    """Return `ranks(4, "cpu")(body, *args)`, which runs `body(group, *args)` on 4 ranks."""
    return lambda count, device: functools.partial(run_ranks, count, device)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Start the ranks of benchmarks as threads of this process, so that tests can patch them."""
    launch = weft.launch

    def as_threads(*args: Any, **options: Any) -> Any:
        return launch(*args, **{**options, "device": "threads"})

    monkeypatch.setattr("weft.bench.harness.launch", as_threads)
    return monkeypatch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need more GPUs than this machine has."""
    gpus = torch.cuda.device_count()
    without = [item for item in items if gpus_needed(item) > gpus]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if gpus_needed(item) <= gpus]


def gpus_needed(item: pytest.Item) -> int:
    """Return the number of GPUs that a test needs: n for `gpu(n)`, 1 for `gpu`."""
    return max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), default=0)


@pytest.fixture
def weft_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return `weft_command(*arguments)`, which runs the CLI here: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *arguments])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capsys.readouterr()
        return int(leaving.value.code or 0), out, err

    return run
