# SPDX-License-Identifier: Apache-2.0
"""Heaps: addresses, views, failing creations, and freed memory. Ranks may share a GPU.

Shares that exceed the available memory are refused before anything is allocated.
"""

import ctypes
import fcntl
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest
import torch

import weft
from tests.baseline import (
    call_outcome,
    die,
    inaccessible_mappings,
    open_files,
    resource_counts,
    shares_mapped,
)
from tests.headers import HEADER_BYTES
from tests.ranks import on_ranks
from tests.rounds import synchronize
from weft import errors
from weft.cuda import memory as cuda
from weft.errors import InvalidArgument
from weft.group import pages
from weft.heap import cpu, host_memory
from weft.heap.heap import Heap
from weft.launcher.launch import launch

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("size", [64, PAGE, PAGE + 1, 5 << 20])
@on_ranks(3, "threads", "cpu", "cuda")
def test_every_rank_writes_into_every_share(group, size):
    own, following = group.rank, (group.rank + 1) % 3
    with Heap.create(group, size) as heap:
        if group.device.type == "cpu":
            assert heap.stride == -(-size // PAGE) * PAGE + PAGE
        assert (heap.address(own) - heap.base, heap.generation) == (own * heap.stride, 1)
        assert not any(heap.tensor((size,), torch.uint8, rank=r).any() for r in range(3))
        group.barrier()
        for rank in range(3):
            heap.tensor((1,), torch.int32, offset=4 * own, rank=rank).fill_(100 * own + rank)
        last = heap.tensor((1,), torch.uint8, offset=size - 1, rank=following).fill_(7)
        synchronize(group.device)
        group.barrier()
        for rank in range(3):
            words = heap.tensor((3,), torch.int32, rank=rank)
            assert (words.tolist(), words.device) == ([rank, 100 + rank, 200 + rank], group.device)
        assert int(last) == int(heap.tensor((1,), torch.uint8, offset=size - 1)) == 7
        group.barrier()


@on_ranks(1, "threads")
def test_a_share_and_its_mailbox_have_their_size(group):
    with Heap.create(group, 256) as heap:
        for text, call in (
            ("ends at byte 257, but the share has 256", lambda: heap.tensor((257,), torch.uint8)),
            (f"a header needs {HEADER_BYTES}", heap.header),
            ("limit of 2048 per write", lambda: heap.write(0, 0, bytes(2049))),  # half a page
        ):
            with pytest.raises(InvalidArgument, match=text):
                call()
        page = heap.mailbox.view()  # of host memory
        assert (page.readonly, page.format, bytes(page)) == (False, "B", bytes(4096))
        page[5] = 9
        assert ctypes.c_uint8.from_address(heap.mailbox.host + 5).value == 9
        assert heap.mailbox.host == heap.mailbox.device
        assert heap.mailbox.host % 4096 == 0


@pytest.mark.gpu
@on_ranks(2, "cuda")
def test_a_gpus_memory_and_mailbox(group):
    """Host and device share the mailbox, and views keep the memory past close."""
    heap = Heap.create(group, 4096)
    page, view = heap.mailbox.view(), heap.tensor((8,), torch.int32)
    page[3] = 7
    seen = cuda.tensor_from_address(heap.mailbox.device, 4096, group.device, page)
    seen[9] = 5
    torch.cuda.synchronize()
    assert (int(seen[3]), page[9], heap.mailbox.host % 4096) == (7, 5, 0)
    heap.close()
    assert int(view.fill_(5).sum()) == 40
    with pytest.raises(errors.CreationFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        Heap.create(group, torch.cuda.mem_get_info()[1] * 2)


@pytest.mark.gpu
@on_ranks(4, "cuda")
def test_a_gpus_memory_and_descriptors_are_released(group):
    def count():
        group.barrier()  # no rank allocates or frees meanwhile, because ranks may share the GPU
        seen = torch.cuda.mem_get_info()[0]
        group.barrier()
        return seen, open_files()

    create_and_close(group)  # leaves a context, with the kernel of fill_ loaded
    before, files = count()
    for _ in range(10):
        create_and_close(group, 64 << 20)
    after, now = count()
    # One heap of the ten; where ranks share a GPU, one of the ten of all of them.
    assert abs(after - before) < 64 << 20
    assert now == files


EDGES = (0, 1, 7, 8, 255, 256, 257, 2048, 1 << 31, 1 << 48, (1 << 63) - 1, 1 << 64)
ODD = (None, True, 1.5, "3", *EDGES, *(-edge for edge in EDGES[1:]))
DTYPES = tuple(each for each in vars(torch).values() if isinstance(each, torch.dtype))
DATA: tuple[Any, ...] = (
    b"", b"1", b"x" * 8, b"y" * 2048, b"z" * 2049, bytearray(3), memoryview(b"abcd")[::2],
    None, "text", 3, torch.zeros(2),
)  # fmt: skip


@on_ranks(1, "threads")
def test_every_access_is_inside_the_share_or_refused(group):
    seed = Random().randrange(1 << 32)
    print("seed", seed)
    random, refused = Random(seed), 0
    ranks: tuple[Any, ...] = (0, 0, 0, None, 1, 1 << 64, "a")

    def number() -> Any:
        return random.choice(ODD) if random.random() < 0.3 else random.randrange(300)

    with Heap.create(group, 256) as heap, Heap.create(group, 256) as other:
        start, whole = heap.address(0), heap.tensor((256,), torch.uint8)
        for _ in range(3000):
            sizes = [number() for _ in range(random.randrange(4))]
            steps = random.choice((None, [number() for _ in sizes], [number()]))
            offset, rank, dtype = number(), random.choice(ranks), random.choice(DTYPES)
            try:
                view = heap.tensor(sizes, dtype, offset=offset, rank=rank, stride=steps)
                assert (view.dtype, list(view.shape)) == (dtype, sizes)
                if view.numel():
                    assert view.is_contiguous() if steps is None else list(view.stride()) == steps
                    strides = zip(view.shape, view.stride(), strict=True)
                    last = sum((n - 1) * step for n, step in strides)
                    end = view.data_ptr() + (last + 1) * view.element_size()
                    assert start + offset == view.data_ptr() < end <= start + 256
            except InvalidArgument:
                refused += 1
            offset, data = number(), random.choice(DATA)
            try:
                heap.write(rank, offset, data)
                assert bytes(whole[offset : offset + len(data)].tolist()) == bytes(data)
            except InvalidArgument:
                refused += 1
        assert int(other.tensor((256,), torch.uint8).sum()) == 0
    assert refused > 1000


def overrun(group, rank):
    heap = Heap.create(group, PAGE)
    group.barrier()
    if group.rank == 1:
        ctypes.memset(heap.address(rank) + PAGE, 1, 1)
    group.barrier()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_write_beyond_a_share_faults(rank):
    with pytest.raises(errors.RankFailed, match="rank 1 of 3 died: .*SIGSEGV"):
        launch(overrun, rank, ranks=3)


@on_ranks(1, "threads")
def test_a_closed_heap_refuses(group):
    heap = Heap.create(group, HEADER_BYTES)
    heap.close()
    heap.close()
    tensor, address = lambda: heap.tensor((1,), torch.uint8), lambda: heap.address(0)
    for call in (tensor, address, heap.header, lambda: heap.mailbox):
        with pytest.raises(errors.OutOfOrder, match="the heap of generation 1 is closed"):
            call()


@on_ranks(1, "threads")
def test_views_keep_the_memory_past_close(group):
    gc.collect()  # a collection in the middle would free what is counted as there before
    before = shares_mapped()  # of tests before this one in the same process
    heap = Heap.create(group, 4 * PAGE)
    view, page = heap.tensor((2, 8), torch.int32).T[1:], heap.mailbox.view()
    heap.close()
    view.fill_(5)
    page[7] = 1
    assert int(view.sum()) == 70
    assert shares_mapped() == before + 1
    del view
    assert shares_mapped() == before + 1
    del page
    assert shares_mapped() == before


@on_ranks(2, "cpu", "cuda", dies=[1])
def test_the_header_of_a_dead_rank_can_be_read(group):
    heap = Heap.create(group, HEADER_BYTES + 1)
    heap.tensor((HEADER_BYTES,), torch.uint8).fill_(group.rank + 1)
    synchronize(group.device)
    group.barrier()
    if group.rank == 1:
        die()
    with pytest.raises(errors.RendezvousFailed):
        group.barrier()
    assert heap.header(1) == bytes([2]) * HEADER_BYTES
    assert heap.header() == bytes([1]) * HEADER_BYTES


def create_and_close(group, size=10_000):
    with Heap.create(group, size) as heap:
        heap.tensor((8,), torch.float32).fill_(1.0)
        synchronize(group.device)
        group.barrier()
        return shares_mapped()


@on_ranks(3, "cpu")
def test_creating_and_closing_releases_everything(group):
    for _ in range(3):  # what is imported, mapped and cached at first use
        create_and_close(group)
    before = resource_counts()
    for _ in range(20):
        assert create_and_close(group) == 3
    dropped = Heap.create(group, 10_000)
    del dropped
    now = resource_counts()
    assert now[:2] <= before[:2]
    # The allocator maps a page of its own now and then; a share that stays would be twenty.
    assert now[2] - before[2] < 10


@on_ranks(2, "threads", "cpu")
def test_a_share_lives_as_long_as_any_rank_maps_it(group):
    """Closing never waits: other ranks still read and write the share that its owner closed."""
    heap = Heap.create(group, 64)
    if group.rank == 0:
        heap.tensor((1,), torch.int32).fill_(41)
        heap.close()
    group.barrier()
    if group.rank == 1:
        theirs = heap.tensor((1,), torch.int32, rank=0)
        theirs += 1
        assert int(theirs) == 42


@on_ranks(2, "cpu")
def test_a_forked_child_may_close_its_copy(group):
    heap = Heap.create(group, 64)
    child = os.fork()
    if child == 0:
        heap.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(heap.tensor((1,), torch.uint8).fill_(1)) == 1


LEFT_OPEN = """
import torch
from weft.cuda.memory import tensor_from_address
from weft.group.group import Group
from weft.heap.heap import Heap
from weft.group.meeting import Meeting

cpu = torch.device("cpu")
group = Group.from_meeting(Meeting.open(), rank=0, size=1, device=cpu, timeout=5.0)
heap = Heap.create(group, 4096)
view = heap.tensor((4,), torch.int32).fill_(1)
page = heap.mailbox.view()
other = tensor_from_address(heap.base, 64, cpu, heap)
cycle = [heap, view, other]
cycle.append(cycle)
"""


@pytest.mark.slow
def test_a_process_may_end_without_closing_anything():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-W", "error", "-c", LEFT_OPEN]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None, 65])
@on_ranks(2, "threads")
def test_invalid_and_different_sizes_fail_on_every_rank(group, size):
    kind: type[errors.WeftError] = errors.CreationFailed
    text = rf"^creating a heap failed on rank 1 of 2: InvalidArgument: size is {size!r}; .* 1\.\."
    if size == 65:
        kind, text = errors.GeometryMismatch, "rank 0 has size=64 and rank 1 has size=65"
    with pytest.raises(kind, match=text):
        Heap.create(group, size if group.rank == 1 else 64)


def fail_in(group, victim, where, what, over):
    """Make one step of a creation fail, die or hang on one rank; return the error of the others."""
    real = getattr(cpu.HostShares, where)

    def disturbed(self, *args):
        if what == "fail":
            raise OSError(28, "no space left")
        if what == "kill":
            die()
        while not all((over / str(r)).exists() for r in range(3) if r != group.rank):
            time.sleep(0.01)
        return real(self, *args)

    # Of all mappings only the inaccessible ones: the allocator may map pages of its own.
    before = resource_counts()[:2], inaccessible_mappings()
    if group.rank == victim:
        setattr(cpu.HostShares, where, disturbed)
    if what == "stall":
        group.barrier()
        group.timeout = 1.0
    how = "of 3: OSError: [Errno 28] no space left" if what == "fail" else "(pid "
    kind, text, seconds = call_outcome(Heap.create, group, 5000)
    assert (resource_counts()[:2], inaccessible_mappings()) == before
    assert (kind, f"rank {victim} {how}" in text, seconds < 100.0) == ("CreationFailed", True, True)
    group.close()
    (over / str(group.rank)).touch()  # a rank that stalls goes on when the others have left
    return text


@pytest.mark.parametrize(
    ("victim", "where", "what"),
    [
        *((0, "allocate", "fail"), (2, "map", "fail"), (0, "map", "kill"), (2, "allocate", "kill")),
        *((0, "map", "stall"), (2, "map", "stall")),
    ],
)
def test_one_rank_that_fails_dies_or_stalls_fails_all(victim, where, what, tmp_path):
    arguments = victim, where, what, tmp_path
    texts = launch(fail_in, *arguments, ranks=3, tolerate_deaths=what == "kill")
    assert [rank for rank, text in enumerate(texts) if text is None] == [victim] * (what == "kill")
    assert what == "stall" or len({text for text in texts if text is not None}) == 1


@pytest.mark.parametrize(
    ("size", "seals", "text"),
    [
        (2 * PAGE, pages.SEALS, f"sent memory of {2 * PAGE} bytes, but the ranks agreed on {PAGE}"),
        (PAGE, 0, "it could shrink while others read it"),
        (PAGE, fcntl.F_SEAL_SEAL, "it could shrink while others read it"),
        (PAGE, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_GROW, "it could shrink while others read it"),
        (PAGE, None, "is not a memfd"),
    ],
)
def test_memory_that_a_peer_could_change_is_refused(tmp_path, size, seals, text):
    if seals is None:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    shares = cpu.HostShares(0, 1, 100)
    try:
        shares.allocate()
        with pytest.raises(errors.HandleUnsupported, match=text):
            shares.map({0: fd})
    finally:
        os.close(fd)
        shares.free()


def test_a_tensor_over_an_address_sees_the_memory_and_keeps_its_owner():
    memory, owner = (ctypes.c_ubyte * 64)(*range(64)), Event()  # any object
    gone, address = weakref.ref(owner), ctypes.addressof(memory)
    tensor = cuda.tensor_from_address(address, 64, torch.device("cpu"), owner)
    assert (tensor.dtype, tensor.tolist()) == (torch.uint8, list(range(64)))
    view = tensor[8:24].view(torch.int32)
    view[0] = 0
    assert list(memory[8:12]) == [0] * 4
    assert tensor.data_ptr() == address
    del owner, tensor
    gc.collect()
    assert gone() is not None
    del view
    assert gone() is None
    assert not cuda._alive


GIB = 1 << 30


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Set the memory, and of control groups the limit, used and reclaimable bytes."""
    proc, tree = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "PROC", proc)
    monkeypatch.setattr(host_memory, "CGROUPS", tree)

    def set_up(available=64 * GIB, *, swap=0, own="0::/", groups=None):
        (proc / "self/cgroup").write_text(own + "\n")
        lines = f"MemTotal: 9 kB\nMemAvailable: {available >> 10} kB\nSwapFree: {swap >> 10} kB\n"
        (proc / "meminfo").write_text(lines)
        for path, (limit, used, files) in (groups or {}).items():
            (tree / path).mkdir(parents=True, exist_ok=True)
            stat = f"anon 7\ninactive_file {files}\nactive_file 0"
            for name, value in (("max", limit), ("current", used), ("stat", stat)):
                (tree / path / f"memory.{name}").write_text(f"{value}\n")

    return set_up


def refusal(group, size):
    return call_outcome(host_memory.check_host_memory, group, size, label="a heap")[1]


def common_refusal(ranks, size):
    first, second = ranks(2, "threads")(refusal, size)
    assert first == second
    return first


# 6 GiB, of which 3 are taken, and 1 of these is pages of files that can go.
LIMITED, UNLIMITED = (6 * GIB, 3 * GIB, 1 * GIB), ("max", 0, 0)


@pytest.mark.parametrize(
    ("set_up", "fits", "path"),
    [
        ({"available": 8 * GIB}, 4 * GIB, None),
        ({"available": 4 * GIB, "swap": 4 * GIB, "groups": {"": UNLIMITED}}, 4 * GIB, None),
        ({"own": "0::/a/b", "groups": {"": UNLIMITED, "a/b": LIMITED}}, 2 * GIB, "a/b"),
        ({"own": "0::/a/b", "groups": {"a": LIMITED}}, 2 * GIB, "a"),  # of the group around it
        # A container sees its own group at the root.
        ({"own": "0::/not/shown/here", "groups": {"": LIMITED}}, 2 * GIB, ""),
    ],
)
def test_all_ranks_of_the_host_or_the_tightest_group_count(ranks, host, set_up, fits, path):
    host(**set_up)
    assert common_refusal(ranks, fits) == ""
    text = common_refusal(ranks, fits + 1)
    assert f"({fits + 1} bytes) on each of 2 ranks" in text
    assert f"({2 * fits + 2} bytes) in total" in text
    left = "available on this host" if path is None else f"left ({host_memory.CGROUPS / path})"
    assert f"({2 * fits} bytes) {left}" in text


def test_groups_without_a_limit_and_gpu_ranks_are_unlimited(ranks, host):
    host(own="0::/a", groups={"a": ("max", 3 * GIB, 0)})
    assert common_refusal(ranks, 30 * GIB) == ""
    host(GIB)

    def body(group):
        group.device = torch.device("cuda", 0)
        return refusal(group, 100 * GIB)

    assert ranks(2, "threads")(body) == ["", ""]


LARGE: dict[str, Callable[[weft.Group], object]] = {
    "heap": lambda group: weft.Heap.create(group, 60_000_000_000),
    # The share would fit; what its dispatches return would not.
    "results": lambda group: weft.LowLatencyAllToAll(
        group, max_tokens=512, top_k=8, num_experts=256, hidden=16384
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_oversized_heaps_are_refused_at_creation(ranks, host, kind):
    host(5 * GIB)

    def build(group: weft.Group) -> str:
        with pytest.raises(InvalidArgument) as caught:
            LARGE[kind](group)
        group.barrier()  # it is unharmed
        return str(caught.value)

    first, second = ranks(2, "threads")(build)
    assert first == second
    assert f"({5 * GIB} bytes) available" in first
