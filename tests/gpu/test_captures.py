# SPDX-License-Identifier: Apache-2.0
"""Creating and freeing objects while a graph is captured leaves the graph correct.

`weft.cuda.driver.relaxed_capture` says why it works.
"""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import weft
from tests.public import HIDDEN, MODES, MOST, SIZES, PublicObject, all_to_all
from weft.cuda.driver import relaxed_capture
from weft.errors import WeftError

pytestmark = pytest.mark.gpu

STRICT = ("global", "thread_local")
NAMES = (
    *("AllToAll push", "AllToAll choices", "ExpertGroups", "LowLatency", "LowLatency plain"),
    *("AllReduce twoshot", "MoE rank gemm_push", "MoE expert gemm_push", "Buffer", "MoeAlltoAll"),
)
assert set(NAMES) <= set(MODES)  # noticed where there is no GPU, too
SLEEP = 1_000_000_000  # cycles: about half a second
LARGE = 512 << 20

need_two = pytest.mark.gpu(2)
RANKS = [1, pytest.param(2, marks=need_two)]


@contextmanager
def captured(group: weft.Group, mode: str) -> Iterator[None]:
    """Capture the body; at the end the graph is replayed and its result checked."""
    x = torch.zeros(4096, dtype=torch.float32, device=group.device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x * 2
        yield
        y = y + 1
    for value in range(1, 4):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2.0 * value + 1] * len(x)


def run(where: str, step: Callable[[], None]) -> None:
    """Run here, or in a thread to its end, and raise its error here.

    where: "here"; "elsewhere", in a thread that knows no GPU; "there", in one that works on this.
    """
    if where == "here":
        step()
        return
    device = torch.cuda.current_device()

    def body() -> None:
        if where == "there":
            torch.cuda.set_device(device)
        step()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(body).result()


def release(how: str, box: list[PublicObject]) -> None:
    if how == "close":
        box[0].give_back()
    elif how == "abort":
        box[0].what.history()
        box[0].what.abort()
        box[0].give_back()
    elif how == "cycle":
        ring: list[Any] = [*box]
        ring.append(ring)
        box.clear()
        del ring
        gc.collect()
    else:
        box.clear()


def ways_of(name: str) -> tuple[str, ...]:
    aborts = name.split()[0] in ("AllToAll", "LowLatency", "AllReduce")
    return ("close", "drop", "cycle", *(["abort"] * aborts))


def die_in_captures(group: weft.Group, name: str) -> list[str]:
    """Release objects in every way, place and mode; return the memory that was not freed."""
    shares: list[Any] = []
    opened = weft.Heap.__init__

    def noted(self: weft.Heap, *args: Any) -> None:
        opened(self, *args)
        shares.append((self._shares, self._failures))

    weft.Heap.__init__ = noted  # type: ignore[method-assign,assignment]
    left = []
    for mode in STRICT:
        for where in ("here", "elsewhere"):
            for how in ways_of(name):
                box = [MODES[name](group)]
                box[0].call()
                torch.cuda.synchronize()
                group.barrier()
                gc.collect()
                gc.disable()
                with captured(group, mode):
                    run(where, lambda how=how, box=box: release(how, box))  # type: ignore[misc]
                    for held, failures in shares:
                        if held._device is not None or failures:
                            left.append(f"{mode}, {where}, {how}: {failures}")
                assert shares
                gc.enable()
                box.clear()
                shares.clear()
                group.barrier()
    return left


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_an_object_freed_in_a_capture_does_not_break_it(
    ranks: Callable[..., Any], name: str, count: int
) -> None:
    if count == 1 and "AllReduce" in name:
        pytest.skip("an all-reduce takes two ranks")
    assert ranks(count, "cuda")(die_in_captures, name, timeout=600.0) == [[]] * count


def free_a_large_heap(group: weft.Group, mode: str, where: str) -> int:
    """Return the bytes that were freed while a graph was captured."""
    heap = weft.Heap.create(group, LARGE)
    box = [heap.tensor((16,), torch.int32)]
    torch.cuda.synchronize()
    group.barrier()
    before = torch.cuda.mem_get_info()[0]
    with captured(group, mode):

        def step() -> None:
            heap.close()
            box.clear()  # the last view

        run(where, step)
        group.barrier()  # what is mapped at a peer is freed when it has let go, too
        with relaxed_capture():
            after = torch.cuda.mem_get_info()[0]
    return after - before


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("mode", STRICT)
def test_memory_is_freed_in_the_middle_of_a_capture(
    ranks: Callable[..., Any], mode: str, where: str, count: int
) -> None:
    for gained in ranks(count, "cuda")(free_a_large_heap, mode, where):
        assert gained > LARGE // 2  # the capture itself takes some


