# SPDX-License-Identifier: Apache-2.0
"""`close` frees memory at once, and no object of weft waits for the garbage collector."""

import gc
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import weft
from tests.baseline import shares_mapped
from tests.operators import KINDS
from tests.public import FAMILIES, MODES
from tests.ranks import on_ranks
from weft.errors import CreationFailed
from weft.runtime.kernels import CpuKernels

FEW = 1024  # bytes: tables of experts and single words may stay
Apart = (type, ModuleType, FunctionType, weft.Group)  # from there on all of the process is reached


def kept() -> list[str]:
    """Return weft objects and tensors that the collector finds in cycles."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    result = [
        type(each).__qualname__
        for each in gc.garbage
        if type(each).__module__.startswith("weft") or isinstance(each, torch.Tensor)
    ]
    gc.garbage.clear()
    return result


def reached(what: Any) -> int:
    """Return the bytes of tensors that an object still holds, except for its arguments."""
    inputs = [getattr(what, name, None) for name in ("_weights", "_shared", "correction")]
    seen, result, todo = {id(each) for each in inputs}, {}, [what]
    while todo:
        each = todo.pop()
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            result[storage.data_ptr()] = storage.nbytes()
        if id(each) not in seen and not isinstance(each, Apart):
            seen.add(id(each))
            todo += gc.get_referents(each)
    return sum(result.values())


def close_and_drop(group: weft.Group, name: str) -> None:
    gc.enable()
    MODES[name](group).give_back()  # whatever is made once in a process is made now
    gc.collect()
    gc.disable()
    made = MODES[name](group)
    made.call()
    # "Buffer normal" has six all-to-alls.
    assert shares_mapped() == (12 if name == "Buffer normal" else 2)
    made.give_back()
    assert (shares_mapped(), reached(made.what) >= FEW) == (0, False), name
    del made
    assert kept() == [], name
    made = MODES[name](group)
    made.call()
    if name.startswith("MoeAlltoAll"):  # its lease is given up by close alone
        made.give_back()
    del made
    assert (shares_mapped(), kept()) == (0, []), name


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2, "cpu", timeout=900.0)
def test_close_frees_memory_at_once(group: weft.Group, family: str) -> None:
    gc.collect()
    gc.freeze()  # what is there already: the collector would look through all of torch each time
    for name in MODES:
        if name.split()[0] == family:
            close_and_drop(group, name)


def fail(self: weft.Group, member: Any) -> None:
    raise MemoryError("no page left")


@pytest.mark.parametrize("name", ["AllToAll pull", "LowLatency", "AllReduce oneshot"])
@on_ranks(2, "cpu")
def test_a_failed_constructor_keeps_nothing(group: weft.Group, name: str) -> None:
    """Rank 1 fails after its heap was made."""
    gc.collect()
    gc.freeze()
    gc.disable()
    if group.rank == 1:
        weft.Group.attach = fail  # type: ignore[method-assign]
    try:
        MODES[name](group)
    except CreationFailed as error:
        text = str(error)
    assert "failed on rank 1 of 2: MemoryError: no page left" in text
    assert (shares_mapped(), kept()) == (0, [])


@pytest.mark.parametrize("name", ["pull", "receiver", "oneshot"])
def test_ranks_that_loaded_kernels_unload_them_where_another_rank_fails(name, ranks, monkeypatch):
    gc.collect()  # closes what earlier tests dropped
    closed: list[CpuKernels] = []
    monkeypatch.setattr(CpuKernels, "close", lambda entries: closed.append(entries))

    def body(group: weft.Group) -> None:
        wrong: dict[str, Any] = {"hidden": 0} if group.rank == 1 else {}
        with pytest.raises(CreationFailed, match="rank 1.*hidden"):
            KINDS[name].open(group, **wrong)

    ranks(3, "threads")(body)
    assert len({id(each) for each in closed}) == 2
