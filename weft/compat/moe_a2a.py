"""The functions that flashinfer.comm exports beside MoeAlltoAll, on the same all-to-all.

There the caller's workspace is the memory that peers write. Here it is the place where a caller
may put its results; the rows that arrive lie in weft's own symmetric memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.arguments import flags, instance, integer, integers, shown
from weft.compat.moe_alltoall import MoeAlltoAll
from weft.compat.ranks import RankPlace, lease_group, release_group
from weft.compat.refusals import BACKEND, refuse
from weft.compat.sizes import MAX_BYTES
from weft.errors import InvalidArgument, OutOfOrder
from weft.fields import largest
from weft.memory import Group
from weft.runtime.check import check_alignment, check_tensor
from weft.shape import MAX_RANKS, Shape

FIRST_BYTE = 0  # of a rank's results in its row of the workspace


@dataclass(slots=True)
class _State:
    """What a metainfo tensor stands for.

    sizes: MoeAlltoAll objects by top_k, experts and whether calls bring rank masks.
    running: the one that is between dispatch and combine.
    """

    group: Group
    owns_group: bool
    rank: int
    size: int
    max_tokens: int
    stats: int
    number: int
    sizes: dict[tuple[int, int, bool], MoeAlltoAll] = field(default_factory=dict)
    running: MoeAlltoAll | None = None

    def close(self) -> None:
        for a2a in self.sizes.values():
            a2a.close()
        if self.owns_group:
            release_group(self.group)


_numbers = itertools.count(1)
_states: dict[int, _State] = {}


def moe_a2a_initialize(
    workspace: torch.Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
    group: Group | None = None,
) -> torch.Tensor:
    """The metainfo tensor for the other calls: int64 `[1]` on the CPU. Collective.

    workspace: uint8 `[ep_size, bytes]`; row ep_rank may hold this rank's results for combine.
    group: weft's own; the ranks, else those of torch.distributed's world, else torchrun's.

    Memory is made by the first round of each payload list, as with MoeAlltoAll, and given back when
    the tensor is gone. Raises InvalidArgument, RendezvousFailed.
    """
    refuse("backend", backend, "trtllm", BACKEND)
    size = integer("ep_size", ep_size, 1, MAX_RANKS)
    rank = integer("ep_rank", ep_rank, 0, size - 1)
    max_tokens = integer("max_num_tokens", max_num_tokens, 1, largest(Shape, "tokens"))
    stats = integer("eplb_stats_num_experts", eplb_stats_num_experts, 0, largest(Shape, "stats"))
    ranks = lease_group(RankPlace(rank, size), None, group)
    number = next(_numbers)
    state = _State(ranks, group is None, rank, size, max_tokens, stats, number)
    try:
        _check_workspace(workspace, state)
    except InvalidArgument:
        state.close()
        raise
    metainfo = torch.tensor([number], dtype=torch.int64, device="cpu")
    _states[number] = state
    weakref.finalize(metainfo, _forget, number).atexit = False
    return metainfo


def moe_a2a_dispatch(
    token_selected_experts: torch.Tensor,
    input_payloads: Sequence[torch.Tensor],
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    eplb_local_stats: torch.Tensor | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    *,
    backend: str = "trtllm",
    recv_view_cache: dict[Any, Any] | None = None,
) -> tuple[list[torch.Tensor], int, torch.Tensor | None]:
    """`MoeAlltoAll.dispatch`, as `(received, combine_payload_offset, eplb_gathered_stats)`.

    enable_pdl, recv_view_cache: accepted; change nothing.
    """
    refuse("backend", backend, "trtllm", BACKEND)
    state = _state(metainfo, workspace, ep_rank=ep_rank, ep_size=ep_size)
    flags(enable_rank_mask=enable_rank_mask)
    if state.running is not None:
        raise OutOfOrder("moe_a2a_dispatch with this metainfo twice: call moe_a2a_combine first")
    top_k, num_experts = integer("top_k", top_k), integer("num_experts", num_experts)
    key = (top_k, num_experts, enable_rank_mask)
    if key not in state.sizes:
        state.sizes[key] = MoeAlltoAll(
            RankPlace(state.rank, state.size),
            state.max_tokens,
            top_k,
            num_experts,
            workspace_size_per_rank=workspace.shape[1],
            eplb_stats_num_experts=state.stats,
            enable_rank_mask=enable_rank_mask,
            group=state.group,
            _apart=state.number,
        )
    a2a = state.sizes[key]
    received = a2a.dispatch(
        token_selected_experts,
        input_payloads,
        runtime_max_tokens_per_rank,
        eplb_local_stats=eplb_local_stats,
        active_rank_mask=active_rank_mask,
    )
    state.running = a2a
    return received, FIRST_BYTE, a2a.eplb_gathered_stats


def moe_a2a_sanitize_expert_ids(
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Fill the rows of `expert_ids` that no token was sent to; between dispatch and combine.

    expert_ids: int32 or int64 `[ep_size, runtime_max_tokens_per_rank, top_k]`, as received.
    """
    refuse("backend", backend, "trtllm", BACKEND)
    state = _state(metainfo, workspace, ep_rank=ep_rank)
    _running(state, "moe_a2a_sanitize_expert_ids").sanitize(expert_ids, invalid_expert_id)


