# SPDX-License-Identifier: Apache-2.0
"""Heaps of CPU ranks: addresses, views, guards, failing creations, and what is given back."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.headers import HEADER_BYTES
from tests.memory.baseline import raised, shares_mapped, state
from weft.errors import (
    InvalidArgument,
    OutOfOrder,
    RankFailed,
)
from weft.memory.heap import Heap
from weft.memory.launch import launch

DEVICES = ("threads", "cpu")
PAGE = os.sysconf("SC_PAGESIZE")


def write_to_everyone(group, size):
    with Heap.create(group, size) as heap:
        assert heap.stride == -(-size // PAGE) * PAGE + PAGE
        zero = int(sum(heap.tensor((size,), torch.uint8, rank=r).sum() for r in range(group.size)))
        group.barrier()
        for rank in range(group.size):
            heap.tensor((1,), torch.uint8, offset=group.rank, rank=rank).fill_(group.rank + 1)
        group.barrier()
        got = heap.tensor((group.size,), torch.uint8).tolist()
        last = heap.tensor((1,), torch.uint8, offset=size - 1)
        last.fill_(7)
        group.barrier()
        return (
            zero,
            got,
            heap.generation,
            heap.address(group.rank) - heap.base == (group.rank * heap.stride),
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [64, PAGE, PAGE + 1])
def test_every_rank_writes_into_every_share(device, size):
    expected = (0, [1, 2, 3], 1, True)
    assert launch(write_to_everyone, size, ranks=3, device=device) == [expected] * 3


def alone(body, *args):
    """Run `body(group, *args)` on one rank in this process."""
    return launch(body, *args, ranks=1, device="threads")[0]


def make_views(group):
    with Heap.create(group, 256) as heap:
        own = heap.tensor((64,), torch.int32)
        own.copy_(torch.arange(64))
        assert heap.tensor((2, 3), torch.int32, offset=8).tolist() == [[2, 3, 4], [5, 6, 7]]
        strided = heap.tensor((2, 3), torch.int32, offset=4, stride=(16, 2))
        assert strided.tolist() == [[1, 3, 5], [17, 19, 21]]
        assert heap.tensor((2, 2), torch.int32, stride=(0, 1)).tolist() == [[0, 1], [0, 1]]
        assert heap.tensor((), torch.int32, offset=12).item() == 3
        assert heap.tensor((0, 5), torch.float32, offset=256).shape == (0, 5)
        assert heap.tensor((32,), torch.bfloat16, offset=192).dtype is torch.bfloat16
        assert heap.tensor((256,), torch.float8_e4m3fn).numel() == 256
        assert heap.tensor((1,), torch.int64, offset=8).data_ptr() == heap.address(0) + 8
        refused = [
            lambda: heap.tensor((257,), torch.uint8),
            lambda: heap.tensor((1,), torch.int32, offset=256),
            lambda: heap.tensor((1,), torch.int32, offset=-4),
            lambda: heap.tensor((1,), torch.int32, offset=2),
            lambda: heap.tensor((2, 2), torch.int32, stride=(62, 2)),
            lambda: heap.tensor((2, 2), torch.int32, stride=(1,)),
            lambda: heap.tensor((2,), torch.int32, stride=(-1,)),
            lambda: heap.tensor((-1,), torch.int32),
            lambda: heap.tensor((1,), torch.int32, rank=1),
            lambda: heap.tensor((1,), torch.int32, rank=-1),
            lambda: heap.tensor((1 << 62,), torch.int64),
        ]
        return [raised(call)[:2] for call in refused]


def test_views_lie_where_they_say_and_never_outside():
    refused = alone(make_views)
    assert {kind for kind, _ in refused} == {InvalidArgument.__name__}
    assert "ends at byte 257 and the share has 256" in refused[0][1]
    assert "align the offset" in refused[3][1]
    assert "rank is 1; it must be an integer in 0..0" in refused[8][1]


def overrun(group, rank):
    heap = Heap.create(group, PAGE)
    group.barrier()
    if group.rank == 1:
        ctypes.memset(heap.address(rank) + PAGE, 1, 1)
    group.barrier()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_write_behind_a_share_faults(rank):
    with pytest.raises(RankFailed, match="rank 1 of 3 died: .*SIGSEGV"):
        launch(overrun, rank, ranks=3)


def use_after_close(group):
    heap = Heap.create(group, HEADER_BYTES)
    heap.close()
    heap.close()
    calls = [
        lambda: heap.tensor((1,), torch.uint8),
        lambda: heap.address(0),
        heap.header,
        lambda: heap.mailbox,
    ]
    return [raised(call)[:2] for call in calls]


def test_a_closed_heap_refuses():
    for kind, text in alone(use_after_close):
        assert kind == OutOfOrder.__name__
        assert "the heap of generation 1 is closed" in text


def outlive(group):
    before = shares_mapped()  # of tests before this one in the same process
    heap = Heap.create(group, 4 * PAGE)
    view = heap.tensor((2, 8), torch.int32).T[1:]
    page = heap.mailbox.view()
    heap.close()
    mapped = [shares_mapped()]
    view.fill_(5)
    page[7] = 1
    seen = int(view.sum())
    del view
    mapped.append(shares_mapped())
    del page
    mapped.append(shares_mapped())
    return seen, [count - before for count in mapped]


def test_views_keep_the_memory_past_close():
    gc.collect()  # a collection in the middle would free what is counted as there before
    assert alone(outlive) == (70, [1, 1, 0])


def use_mailbox(group):
    with Heap.create(group, 64) as heap:
        page = heap.mailbox.view()
        assert (len(page), page.readonly, page.format) == (4096, False, "B")
        assert bytes(page) == bytes(4096)
        page[5] = 9
        word = ctypes.c_uint8.from_address(heap.mailbox.host + 5).value
        return word, heap.mailbox.host == heap.mailbox.device, heap.mailbox.host % 4096


def test_the_mailbox_is_one_zeroed_page_of_host_memory():
    assert alone(use_mailbox) == (9, True, 0)


def read_header_of_the_dead(group):
    heap = Heap.create(group, HEADER_BYTES + 1)
    heap.tensor((HEADER_BYTES,), torch.uint8).fill_(group.rank + 1)
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert raised(group.barrier)[0] == "RendezvousFailed"
    return heap.header(1) == bytes([2]) * HEADER_BYTES, heap.header()[:2]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_header_of_a_dead_rank_can_be_read(device):
    told = launch(read_header_of_the_dead, ranks=2, device=device, tolerate_deaths=True)
    assert told == [(True, b"\x01\x01"), None]


def small_header(group):
    with Heap.create(group, HEADER_BYTES - 1) as heap:
        return raised(heap.header)[:2]


def test_a_share_without_room_for_a_header_says_so():
    kind, text = alone(small_header)
    assert kind == InvalidArgument.__name__
    assert f"a header takes {HEADER_BYTES}" in text


def create_and_close(group, times):
    during = 0

    def once():
        nonlocal during
        with Heap.create(group, 10_000) as heap:
            heap.tensor((8,), torch.float32).fill_(1.0)
            group.barrier()
            during = shares_mapped()

    for _ in range(3):  # what is imported, mapped and cached at first use
        once()
    before = state()
    for _ in range(times):
        once()
    dropped = Heap.create(group, 10_000)
    del dropped
    now = state()
    # The allocator maps a page of its own now and then; a share that stays would be twenty.
    return now[:2] <= before[:2] and now[2] - before[2] < times // 2, during


def test_creating_and_closing_gives_everything_back():
    assert launch(create_and_close, 20, ranks=3) == [(True, 3)] * 3
    before = state()[:2]
    launch(create_and_close, 5, ranks=3, device="threads")
    assert state()[:2] == before


def close_alone(group):
    """Closing never waits: the others still read and write the share that is gone for its owner."""
    heap = Heap.create(group, 64)
    if group.rank == 0:
        heap.tensor((1,), torch.int32).fill_(41)
        heap.close()
        group.barrier()
        return None
    group.barrier()
    theirs = heap.tensor((1,), torch.int32, rank=0)
    theirs += 1
    return int(theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_share_lives_as_long_as_any_rank_maps_it(device):
    assert launch(close_alone, ranks=2, device=device) == [None, 42]


def leave_open(group):
    group.keep = Heap.create(group, 64)
    child = os.fork()
    if child == 0:
        group.keep.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    group.keep.tensor((1,), torch.uint8).fill_(1)
    return int(group.keep.tensor((1,), torch.uint8))


def test_a_forked_child_may_close_its_copy():
    assert launch(leave_open, ranks=2) == [1, 1]


LEFT_OPEN = """
import ctypes, os, torch
from weft.memory.dlpack import tensor_at
from weft.memory.group import Group
from weft.memory.heap import Heap
from weft.memory.meeting import Meeting

