"""Other libraries' all-reduces behind one call, as `weft bench allreduce --peers` times them.

None of them may use NVLink multicast: the figures are for machines where it is off, and some
drivers must not be asked for it. FlashInfer is made with backend="trtllm" for the same reason,
never "auto" or "mnnvl", which probe for it.

Written against torch 2.8 to 2.11 and FlashInfer 0.6 and 0.7 (`flashinfer.comm`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from weft.bench.allreduce_cases import ReduceSettings
from weft.bench.allreduce_trial import EPS, Rows
from weft.memory import Group

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
ONE_SHOT_MOST = 512  # tokens that FlashInfer's one-shot is measured with
_PLAIN, _NORM = 0, 1  # FlashInfer's patterns


def forbid_multicast() -> None:
    """Tell every library of this process, before it starts, to leave multicast alone."""
    os.environ.update(NO_MULTICAST)


def with_norm(rows: Rows, summed: torch.Tensor) -> torch.Tensor:
    """torch's residual add and RMSNorm, as an engine without fusion runs them."""
    total = summed + rows.residual
    return functional.rms_norm(total, (total.shape[-1],), rows.weight, EPS)


class TorchReduce:
    """torch.distributed's all_reduce (NCCL on GPUs, gloo on CPUs), then torch's norm."""

    def __init__(self, group: Group, settings: ReduceSettings, most: int) -> None:
        self._group = group.process_group()
        self._norm = settings.epilogue != "none"

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size. It sums in place, so every call but the first sums sums."""
        x = rows.x.clone()

        def reduce() -> torch.Tensor:
            dist.all_reduce(x, group=self._group)
            return with_norm(rows, x) if self._norm else x

        return reduce


class SymmetricReduce:
    """torch's symmetric memory, one-shot or two-shot, then torch's norm. In place, as above."""

    def __init__(
        self, group: Group, settings: ReduceSettings, most: int, *, one_shot: bool
    ) -> None:
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        process_group = group.process_group()
        self._name = process_group.group_name
        self._norm, self._one_shot = settings.epilogue != "none", one_shot
        shape = (most, settings.hidden)
        self._whole = memory.empty(shape, dtype=settings.out_dtype, device=group.device)
        memory.rendezvous(self._whole, self._name)

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size: its rows lie in symmetric memory already, as these calls ask for."""
        x = self._whole[: len(rows.x)]
        x.copy_(rows.x)
        ops: Any = torch.ops.symm_mem

        def reduce() -> torch.Tensor:
            if self._one_shot:
                found: torch.Tensor = ops.one_shot_all_reduce(x, "sum", self._name)
            else:
                found = ops.two_shot_all_reduce_(x, "sum", self._name)
            return with_norm(rows, found) if self._norm else found

        return reduce


class FlashInferReduce:
    """`flashinfer.comm.allreduce_fusion` with backend="trtllm", one-shot or two-shot."""

    def __init__(
        self, group: Group, settings: ReduceSettings, most: int, *, one_shot: bool
    ) -> None:
        self._comm: Any = importlib.import_module("flashinfer.comm")
        memory: Any = importlib.import_module("flashinfer.comm.mnnvl")
        process_group = group.process_group()
        self._pattern = _PLAIN if settings.epilogue == "none" else _NORM
        self._one_shot = one_shot
        self._workspace = self._comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=group.size,
            rank=group.rank,
            max_token_num=most,
            hidden_dim=settings.hidden,
            dtype=settings.out_dtype,
            gpus_per_node=group.size,
            comm_backend=memory.TorchDistBackend(process_group),
            group=process_group,
        )

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size, with outputs of its own."""
        written = {"output": torch.empty_like(rows.x)}
        given: dict[str, Any] = {}
        if self._pattern == _NORM:
            written = {name: torch.empty_like(rows.x) for name in ("residual_out", "norm_out")}
            given = {"residual_in": rows.residual, "rms_gamma": rows.weight, "rms_eps": EPS}
        answer = written["norm_out" if self._pattern == _NORM else "output"]

        def reduce() -> torch.Tensor:
            self._comm.allreduce_fusion(
                input=rows.x,
                workspace=self._workspace,
                pattern=self._pattern,
                launch_with_pdl=True,
                use_oneshot=self._one_shot,
                fp32_acc=True,
                **written,
                **given,
            )
            return answer

        return reduce