def moe_a2a_combine(
    payload: torch.Tensor,
    local_num_tokens: int,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output_dtype: torch.dtype | None = None,
    output_scales: torch.Tensor | None = None,
    output_scalar_scale: float = 1.0,
    sf_layout: Any = None,
    output: torch.Tensor | None = None,
    *,
    use_low_precision: bool = False,
    enable_pdl: bool | None = None,
    enable_rank_mask: bool = False,
    active_rank_mask: torch.Tensor | None = None,
    backend: str = "trtllm",
) -> torch.Tensor:
    """`MoeAlltoAll.combine`. A payload in the workspace is copied, as any other.

    local_num_tokens, top_k, enable_rank_mask: those of dispatch.
    combine_payload_offset: what dispatch returned.
    """
    refuse("backend", backend, "trtllm", BACKEND)
    state = _state(metainfo, workspace, ep_rank=ep_rank, ep_size=ep_size)
    a2a = _running(state, "moe_a2a_combine")
    flags(payload_in_workspace=payload_in_workspace, enable_rank_mask=enable_rank_mask)
    for name, given, sent in (
        ("local_num_tokens", local_num_tokens, a2a.pending_tokens),
        ("top_k", top_k, a2a.top_k),
        ("combine_payload_offset", combine_payload_offset, FIRST_BYTE),
    ):
        if integer(name, given) != sent:
            raise InvalidArgument(f"{name} is {shown(given)}; this round's dispatch had {sent}")
    if enable_rank_mask != a2a.enable_rank_mask:
        raise InvalidArgument(
            f"enable_rank_mask is {enable_rank_mask}; dispatch had {a2a.enable_rank_mask}"
        )
    place = workspace[state.rank].data_ptr() + FIRST_BYTE
    if payload_in_workspace and not _starts_at(payload, place):
        raise InvalidArgument(
            f"payload is not at {place:#x}, where payload_in_workspace=True says; use "
            "moe_a2a_wrap_payload_tensor_in_workspace(workspace[ep_rank], ...)"
        )
    result = a2a.combine(
        payload,
        runtime_max_tokens_per_rank,
        output_dtype=output_dtype,
        output_scales=output_scales,
        output_scalar_scale=output_scalar_scale,
        sf_layout=sf_layout,
        output=output,
        use_low_precision=use_low_precision,
        active_rank_mask=active_rank_mask,
    )
    state.running = None
    return result


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: torch.Tensor,
    leading_shape: Sequence[int],
    slice_start: int,
    slice_end: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bytes slice_start..slice_end of `[ep_size, bytes]`, or of one row, as `[*leading_shape, -1]`.

    Offsets count from the first row on; a slice lies in one row. Raises InvalidArgument.
    """
    instance("workspace", workspace, torch.Tensor)
    instance("dtype", dtype, torch.dtype)
    leading = integers("leading_shape", leading_shape, 1, MAX_BYTES)
    rows = workspace.unsqueeze(0) if workspace.dim() == 1 else workspace
    check_rows = rows.dtype == torch.uint8 and rows.dim() == 2 and rows.stride(1) == 1
    if not check_rows or not rows.numel():
        raise InvalidArgument(
            f"workspace is {list(workspace.shape)} {workspace.dtype}; it must be uint8 "
            "[ep_size, bytes] or [bytes]"
        )
    start = integer("slice_start", slice_start, 0, MAX_BYTES)
    end = integer("slice_end", slice_end, 1, MAX_BYTES)
    row, first = divmod(start, rows.stride(0) if rows.shape[0] > 1 else rows.shape[1])
    size, unit = end - start, dtype.itemsize
    for each in leading:
        unit *= each
    if (
        size < 1
        or row >= rows.shape[0]
        or first + size > rows.shape[1]
        or size % unit
        or first % 16
    ):
        raise InvalidArgument(
            f"slice_start {start}, slice_end {end}, leading_shape {list(leading)} and dtype "
            f"{dtype} are no whole rows within {rows.shape[1]} bytes, from a multiple of 16 on"
        )
    return rows[row, first : first + size].view(dtype).view(*leading, -1)


def _state(metainfo: torch.Tensor, workspace: torch.Tensor, **said: int) -> _State:
    """What `metainfo` stands for, where the call's other arguments agree with it."""
    cpu = torch.device("cpu")
    check_tensor("metainfo", metainfo, shape=(1,), dtypes=(torch.int64,), device=cpu)
    check_alignment("metainfo", metainfo, metainfo.itemsize)
    state = _states.get(int(metainfo.tolist()[0]))
    if state is None:
        raise InvalidArgument(
            f"metainfo is {metainfo.tolist()}; pass the tensor that moe_a2a_initialize returned, "
            "and keep it as long as rounds go on"
        )
    _check_workspace(workspace, state)
    for name, given in said.items():
        made = state.rank if name == "ep_rank" else state.size
        if integer(name, given) != made:
            raise InvalidArgument(
                f"{name} is {shown(given)}; moe_a2a_initialize was called with {made}"
            )
    return state


def _check_workspace(workspace: torch.Tensor, state: _State) -> None:
    shape, device = (state.size, None), state.group.device
    check_tensor("workspace", workspace, shape=shape, dtypes=(torch.uint8,), device=device)
    check_alignment("workspace", workspace, workspace.stride(0))


def _starts_at(payload: Any, address: int) -> bool:
    dense = isinstance(payload, torch.Tensor) and payload.layout is torch.strided
    return dense and not payload.is_nested and payload.data_ptr() == address


def _running(state: _State, call: str) -> MoeAlltoAll:
    if state.running is None:
        raise OutOfOrder(f"{call} without moe_a2a_dispatch: no tokens of this rank are away")
    return state.running


def _forget(number: int) -> None:
    _states.pop(number).close()