def free_under_a_kernel(group: weft.Group, busy: str, mode: str | None) -> tuple[bool, bool]:
    """Free a heap while a kernel writes it; return whether the kernel ran, and has ended."""
    heap = weft.Heap.create(group, LARGE)
    view = heap.tensor((LARGE,), torch.uint8)
    stream, end = torch.cuda.Stream(), torch.cuda.Event()
    view.fill_(1)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(SLEEP)
        view.fill_(2)
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    group.barrier()
    seen: list[bool] = []

    def start() -> None:
        with torch.cuda.stream(stream):
            if busy == "graph":
                graph.replay()
            else:
                torch.cuda._sleep(SLEEP)
                view.fill_(2)
            end.record()

    def step() -> None:
        nonlocal view
        with relaxed_capture():
            seen.append(not end.query())
        heap.close()
        del view
        with relaxed_capture():
            seen.append(end.query())

    def both() -> None:
        start()
        step()

    if mode is None:
        both()
    else:
        with captured(group, mode):
            run("there", both)
    torch.cuda.synchronize()
    return seen[0], seen[1]


@pytest.mark.parametrize("busy", ["stream", "graph"])
@pytest.mark.parametrize("mode", [None, *STRICT])
def test_memory_is_not_freed_under_a_running_kernel(
    ranks: Callable[..., Any], mode: str | None, busy: str
) -> None:
    assert ranks(1, "cuda")(free_under_a_kernel, busy, mode) == [(True, True)]


def unload_under_a_kernel(group: weft.Group) -> tuple[bool, bool]:
    made = MODES["AllToAll push"](group)
    made.call()
    stream, end = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    group.barrier()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        made.call()
        end.record()
    running = not end.query()
    made.give_back()
    return running, end.query()


@pytest.mark.parametrize("count", RANKS)
def test_code_is_not_unloaded_under_a_running_kernel(ranks: Callable[..., Any], count: int) -> None:
    assert ranks(count, "cuda")(unload_under_a_kernel) == [(True, True)] * count


OPENINGS: dict[str, Callable[[weft.Group, weft.AllToAll], Any]] = {
    "Heap": lambda group, _: weft.Heap.create(group, 4 << 20),
    "AllToAll": lambda group, _: all_to_all(group, profile=True),
    "LowLatencyAllToAll": lambda group, _: weft.LowLatencyAllToAll(group, **SIZES, profile=True),
    "AllReduce": lambda group, _: weft.AllReduce(group, max_tokens=MOST, hidden=HIDDEN),
    "ExpertGroups": lambda _, a2a: weft.ExpertGroups(a2a, align=8),
}


def open_in_captures(group: weft.Group, name: str) -> list[str]:
    """Open and close in another thread; return what opening in the capturing thread raises."""
    reported = []
    with all_to_all(group) as a2a:
        torch.cuda.synchronize()
        for mode in STRICT:
            torch.cuda.empty_cache()  # so that memory for it must come from the driver
            with captured(group, mode):
                run("there", lambda: OPENINGS[name](group, a2a).close())
            with captured(group, mode):
                try:
                    OPENINGS[name](group, a2a).close()
                except WeftError as error:
                    reported.append(str(error))
            group.barrier()
    return reported


@pytest.mark.parametrize("count", RANKS)
@pytest.mark.parametrize("name", OPENINGS)
def test_objects_open_during_but_not_inside_a_capture(
    ranks: Callable[..., Any], name: str, count: int
) -> None:
    if count == 1 and name == "AllReduce":
        pytest.skip("an all-reduce takes two ranks")
    for reported in ranks(count, "cuda")(open_in_captures, name, timeout=600.0):
        if name == "Heap":  # it needs no kernel, and nothing of it is written into a graph
            assert reported == []
        else:
            assert len(reported) == len(STRICT)
            assert all("during a capture of this stream" in text for text in reported)
