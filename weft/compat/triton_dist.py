# SPDX-License-Identifier: Apache-2.0
"""`EPLowLatencyAllToAllLayer` with the calls of triton_dist, on weft.LowLatencyAllToAll.

docs/user/compat.md lists for each call what is the same, stricter or unsupported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from weft.arguments import check_bools, check_choice, check_instance, check_int
from weft.compat.checks import check_allowed, rename_argument
from weft.compat.ranges import compute_token_indices, pack_ranges
from weft.compat.ranks import lease_group
from weft.errors import GroupError, InvalidArgument, UsageError
from weft.group import Group
from weft.keywords import explain_keywords
from weft.lowlatency.config import GROUPS, MAX_TOKENS
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import Handle
from weft.runtime.library import disable_tracing
from weft.shape import MAX_TOP_K

__all__ = ["DispatchMetaInfo", "EPLowLatencyAllToAllLayer"]

ONLINE_REASON = "dispatch quantizes; weft.LowLatencyAllToAll(quantize=None) sends rows unchanged"
SCALES_REASON = "dispatch computes the scales itself; omit send_scales"
MAX_WORLD = 1 << 16
TRACE_DIR = Path("prof")


@dataclass(frozen=True, slots=True)
class DispatchMetaInfo:
    """Metadata of a dispatch, for combine.

    Attributes:
        recv_token_source_indices: int32 `[local_experts, world_size * max_m]`, each row's token at
            its source.
        recv_token_source_count_and_start: int64 `[local_experts, world_size]`: number of rows from
            each source in the low 32 bits, first row in the high ones.
    """

    recv_token_source_indices: torch.Tensor
    recv_token_source_count_and_start: torch.Tensor
    handle: Handle = field(repr=False)


class EPLowLatencyAllToAllLayer:
    """Expert-parallel dispatch and combine with the calls of triton_dist's layer. Collective.

    The layer has memory for two results. A result may be combined several times or never, and is
    valid until a later dispatch reuses its memory, the oldest first.

    Args:
        max_m: Maximum tokens of one rank.
        hidden: As in LowLatencyAllToAll.
        topk: As in LowLatencyAllToAll.
        online_quant_fp8: Must be True.
        rank: This rank's number in `group`.
        num_experts: As in LowLatencyAllToAll.
        local_world_size: Must equal world_size, because all ranks are on one host.
        world_size: Number of ranks.
        fp8_gsize: As LowLatencyAllToAll's group_size.
        dtype: Dtype of tokens and results.
        enable_profiling: Record traces.
        group: A weft.Group or a process group; default torch.distributed's world. Not in
            triton_dist.
        timeout: Seconds to wait for a peer.
        first_timeout: Seconds to wait for a peer in the first round.

    Raises:
        InvalidArgument: If an argument is invalid.
        CreationFailed: If a rank fails. Every rank raises it.
        GeometryMismatch: If ranks pass different sizes.
        RendezvousFailed: If the ranks do not meet.
    """

    def __init__(
        self,
        max_m: int,
        hidden: int,
        topk: int,
        online_quant_fp8: bool,
        rank: int,
        num_experts: int,
        local_world_size: int,
        world_size: int,
        fp8_gsize: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        enable_profiling: bool = False,
        *,
        group: Group | dist.ProcessGroup | None = None,
        timeout: float = 100.0,
        first_timeout: float = 120.0,
    ) -> None:
        check_allowed("online_quant_fp8", online_quant_fp8, True, ONLINE_REASON)
        local_world_size = check_int("local_world_size", local_world_size, 1, MAX_WORLD)
        world_size = check_int("world_size", world_size, 1, MAX_WORLD)
        rank = check_int("rank", rank, 0, world_size - 1)
        max_m = check_int("max_m", max_m, 1, MAX_TOKENS)
        topk = check_int("topk", topk, 1, MAX_TOP_K)
        fp8_gsize = check_choice("fp8_gsize", fp8_gsize, GROUPS)
        check_bools(enable_profiling=enable_profiling)
        if local_world_size != world_size:
            raise InvalidArgument(
                f"local_world_size is {local_world_size} and world_size {world_size}; weft's ranks "
                "are on one host, so they must be equal"
            )
        self.group, self._release = lease_group(rank, world_size, group)
        self.max_m, self.hidden, self.topk, self.rank = max_m, hidden, topk, rank
        self.num_experts, self.world_size = num_experts, world_size
        self.fp8_gsize, self.dtype, self.enable_profiling = fp8_gsize, dtype, enable_profiling
        try:
            self._a2a = LowLatencyAllToAll(
                self.group,
                max_tokens=max_m,
                top_k=topk,
                num_experts=num_experts,
                hidden=hidden,
                dtype=dtype,
                timeout=timeout,
                first_timeout=first_timeout,
                group_size=fp8_gsize,
                reduce="receiver",  # as in triton_dist, rows return one by one
                profile=enable_profiling,
                _recipe="triton_dist",
                _allow_handle_reuse=True,
            )
        except BaseException:
            self._release()
            raise

    @disable_tracing
    def dispatch(
        self,
        send_tokens: torch.Tensor,
        send_scales: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DispatchMetaInfo]:
        """Send `[tokens, hidden]` to the experts in int `[tokens, topk]`.

        `scale = amax * fl(1 / 448)`, `q = round(x / scale)`. These are triton_dist's bits, except
        that a block of zeros stays zero, and a block with an Inf or a NaN is all NaN. On a GPU the
        quotient is rounded as by Triton, on CPU ranks once.

        Returns:
            float8_e4m3fn `[local_experts, world_size * max_m, hidden]`, float32 scales
                `[local_experts, world_size * max_m, hidden / fp8_gsize]`, int32 counts
                `[local_experts]`, and the metadata for combine.

        Raises:
            InvalidArgument: If an argument is invalid.
            GroupError: If the group is broken.
        """
        check_allowed("send_scales", send_scales, None, SCALES_REASON)
        if topk_indices is None:
            raise InvalidArgument(f"topk_indices is None; pass int32 [tokens, {self.topk}]")
        try:
            rows = self._a2a.dispatch(send_tokens, topk_indices)
        except UsageError as error:
            raise rename_argument(
                error, {"x": "send_tokens", "topk_ids": "topk_indices"}
            ) from error
        assert rows.scales is not None
        meta = DispatchMetaInfo(
            compute_token_indices(rows, self.max_m), pack_ranges(rows), handle=rows.handle
        )
        return rows.x, rows.scales, rows.counts, meta

    @disable_tracing
    def combine(
        self,
        send_tokens: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_weights: torch.Tensor,
        dispatch_meta: DispatchMetaInfo,
        zero_copy: bool = False,
    ) -> torch.Tensor:
        """Return each token's weighted sum of its experts' rows, `[tokens, hidden]`.

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If a later dispatch reused the memory.
            GroupError: If the group is broken.
        """
        check_bools(zero_copy=zero_copy)
        check_instance("dispatch_meta", dispatch_meta, DispatchMetaInfo, "dispatch returns it")
        handle = dispatch_meta.handle
        try:
            return self._a2a.combine(send_tokens, topk_indices, topk_weights, handle)
        except UsageError as error:
            raise rename_argument(
                error, {"y": "send_tokens", "topk_ids": "topk_indices"}
            ) from error

    def dump_dispatch_trace(self) -> None:
        """Write the last rounds, both phases, to prof/ll_dispatch_RANK_{rank}.json.

        No-op without enable_profiling.
        """
        self._dump_phase("dispatch")

    def dump_combine_trace(self) -> None:
        """Write the last rounds, both phases, to prof/ll_combine_RANK_{rank}.json.

        No-op without enable_profiling.
        """
        self._dump_phase("combine")

    def check(self) -> None:
        """Raise errors recorded by the device. Not in triton_dist."""
        self._a2a.check()

    def finalize(self) -> None:
        """Free all memory once this rank's kernels have finished. Idempotent."""
        try:
            pending_error = self._a2a._release()
        finally:
            self._release()
        if isinstance(pending_error, GroupError):  # triton_dist does not raise for invalid ids
            raise pending_error

    def _dump_phase(self, phase: str) -> None:
        if not self.enable_profiling:
            return
        TRACE_DIR.mkdir(exist_ok=True)
        self._a2a.dump_trace(TRACE_DIR / f"ll_{phase}_RANK_{self.rank}.json")


explain_keywords(globals())
