# SPDX-License-Identifier: Apache-2.0
"""`close` gives the memory back there and then, and nothing of weft's waits for the collector."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import weft
from tests.operators import KINDS
from tests.public import FAMILIES, MODES
from weft.errors import CreationFailed
from weft.runtime.kernels import CpuKernels

FEW = 1024  # bytes: tables of experts and single words may stay
Apart = (type, ModuleType, FunctionType, weft.Group)  # from there on all of the process is reached


def mapped() -> int:
    """Shares that are mapped in this process."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        return sum("weft-share" in line for line in maps)


def kept() -> list[str]:
    """What the collector finds in cycles: weft's objects, and tensors."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [
        type(each).__qualname__
        for each in gc.garbage
        if type(each).__module__.startswith("weft") or isinstance(each, torch.Tensor)
    ]
    gc.garbage.clear()
    return found


def reached(what: Any) -> int:
    """Bytes of tensors that an object still holds, but for what its caller gave it."""
    given = [getattr(what, name, None) for name in ("_weights", "_shared", "_correction")]
    seen, found, todo = {id(each) for each in given}, {}, [what]
    while todo:
        each = todo.pop()
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        if id(each) not in seen and not isinstance(each, Apart):
            seen.add(id(each))
            todo += gc.get_referents(each)
    return sum(found.values())


def live_and_let_go(group: weft.Group, name: str) -> dict[str, Any]:
    """What is still there after close, and after an object was dropped that nobody closed."""
    gc.enable()
    MODES[name](group).give_back()  # whatever is made once in a process is made now
    gc.collect()
    gc.disable()
    made = MODES[name](group)
    made.call()
    held = mapped()
    assert held or reached(made.what) > FEW
    made.give_back()
    closed, tensors = mapped(), reached(made.what)
    del made
    cycles = kept()
    made = MODES[name](group)
    made.call()
    if name.startswith("MoeAlltoAll"):  # its lease is given up by close alone
        made.give_back()
    del made
    return {
        "shares held": held,
        "shares after close": closed,
        "tensors after close": tensors >= FEW,
        "in cycles": cycles,
        "shares after del": mapped(),
        "in cycles after del": kept(),
    }


def family_of(group: weft.Group, names: list[str]) -> dict[str, dict[str, Any]]:
    gc.collect()
    gc.freeze()  # what is there already: the collector would look through all of torch each time
    return {name: live_and_let_go(group, name) for name in names}


def fail_to_open(group: weft.Group, name: str) -> tuple[str, int, list[str]]:
    """Rank 1 fails when its heap is there already; what is left once the error was handled."""
    gc.collect()
    gc.freeze()
    gc.disable()
    if group.rank == 1:
        weft.Group.attach = fail  # type: ignore[method-assign, assignment]
    try:
        MODES[name](group)
    except CreationFailed as error:
        said = str(error)
    return said, mapped(), kept()


def fail(self: weft.Group, member: Any) -> None:
    raise MemoryError("no page left")


@pytest.mark.parametrize("name", ["AllToAll pull", "LowLatency", "AllReduce oneshot"])
def test_an_opening_that_failed_keeps_nothing(ranks: Callable[..., Any], name: str) -> None:
    for said, left, cycles in ranks(2, "cpu")(fail_to_open, name):
        assert "failed on rank 1 of 2: MemoryError: no page left" in said
        assert (left, cycles) == (0, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_close_gives_the_memory_back_there_and_then(ranks: Callable[..., Any], family: str) -> None:
    names = [name for name in MODES if name.split()[0] == family]
    nothing: dict[str, Any] = {
        "shares held": 2,
        "shares after close": 0,
        "tensors after close": False,
        "in cycles": [],
        "shares after del": 0,
        "in cycles after del": [],
    }
    for found in ranks(2, "cpu")(family_of, names, timeout=900.0):
        for name in names:
            held = 12 if name == "Buffer normal" else nothing["shares held"]  # of six all-to-alls
            assert found[name] == nothing | {"shares held": held}, name


def unload_where_another_fails(group: weft.Group, name: str) -> None:
    wrong: dict[str, Any] = {"hidden": 0} if group.rank == 1 else {}
    with pytest.raises(CreationFailed, match="rank 1.*hidden"):
        KINDS[name].open(group, **wrong)


@pytest.mark.parametrize("name", ["pull", "receiver", "oneshot"])
def test_ranks_that_loaded_kernels_unload_them_where_another_rank_fails(name, ranks, monkeypatch):
    closed: list[CpuKernels] = []
    monkeypatch.setattr(CpuKernels, "close", lambda entries: closed.append(entries))
    ranks(3, "threads")(unload_where_another_fails, name)
    assert len({id(each) for each in closed}) == 2
