"""The older calls of flashinfer.comm's all-reduce, on the same workspaces."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from weft.arguments import flags, instance, integer, one_of, refuse, shown
from weft.compat.allreduce_fusion import allreduce_fusion
from weft.compat.fusion_workspace import (
    MAX_WORLD,
    AllReduceFusionWorkspace,
    create_allreduce_fusion_workspace,
    give_up,
    workspace_ranks,
)
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.runtime.check import check_tensor
from weft.runtime.stream import capturing
from weft.shape import DTYPE_NAMES

Handles = list[list[int]]


@dataclass(slots=True)
class OlderWorkspace:
    """A workspace made without a dtype, and perhaps for another hidden size.

    made: one all-reduce for each hidden size and dtype that calls have brought.
    """

    group: Group
    owns_group: bool
    pointers: torch.Tensor
    elements: int
    fp32: bool
    made: dict[tuple[int, torch.dtype], AllReduceFusionWorkspace] = field(default_factory=dict)

    def of(self, hidden: int, dtype: torch.dtype) -> AllReduceFusionWorkspace:
        """The workspace of these sizes; collective when it is new."""
        if (hidden, dtype) not in self.made:
            if capturing(self.group.device):
                raise InvalidArgument(
                    f"hidden_dim {hidden} of {dtype} comes for the first time in a graph capture, "
                    "where no memory can be made: make one such call on all ranks before it"
                )
            self.made[hidden, dtype] = create_allreduce_fusion_workspace(
                world_size=self.group.size,
                rank=self.group.rank,
                max_token_num=max(1, self.elements // hidden),
                hidden_dim=hidden,
                dtype=dtype,
                group=self.group,
            )
        return self.made[hidden, dtype]

    def shape(self, token_num: int, hidden_dim: int) -> tuple[int, int]:
        """Of a call's tensors, if the workspace was made for so many elements."""
        tokens = integer("token_num", token_num, 0, 1 << 20)
        hidden = integer("hidden_dim", hidden_dim, 8, 1 << 20)
        if tokens * hidden > self.elements:
            raise InvalidArgument(
                f"token_num is {tokens} and hidden_dim {hidden}; the workspace was made for "
                f"{self.elements} elements"
            )
        return tokens, hidden

    def check_rank(self, world_size: int, world_rank: int) -> None:
        """Raise InvalidArgument for another rank than this one."""
        for name, given, made in (
            ("world_size", world_size, self.group.size),
            ("world_rank", world_rank, self.group.rank),
        ):
            if integer(name, given) != made:
                raise InvalidArgument(
                    f"{name} is {shown(given)}; the workspace was made with {made}"
                )

    def check_input(self, name: str, x: torch.Tensor) -> None:
        """Raise InvalidArgument for rows of another dtype or device."""
        kinds = (torch.float32,) if self.fp32 else (torch.bfloat16, torch.float16)
        one_of(f"{name}.dtype", x.dtype, [kind for kind in kinds if kind in DTYPE_NAMES])
        shape = tuple(x.shape) if _plain(x) else (None, None)
        check_tensor(name, x, shape=shape, dtypes=kinds, device=self.group.device)


