# SPDX-License-Identifier: Apache-2.0
"""Heaps on real GPUs; ranks share a GPU if there are fewer."""

import pytest
import torch

from tests.baseline import open_files
from tests.ranks import on_ranks
from weft.cuda.memory import tensor_from_address
from weft.errors import CreationFailed
from weft.heap.heap import Heap

pytestmark = pytest.mark.gpu

SIZE = 5 << 20
HEAP = 64 << 20
GPUS = max(1, min(torch.cuda.device_count(), 4))  # a rank on each


@on_ranks(4, "cuda")
def test_every_rank_writes_into_every_share(group):
    following = (group.rank + 1) % group.size
    with Heap.create(group, SIZE) as heap:
        assert int(heap.tensor((SIZE,), torch.uint8).count_nonzero()) == 0
        assert heap.tensor((1,), torch.uint8, rank=following).device == group.device
        group.barrier()
        for rank in range(group.size):
            word = heap.tensor((1,), torch.int32, offset=4 * group.rank, rank=rank)
            word.fill_(100 * group.rank + rank)
        heap.tensor((1,), torch.uint8, offset=SIZE - 1, rank=following).fill_(9)
        torch.cuda.synchronize()
        group.barrier()
        for rank in (group.rank, 0):
            words = heap.tensor((group.size,), torch.int32, rank=rank).tolist()
            assert words == [100 * r + rank for r in range(4)]
        assert int(heap.tensor((1,), torch.uint8, offset=SIZE - 1)) == 9
        group.barrier()


@on_ranks(2, "cuda")
def test_host_and_device_share_the_mailbox(group):
    with Heap.create(group, 64) as heap:
        page = heap.mailbox.view()
        page[3] = 7
        seen = tensor_from_address(heap.mailbox.device, 4096, group.device, page)
        seen[9] = 5
        torch.cuda.synchronize()
        assert (int(seen[3]), page[9], heap.mailbox.host % 4096) == (7, 5, 0)


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


@on_ranks(4, "cuda")
def test_memory_and_descriptors_are_released(group):
    use_once(group, SIZE)  # leaves a context, with the kernel of fill_ loaded
    free, files = free_memory(group), open_files()
    for _ in range(10):
        use_once(group, HEAP)
    # One heap of the ten; where ranks share a GPU, one of the ten of all of them.
    assert abs(free_memory(group) - free) < HEAP
    assert open_files() == files


@on_ranks(2, "cuda")
def test_views_keep_the_memory_past_close(group):
    heap = Heap.create(group, 4096)
    view = heap.tensor((8,), torch.int32)
    heap.close()
    view.fill_(5)
    assert int(view.sum()) == 40


@on_ranks(GPUS, "cuda")
def test_the_torch_group_is_nccl(group):
    total = torch.tensor([group.rank + 1.0], device=group.device)
    torch.distributed.all_reduce(total, group=group.process_group())
    assert float(total) == GPUS * (GPUS + 1) / 2


@on_ranks(2, "cuda")
def test_too_much_memory_is_a_typed_error(group):
    with pytest.raises(CreationFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        Heap.create(group, torch.cuda.mem_get_info()[1] * 2)
