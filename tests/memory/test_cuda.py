# SPDX-License-Identifier: Apache-2.0
"""Heaps on real GPUs: what the driver makes of the calls. More ranks than GPUs share them."""

import os

import pytest
import torch

from weft.errors import RankFailed
from weft.memory.dlpack import tensor_at
from weft.memory.heap import Heap
from weft.memory.launch import launch

pytestmark = pytest.mark.gpu

SIZE = 5 << 20
HEAP = 64 << 20


def write_to_everyone(group):
    with Heap.create(group, SIZE) as heap:
        zero = int(heap.tensor((SIZE,), torch.uint8).count_nonzero())
        assert heap.tensor((1,), torch.uint8, rank=(group.rank + 1) % group.size).device == (
            group.device
        )
        group.barrier()
        for rank in range(group.size):
            word = heap.tensor((1,), torch.int32, offset=4 * group.rank, rank=rank)
            word.fill_(100 * group.rank + rank)
        last = heap.tensor((1,), torch.uint8, offset=SIZE - 1, rank=(group.rank + 1) % group.size)
        last.fill_(9)
        torch.cuda.synchronize()
        group.barrier()
        got = heap.tensor((group.size,), torch.int32).tolist()
        theirs = heap.tensor((group.size,), torch.int32, rank=0).tolist()
        end = int(heap.tensor((1,), torch.uint8, offset=SIZE - 1))
        group.barrier()
        return zero, got, theirs, end


def test_every_rank_writes_into_every_share():
    for rank, (zero, got, theirs, end) in enumerate(launch(write_to_everyone, device="cuda")):
        assert zero == 0
        assert got == [100 * r + rank for r in range(4)]
        assert theirs == [100 * r for r in range(4)]
        assert end == 9


def use_mailbox(group):
    with Heap.create(group, 64) as heap:
        page = heap.mailbox.view()
        page[3] = 7
        seen = tensor_at(heap.mailbox.device, 4096, group.device, page)
        seen[9] = 5
        torch.cuda.synchronize()
        return int(seen[3]), page[9], heap.mailbox.host % 4096


def test_host_and_device_share_the_mailbox():
    assert launch(use_mailbox, ranks=2, device="cuda") == [(7, 5, 0)] * 2


def use_once(group, size):
    with Heap.create(group, size) as heap:
        heap.tensor((8,), torch.float32).fill_(1.0)
        torch.cuda.synchronize()
        group.barrier()


def free_memory(group):
    # The driver counts the whole GPU, which ranks may share: all have freed what they will free
    # before anyone looks, and nobody allocates before all have looked.
    group.barrier()
    seen = torch.cuda.mem_get_info()[0]
    group.barrier()
    return seen


def create_and_close(group):
    use_once(group, SIZE)  # leaves a context, with the kernel of fill_ loaded
    before = free_memory(group), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        use_once(group, HEAP)
    after = free_memory(group), len(os.listdir("/proc/self/fd"))
    return before[1] == after[1], abs(before[0] - after[0])


def test_memory_and_descriptors_are_given_back():
    for same, leaked in launch(create_and_close, device="cuda"):
        assert same
        # One heap of the ten; where ranks share a GPU, one of the ten of all of them.
        assert leaked < HEAP


def outlive(group):
    heap = Heap.create(group, 4096)
    view = heap.tensor((8,), torch.int32)
    heap.close()
    view.fill_(5)
    return int(view.sum())


def test_views_keep_the_memory_past_close():
    assert launch(outlive, ranks=2, device="cuda") == [40, 40]


def reduce_with_nccl(group):
    total = torch.tensor([group.rank + 1.0], device=group.device)
    torch.distributed.all_reduce(total, group=group.process_group())
    return float(total)


def test_the_torch_group_is_nccl():
    ranks = min(torch.cuda.device_count(), 4)
    expected = [ranks * (ranks + 1) / 2] * ranks
    assert launch(reduce_with_nccl, ranks=ranks, device="cuda") == expected


def too_large(group):
    Heap.create(group, torch.cuda.mem_get_info()[1] * 2)


def test_too_much_memory_is_a_typed_error():
    with pytest.raises(RankFailed, match=r"CreationFailed.*CUDA_ERROR_OUT_OF_MEMORY"):
        launch(too_large, ranks=2, device="cuda")
