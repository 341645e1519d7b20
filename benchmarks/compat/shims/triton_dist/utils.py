# SPDX-License-Identifier: Apache-2.0
"""Start and end of a rank."""

import os

import torch
import torch.distributed as dist


def initialize_distributed(seed: int | None = None) -> dist.ProcessGroup:
    """Join the process group of torchrun's environment."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    return dist.new_group(list(range(dist.get_world_size())))


def finalize_distributed() -> None:
    """Leave the process group."""
    dist.barrier()
    dist.destroy_process_group()