group = Group.from_meeting(
    Meeting.open(), rank=0, size=1, device=torch.device("cpu"), timeout=5.0
)
heap = Heap.create(group, 4096)
view = heap.tensor((4,), torch.int32).fill_(1)
page = heap.mailbox.view()
other = tensor_at(heap.base, 64, torch.device("cpu"), heap)
cycle = [heap, view, other]
cycle.append(cycle)
"""


def test_a_process_may_end_without_closing_anything():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def generations(group):
    heaps = [Heap.create(group, 64) for _ in range(3)]
    found = [heap.generation for heap in heaps]
    raised(Heap.create, group, 0)
    for heap in heaps:
        heap.close()
    return found


def test_generations_are_equal_on_all_ranks():
    assert launch(generations, ranks=2, device="threads") == [[1, 2, 3]] * 2


EDGES = (0, 1, 7, 8, 255, 256, 257, 2048, 1 << 31, 1 << 48, (1 << 63) - 1, 1 << 64)
ODD = (None, True, 1.5, "3", *EDGES, *(-edge for edge in EDGES[1:]))
DTYPES = tuple(each for each in vars(torch).values() if isinstance(each, torch.dtype))


def use_at_random(group, seed):
    """Every access is inside the share, or an InvalidArgument."""
    random = Random(seed)

    def number() -> Any:
        return random.choice(ODD) if random.random() < 0.3 else random.randrange(300)

    refused = 0
    ranks: tuple[Any, ...] = (0, 0, 0, None, 1, 1 << 64, "a")
    data: tuple[Any, ...] = (
        b"",
        b"1",
        b"x" * 8,
        b"y" * 2048,
        b"z" * 2049,
        bytearray(3),
        memoryview(b"abcd")[::2],
    )
    data += (None, "text", 3, torch.zeros(2))
    with Heap.create(group, 256) as heap, Heap.create(group, 256) as other:
        start = heap.address(0)
        for _ in range(3000):
            sizes = [number() for _ in range(random.randrange(4))]
            steps = random.choice((None, [number() for _ in sizes], [number()]))
            where, rank = number(), random.choice(ranks)
            try:
                view = heap.tensor(
                    sizes, random.choice(DTYPES), offset=where, rank=rank, stride=steps
                )
                if view.numel():
                    last = sum(
                        (n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True)
                    )
                    end = view.data_ptr() + (last + 1) * view.element_size()
                    assert start <= view.data_ptr() < end <= start + 256
            except InvalidArgument:
                refused += 1
            try:
                heap.write(rank, number(), random.choice(data))
            except InvalidArgument:
                refused += 1
        assert int(other.tensor((256,), torch.uint8).sum()) == 0
    return refused


def test_no_access_leaves_the_share():
    seed = Random().randrange(1 << 32)
    print("seed", seed)
    assert alone(use_at_random, seed) > 1000


def write_bytes(group):
    with Heap.create(group, 4096) as heap:
        heap.write(0, 4094, b"ab")
        refused = [
            lambda: heap.write(0, 4095, b"ab"),
            lambda: heap.write(0, -1, b"a"),
            lambda: heap.write(0, 0, bytes(2049)),  # a GPU stages them in half a page
            lambda: heap.write(1, 0, b"a"),
            lambda: heap.write(0, 0, "a"),  # type: ignore[arg-type]
        ]
        return bytes(heap.tensor((2,), torch.uint8, offset=4094)), [
            raised(call)[:2] for call in refused
        ]


def test_bytes_are_written_inside_the_share_alone():
    data, refused = alone(write_bytes)
    assert data == b"ab"
    assert {kind for kind, _ in refused} == {InvalidArgument.__name__}
    assert "end at byte 4097 and the share has 4096" in refused[0][1]
    assert "at most 2048" in refused[2][1]
