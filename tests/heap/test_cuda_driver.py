# SPDX-License-Identifier: Apache-2.0
"""The driver calls of a heap, with a fake driver that counts resources and fails on demand."""

import ctypes
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.baseline import open_files
from tests.fake_driver import GRANULE, Driver
from tests.headers import HEADER_BYTES
from weft.cuda import driver
from weft.cuda import memory as cuda
from weft.errors import CreationFailed, DriverError, HandleUnsupported, PeerAccessDenied
from weft.heap import cpu
from weft.heap.heap import Heap
from weft.launcher.launch import launch

PAGE = ctypes.create_string_buffer(4096)
PAGE_ADDRESS = ctypes.addressof(PAGE)


@pytest.fixture
def install(monkeypatch):
    """Install a driver with the given faults in place of cuda.bindings."""

    def put(**options):
        fake = Driver(**options)
        monkeypatch.setattr(cuda, "load_driver", lambda: fake)
        monkeypatch.setattr(driver, "load_driver", lambda: fake)
        return fake

    return put


def make(group, fake):
    """Create a heap, read it and close it; or return the error."""
    try:
        heap = Heap.create(group, GRANULE + 1)
    except CreationFailed as error:
        return type(error.__cause__).__name__, str(error)
    group.barrier()
    page = heap.mailbox
    seen = (
        heap.stride, heap.address(1) - heap.base, heap.header(1) == bytes([3]) * HEADER_BYTES,
        page.device - page.host, len(fake.left()),
    )  # fmt: skip
    del page
    group.barrier()
    heap.close()
    return seen


def run(fake, body=make, *args, ranks=2):
    """Run `body(group, fake, ...)` on threads, each of which has a GPU of its own."""

    def on_gpu(group):
        fake.local.rank = group.rank
        group.device = torch.device("cuda", group.rank)
        return body(group, fake, *args)

    before = open_files()
    results = launch(on_gpu, ranks=ranks, device="threads")
    assert (fake.left(), fake.unsafe) == ({}, [])
    assert open_files() == before
    return results


def names_of(fake, rank):
    return [name for caller, name in fake.log if caller == rank]


@pytest.mark.parametrize("fabric", [False, True])
def test_every_rank_maps_and_releases_every_share(install, fabric):
    fake = install(fabric=fabric)
    # Held at the end of a creation, by a rank: context, own allocation, range, stream, page, fence
    # and two mappings.
    assert run(fake) == [(3 * GRANULE, 3 * GRANULE, True, 1 << 44, 16)] * 2
    exports = [name for _, name in fake.log if name == "cuMemExportToShareableHandle"]
    assert len(exports) == (4 if fabric else 2)


def replace_peer(group, fake):
    """Map the peer's share again, as if a new process had sent it."""
    with Heap.create(group, GRANULE) as heap:
        group.barrier()
        before, where = fake.left(), heap.address(1 - group.rank)
        group.barrier()
        shares: Any = heap._shares
        own = shares.share_fd()
        fds = group.exchange_fds(own)
        os.close(own)
        shares.map({1 - group.rank: fds[1 - group.rank]})
        for fd in fds:
            os.close(fd)
        group.barrier()
        same = {kind for kind, _ in before} == {kind for kind, _ in fake.left()}
        seen = same, len(fake.left()) == len(before), heap.address(1 - group.rank) == where
        group.barrier()
    return seen


def test_a_share_is_replaced_at_its_address_when_the_gpu_is_quiet(install):
    fake = install()
    assert run(fake, replace_peer) == [(True, True, True)] * 2
    assert "cuMemUnmap" in names_of(fake, 1)


STAYS = {"context", "range", "stream", "host"}  # while a group is asleep; none is GPU memory


def sleep_and_wake(group, fake, fails):
    """Sleep, wake once with a failure of rank 1, and wake again."""
    with Heap.create(group, GRANULE) as heap:
        group.barrier()
        before, where = len(fake.left()), [heap.address(rank) for rank in range(2)]
        group.barrier()
        group.sleep()
        assert {kind for kind, _ in fake.left()} == STAYS
        group.barrier()
        if fails:
            fake.fail = (1, fails)
            with pytest.raises(CreationFailed, match=f"failed on rank 1 of 2: .*{fails}"):
                group.wake()
            group.barrier()
            assert {kind for kind, _ in fake.left()} == STAYS
            group.barrier()
            fake.fail = None
            group.barrier()
        group.wake()
        assert (len(fake.left()), [heap.address(rank) for rank in range(2)]) == (before, where)
        group.barrier()
        group.sleep()  # a heap may be closed asleep
        group.barrier()