_numbers = itertools.count(1)
_older: dict[int, OlderWorkspace] = {}  # by the number in their handles
_by_pointers: dict[int, OlderWorkspace] = {}  # by the address of their tensor


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: Group | dist.ProcessGroup | None = None,
    create_metadata: bool = False,
    comm_backend: Any = None,
    use_symm_dev_mem: bool = False,
) -> tuple[Any, ...]:
    """`(ipc_handles, workspace_tensor)`, and where asked for `mem_handles` (none) and `metadata`.

    use_fp32_lamport: calls bring float32, else bfloat16 or float16. The first call of each hidden
    size and dtype makes memory on all ranks; it may not be in a graph capture. Collective.
    Raises InvalidArgument, RendezvousFailed.
    """
    size = integer("tp_size", tp_size, 2, MAX_WORLD)
    rank = integer("tp_rank", tp_rank, 0, size - 1)
    tokens = integer("max_token_num", max_token_num, 1, 1 << 20)
    hidden = integer("hidden_dim", hidden_dim, 8, 1 << 20)
    flags(use_fp32_lamport=use_fp32_lamport, create_metadata=create_metadata)
    flags(use_symm_dev_mem=use_symm_dev_mem)
    if use_symm_dev_mem and not create_metadata:
        raise InvalidArgument("use_symm_dev_mem is True and create_metadata False; pass both")
    ranks, owns = workspace_ranks(rank, size, comm_backend, group)
    number = next(_numbers)
    pointers = torch.tensor([number], dtype=torch.int64, device=ranks.device)
    older = OlderWorkspace(ranks, owns, pointers, tokens * hidden, use_fp32_lamport)
    _older[number] = _by_pointers[pointers.data_ptr()] = older
    found: tuple[Any, ...] = ([[number] * size], pointers)
    if use_symm_dev_mem:
        found += ([],)
    if create_metadata:
        metadata = {"tp_rank": rank, "tp_size": size, "max_token_num": tokens}
        found += (metadata | {"hidden_dim": hidden, "use_fp32_lamport": use_fp32_lamport},)
    return found


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: Handles, group: dist.ProcessGroup | None = None
) -> None:
    """Give the memory of these ipc_handles back. Local.   group: accepted and not used."""
    first = workspace[0] if isinstance(workspace, list) and workspace else None
    number = first[0] if isinstance(first, list) and first else None
    if not isinstance(number, int) or number not in _older:
        refuse("workspace", workspace, "ipc_handles of a workspace that was not destroyed")
    older = _older.pop(number)
    del _by_pointers[older.pointers.data_ptr()]
    for made in older.made.values():
        made.destroy()
    if older.owns_group:
        give_up(older.group)


def trtllm_destroy_ipc_workspace_for_all_reduce(
    workspace: Handles, group: dist.ProcessGroup | None = None
) -> None:
    """The same, by the name that flashinfer.comm's callers of MoE all-reduces use."""
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace, group)


def trtllm_allreduce_fusion(
    allreduce_in: torch.Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: torch.Tensor | None,
    residual_in: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    rms_gamma: torch.Tensor | None,
    rms_eps: float | None,
    scale_factor: torch.Tensor | float | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """`allreduce_fusion` with tensors of any shape of token_num x hidden_dim elements.

    metadata: accepted and not used; the workspace knows its sizes. Raises what that call raises.
    """
    older = older_workspace(workspace_ptrs, world_size, world_rank)
    shape = older.shape(token_num, hidden_dim)
    rows = functools.partial(rows_of, shape)
    x = rows("allreduce_in", instance("allreduce_in", allreduce_in, torch.Tensor))
    older.check_input("allreduce_in", x)
    allreduce_fusion(
        x,
        older.of(shape[1], x.dtype),
        pattern_code,
        launch_with_pdl=launch_with_pdl,
        trigger_completion_at_end=trigger_completion_at_end,
        output=rows("allreduce_out", allreduce_out),
        residual_out=rows("residual_out", residual_out),
        norm_out=rows("norm_out", norm_out),
        quant_out=rows("quant_out", quant_out),
        scale_out=scale_out,
        residual_in=rows("residual_in", residual_in),
        rms_gamma=rms_gamma,
        rms_eps=1e-6 if rms_eps is None else rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        use_oneshot=use_oneshot,
        fp32_acc=fp32_acc,
        block_quant_group_size=block_quant_group_size,
        weight_bias=0.0 if weight_bias is None else weight_bias,
    )


def older_workspace(
    workspace_ptrs: torch.Tensor, world_size: int, world_rank: int
) -> OlderWorkspace:
    """The workspace of these pointers. Raises InvalidArgument for others, and for another rank."""
    instance("workspace_ptrs", workspace_ptrs, torch.Tensor)
    older = _by_pointers.get(workspace_ptrs.data_ptr()) if _plain(workspace_ptrs) else None
    if older is None:
        raise InvalidArgument(
            f"workspace_ptrs is {shown(workspace_ptrs)}; pass the tensor that "
            "trtllm_create_ipc_workspace_for_all_reduce_fusion returned"
        )
    older.check_rank(world_size, world_rank)
    return older


def rows_of(shape: tuple[int, int], name: str, tensor: torch.Tensor | None) -> Any:
    """The elements of a call's tensor, as rows."""
    if tensor is None:
        return None
    instance(name, tensor, torch.Tensor)
    if not _plain(tensor) or tensor.numel() != math.prod(shape) or not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} is {shown(tensor)}; it must be contiguous, with {shape[0]} x {shape[1]} "
            "elements"
        )
    return tensor.view(shape)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
