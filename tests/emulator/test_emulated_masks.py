# SPDX-License-Identifier: Apache-2.0
"""The kernels, on CPUs, go on without ranks that died: bit by bit, and without a look at them.

After each recovery the memory of the dead cannot be read or written any more.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests import lowlatency_rounds
from tests.allreduce.test_reduce_recovery import sums
from tests.alltoall.test_recovery import CASE, RANKS, TOKENS
from tests.emulator.emulate import EmulatedEntries, compile_emulated
from tests.emulator.operators import (
    EmulatedAllToAll,
    EmulatedLow,
    compile_alltoall,
    compile_low,
)
from tests.lowlatency.test_lowlatency_recovery import MODES
from tests.recovery import Survivors, run_survivors, surviving, until_broken
from tests.rounds import combining, play
from weft.allreduce.config import ReduceConfig
from weft.allreduce.kernels import ReducePlan
from weft.alltoall.config import AllToAllConfig
from weft.errors import BadExpertId

pytestmark = pytest.mark.slow
ORDER = (2, 0)  # the ranks die in this order
WAYS = ("pull", "push", "fp8")
SIZES = CASE.sizes(TOKENS)


def kill_in_turn(survivors: Survivors, operator: Any, rounds: Callable[[int, bool], None]) -> None:
    """rounds(count, checks): so many rounds of the living, and whether they call `check`."""
    rounds(4, True)
    for dies in ORDER:
        survivors.barrier()
        if survivors.group.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        until_broken(lambda: rounds(1, False))
        survivors.lose(dies, sealed=[operator])
        rounds(8, False)
        if not isinstance(operator, weft.AllReduce):
            with pytest.raises(BadExpertId, match=f"expert of rank {dies}, which is gone: [^(]*$"):
                operator.check()
        rounds(2, True)
    survivors.barrier()


def all_to_all(group: weft.Group, folder: str, library: str, way: str) -> None:
    options = combining(way) | {"split_phase": True}
    with surviving(group, folder) as survivors, weft.AllToAll(group, **SIZES, **options) as a2a:
        a2a._kernels = EmulatedAllToAll(Path(library), a2a.config.shape, group.rank)

        def rounds(count: int, checks: bool) -> None:
            for seed in range(count):
                rows = (None, 6, 6, TOKENS)[seed % 4]
                tokens = tuple(min(n, rows or TOKENS) for n in CASE.tokens)
                case, living = CASE.next(seed=seed, tokens=tokens), survivors.ranks
                play(a2a, case, poison=False, rows=rows, halves=seed % 3 == 1, living=living)
                if checks:
                    a2a.check()

        kill_in_turn(survivors, a2a, rounds)


@pytest.mark.parametrize("way", WAYS)
def test_all_to_alls(ranks, tmp_path, way):
    shape = AllToAllConfig.of(ranks=RANKS, **SIZES, **combining(way)).shape
    args = (str(tmp_path), str(compile_alltoall(shape, tmp_path)), way)
    run_survivors(lambda: ranks(RANKS, "cpu")(all_to_all, *args), tmp_path, [1, 3])


def low_latency(group: weft.Group, folder: str, library: str, name: str) -> None:
    halves = MODES[name].combine == "push"
    mode = replace(MODES[name], more={**MODES[name].more, "split_phase": halves})
    with surviving(group, folder) as survivors, mode.make(group, CASE, TOKENS) as a2a:
        a2a._kernels = EmulatedLow(Path(library), a2a.config.shape)

        def rounds(count: int, checks: bool) -> None:
            for seed in range(count):
                split, living = halves and seed % 2 == 1, survivors.ranks
                case = CASE.next(seed=seed)
                lowlatency_rounds.play(
                    a2a, mode, case, split_phase=split, living=living, checks=checks
                )

        kill_in_turn(survivors, a2a, rounds)


@pytest.mark.parametrize("name", MODES)
def test_low_latency_all_to_alls(ranks, tmp_path, name):
    mode = MODES[name]
    library = str(compile_low(mode.shape(CASE, TOKENS, **mode.more), tmp_path))
    args = (str(tmp_path), library, name)
    run_survivors(lambda: ranks(RANKS, "cpu")(low_latency, *args), tmp_path, [1, 3])


def all_reduce(group: weft.Group, folder: str, library: str, form: str) -> None:
    with (
        surviving(group, folder) as survivors,
        weft.AllReduce(group, max_tokens=70, hidden=256, missing="drop") as ar,
    ):
        ar._kernels = entries = EmulatedEntries(Path(library))
        entries.forms["oneshot"] = form
        for tokens in (1, 3, 5, 70):
            ctas = min(tokens, 4) if form == "oneshot_resident" else tokens
            entries.plans["oneshot", tokens] = ReducePlan(ctas, 32, 1)
        kill_in_turn(survivors, ar, lambda count, checks: sums(ar, survivors.ranks, count))


def test_all_reduces(ranks, tmp_path):
    config = ReduceConfig.of(
        ranks=RANKS, max_tokens=70, hidden=256, dtype=torch.bfloat16, missing="drop"
    )
    library = str(compile_emulated(config, tmp_path))
    for form in ("oneshot", "oneshot_resident"):
        folder = tmp_path / form
        folder.mkdir()
        args = (str(folder), library, form)
        run_survivors(lambda args=args: ranks(RANKS, "cpu")(all_reduce, *args), folder, [1, 3])