@pytest.mark.parametrize("fabric", [False, True])
@pytest.mark.parametrize(
    "fails",
    ["", "cuMemCreate", "cuMemAlloc", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"],
)
def test_a_group_asleep_holds_no_gpu_memory(install, fabric, fails):
    run(install(fabric=fabric), sleep_and_wake, fails)


def test_a_failure_of_any_call_frees_everything_everywhere(install):
    """Each driver call of rank 1 fails once; no rank keeps anything of the failed creation."""
    whole = install()
    run(whole)
    names = names_of(whole, 1)
    created = names.index("cuStreamSynchronize") + 3  # and then the pop and the mode
    assert created > 35
    for number in range(1, created + 1):
        outcomes = run(install(fail=(1, number)))
        (text,) = {text for _, text in outcomes}
        assert "rank 1 of 2" in text
        assert f"{names[number - 1]}(" in text
        assert "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory; free some GPU memory" in text
        assert outcomes[0][0] == "NoneType"
        if names[number - 1] == "cuMemCreate":
            assert f"cannot allocate {2 * GRANULE} contiguous bytes" in text
            assert f"cuda:1 ({3 << 30} free of {8 << 30})" in text


def close_with_failure(group, fake):
    heap = Heap.create(group, 64)
    fake.fail = (0, "cuMemFree")  # the wait before anything is given back
    with pytest.raises(DriverError, match=r"cuMemFree\(\d+\) failed: CUDA_ERROR_OUT"):
        heap.close()
    heap.close()


def test_a_failing_close_raises_and_still_frees(install):
    run(install(), close_with_failure, ranks=1)


def drop_in_capture(group, fake, how):
    """Drop a heap in a capturing thread; return the driver's calls and the thread's mode."""
    heap = Heap.create(group, 64)
    views, done = [heap.tensor((8,), torch.uint8, rank=0) if how == "view" else None], []
    close, ring = heap.close if how == "close" else None, list[object]()
    if how == "cycle":
        ring += [heap, ring]
    if how == "view":
        heap.close()
    del heap
    before = len(fake.log)

    def elsewhere():
        fake.local.rank = group.rank
        fake.local.mode = fake.modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        views.clear()
        if close is not None:
            close()
        done.append(fake.mode)

    del ring
    gc.collect()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere).result()
    return [name for rank, name in fake.log[before:] if rank == group.rank], done


@pytest.mark.parametrize("how", ["close", "cycle", "view"])
def test_freeing_memory_does_not_break_captures(install, monkeypatch, how):
    """Free by close, by the collector, or with the last view; the thread's mode is restored."""
    fake = install()
    monkeypatch.setattr(cuda, "tensor_from_address", cpu_tensor_at)
    names, done = run(fake, drop_in_capture, how, ranks=1)[0]
    assert done == [fake.modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL]
    frees = [n for n in names if n.startswith("cuMem") and n != "cuMemRelease"]
    assert frees[0] == "cuMemFree"
    assert frees.count("cuMemUnmap") == 1
    assert "cuCtxSynchronize" not in names


def cpu_tensor_at(address, count, device, owner):
    """Return a tensor over existing memory that keeps its keeper alive."""
    return torch.frombuffer(cpu.make_buffer(PAGE_ADDRESS, count, owner), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        ("VIRTUAL_MEMORY_MANAGEMENT", "has no virtual memory management"),
        ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "has no POSIX file descriptor handles"),
    ],
)
def test_unsupported_gpus_are_reported_on_every_rank(install, attribute, text):
    fake = install()
    fake.lacks = (getattr(fake.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}_SUPPORTED"),)
    for name, message in run(fake):
        assert name == HandleUnsupported.__name__
        assert f"cuda:0 (Test GPU) {text}" in message


def test_gpus_that_cannot_reach_each_other_are_both_named(install):
    results = run(install(peers=False))
    assert [name for name, _ in results] == [PeerAccessDenied.__name__] * 2
    assert f"cuda:0 (Test GPU) {'00' * 16}" in results[0][1]
    assert f"rank 1 on cuda:1 (Test GPU) {'01' * 16}" in results[0][1]


def test_an_invisible_gpu_is_tested_by_mapping(install):
    assert run(install(peers=False, visible=0))[0][0] == 3 * GRANULE


def test_fabric_handles_are_used_only_where_every_rank_can_make_them(install):
    fake = install(fabric=True)
    trial = ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"]

    run(fake)
    # Rank 1 has no IMEX channel: its first allocation, the trial, is refused.
    first = names_of(fake, 1).index(trial[0]) + 1
    half = install(fabric=True, fail=(1, first))
    assert run(half)[0][0] == 3 * GRANULE
    imports = [name for _, name in half.log if name == trial[2]]
    assert len(imports) == 1 + 2  # rank 0's own trial, then one descriptor each


def make_on_machines(group, fake):
    group.machines = 2
    return make(group, fake)


def test_memory_of_several_machines_does_not_go_as_descriptors(install):
    fake = install(fabric=True)
    run(fake, make_on_machines)
    first = names_of(fake, 1).index("cuMemCreate") + 1
    for name, message in run(install(fabric=True, fail=(1, first)), make_on_machines):
        assert name == "HandleUnsupported"
        assert "rank 1 on cuda:1 (Test GPU) can no longer export fabric handles" in message


def look(group, fake):
    """Return which of ranks 0 and 1 reach each rank over NVLink."""
    return cuda.find_reachable_ranks(group.device, group.all_gather, [0, 1])


REACH = [
    (None, True, [[0, 1]] * 2),
    (None, False, [[]] * 2),
    ("cuMemExportToShareableHandle", True, [[0], []]),  # there is nothing of rank 1 to map
    ("cuMemMap", True, [[0, 1], []]),
    ("cuMemSetAccess", True, [[0, 1], []]),
    ("cuMemFreeHost", True, [[0, 1]] * 2),  # the other rank would wait for this one
]


@pytest.mark.parametrize(("refused", "fabric", "seen"), REACH)
def test_machines_reach_each_other_where_both_map_the_others_memory(install, refused, fabric, seen):
    fail = {"fail": (1, refused)} if refused else {}
    assert run(install(fabric=fabric, **fail), look) == [seen] * 2


def test_fabric_support_is_reported(install):
    for fabric in (False, True):
        fake = install(fabric=fabric)
        assert cuda.supports_fabric(torch.device("cuda:0")) is fabric
        assert (fake.left(), fake.unsafe) == ({}, [])
