# SPDX-License-Identifier: Apache-2.0
"""`MoeAlltoAll` with the signatures of flashinfer.comm, on weft.AllToAll."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.arguments import check_bools, check_choice, check_instance, check_int, check_seconds
from weft.compat.checks import (
    BACKEND_REASON,
    MASK_WORDS,
    RESULT_REASON,
    check_allowed,
    check_batch,
    check_ids,
    check_mask,
    check_payloads,
    check_stats,
    rename_argument,
)
from weft.compat.moe_workspace import CombineRow, MoeWorkspace, RowBytes, guess_combine_row
from weft.compat.ranks import EpMapping, lease_group, read_rank_and_size
from weft.compat.sizes import MAX_BYTES, get_moe_workspace_size
from weft.errors import InvalidArgument, OutOfOrder, UsageError
from weft.fields import max_value
from weft.group import Group
from weft.leases import Lease, lease
from weft.runtime.check import check_alignment, check_gradient, raise_not_tensor
from weft.runtime.library import disable_tracing
from weft.runtime.operator import run_all
from weft.shape import DTYPE_NAMES, MAX_TOP_K, Shape


@dataclass(slots=True)
class _Round:
    """State between a dispatch and its combine.

    Attributes:
        dispatch_operator: The all-to-all that sent the payloads.
        combine_operator: The all-to-all that returns rows `row`. It differs from dispatch_operator
            only in a first round whose combine row was guessed wrong.
        ids: The tokens' expert ids, stored as long as combine_operator may change.
        combine_buffer: The tensor that get_combine_payload_tensor_in_workspace returned.
    """

    tokens: int
    limit: int
    payloads: RowBytes
    row: CombineRow
    dispatch_operator: AllToAll
    combine_operator: AllToAll
    received: Received
    ids: torch.Tensor | None
    stats: torch.Tensor | None
    combine_buffer: torch.Tensor | None = None


class MoeAlltoAll:
    """Expert-parallel dispatch and combine with the calls of `flashinfer.comm.MoeAlltoAll`.

    The first round of each list of payload row sizes allocates memory on all ranks together, so it
    may not be in a graph capture. That round also fixes the size and dtype of its combine rows.
    Objects of one process with equal sizes share workspaces, as in flashinfer.comm; only one of
    them may be between dispatch and combine. Collective.

    Args:
        mapping: An object with moe_ep_rank and moe_ep_size, such as flashinfer's Mapping.
        max_num_tokens: Maximum tokens of one rank in one call.
        top_k: Experts per token.
        num_experts: Experts of all ranks.
        workspace_size_per_rank: Bytes. Memory follows from the calls instead, but objects with
            different values share no workspace.
        hidden_size: Elements of a combine row; required without workspace_size_per_rank.
        mnnvl_config: Its comm_backend, if any, is used for the rendezvous.
        eplb_stats_num_experts: Number of int32 values that each rank may send to all ranks in
            dispatch.
        enable_rank_mask: Whether every call passes an active_rank_mask of the living ranks.
        backend: Must be "trtllm".
        group: The ranks, a weft.Group or a process group. Default: mnnvl_config's, otherwise the
            world of torch.distributed.
        timeout: Seconds to wait for a peer.
        first_timeout: Seconds to wait for a peer in the first round.

    Raises:
        InvalidArgument: If an argument is invalid.
        RendezvousFailed: If the ranks do not meet.
    """

    def __init__(
        self,
        mapping: EpMapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
        group: Group | dist.ProcessGroup | None = None,
        timeout: float = 120.0,
        first_timeout: float = 120.0,
    ) -> None:
        check_bools(enable_rank_mask=enable_rank_mask)
        check_allowed("backend", backend, "trtllm", BACKEND_REASON)
        limit = max_value(Shape, "tokens")
        max_num_tokens = check_int("max_num_tokens", max_num_tokens, 1, limit)
        top_k = check_int("top_k", top_k, 1, MAX_TOP_K)
        num_experts = check_int("num_experts", num_experts, 1, max_value(Shape, "experts"))
        stats = check_int(
            "eplb_stats_num_experts", eplb_stats_num_experts, 0, max_value(Shape, "stats")
        )
        timeout = check_seconds("timeout", timeout)
        first_timeout = check_seconds("first_timeout", first_timeout)
        rank, size = read_rank_and_size(mapping)
        if hidden_size is not None:
            hidden_size = check_int("hidden_size", hidden_size, 1, max_value(Shape, "hidden"))
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        self.ep_rank, self.ep_size = rank, size
        if enable_rank_mask:
            check_int("mapping.moe_ep_size with enable_rank_mask", size, 1, 64 * MASK_WORDS)
        self._check_sizes(hidden=hidden_size or 8, stats=stats)
        if workspace_size_per_rank is not None:
            requested = workspace_size_per_rank
            workspace_size_per_rank = check_int("workspace_size_per_rank", requested, 1, MAX_BYTES)
        elif hidden_size is not None:
            workspace_size_per_rank = get_moe_workspace_size(
                size, top_k, max_num_tokens, hidden_size, eplb_stats_num_experts=stats
            )
        else:
            raise InvalidArgument("hidden_size and workspace_size_per_rank are None; pass one")
        self.workspace_size_per_rank = workspace_size_per_rank
        self.eplb_stats_num_experts = stats
        self.enable_eplb = stats > 0
        self.enable_rank_mask = enable_rank_mask
        comm = getattr(mnnvl_config, "comm_backend", None)
        ranks = tuple(getattr(mapping, "moe_ep_group", ()))
        self.group, release = lease_group(rank, size, group, comm, ranks)
        self._hidden = hidden_size
        self._rows: dict[RowBytes, CombineRow] = {}  # known after the first round
        self._round: _Round | None = None
        try:
            shared = lease(
                self.group,
                MoeWorkspace,
                max_tokens=max_num_tokens,
                top_k=top_k,
                num_experts=num_experts,
                stats=stats,
                requested_size=workspace_size_per_rank,
                timeout=timeout,
                first_timeout=first_timeout,
            )
        except BaseException:
            release()
            raise
        self._workspace = shared.operator
        self._layer = shared.operator.allocate_layer_number()
        self._open_rounds: set[AllToAll] = set()  # between dispatch and combine
        # Engines drop objects without closing them.
        self._finalizer = weakref.finalize(
            self, _release_resources, shared, release, self._open_rounds
        )
        self._finalizer.atexit = False

    get_moe_workspace_size_per_rank = staticmethod(get_moe_workspace_size)

    @property
    def eplb_gathered_stats(self) -> torch.Tensor | None:
        """All ranks' statistics, int32 `[ep_size, eplb_stats_num_experts]`, in symmetric memory.

        Valid between a dispatch with eplb_local_stats and its combine; None otherwise.
        """
        return None if self._round is None else self._round.stats

    @disable_tracing
    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: Sequence[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
        active_rank_mask: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> list[torch.Tensor]:
        """Send each token's rows to the ranks of its experts, and return the received rows.

        Args:
            token_selected_experts: int32 or int64 `[tokens, top_k]`, global ids, -1 for none.
            input_payloads: Up to 8 tensors `[tokens, *]` of any dtype. They may differ between
                calls.
            runtime_max_tokens_per_rank: Maximum tokens of any rank in this call, equal on all
                ranks.
            invalid_token_expert_id: Value for rows of payload expert_id_payload_index, ids
                `[tokens, top_k]`, to which no token was sent.
            expert_id_payload_index: Index of the payload with expert ids.
            eplb_local_stats: int32 `[eplb_stats_num_experts]`, for `eplb_gathered_stats`. A rank
                that omits it contributes zeros.
            active_rank_mask: With enable_rank_mask, the living ranks (`moe_a2a_active_rank_mask`):
                all ranks until the group recovers from a death. Ids of dead ranks'
                experts are dropped.
            enable_pdl: Ignored.

        Returns:
            A contiguous tensor `[ep_size, runtime_max_tokens_per_rank, *]` per payload. Row `[s,
                t]` is token t of rank s; rows of tokens without an expert here are undefined. They
                are valid until combine. A payload whose rows are multiples of 16 bytes is in
                symmetric memory.

        Raises:
            InvalidArgument: If an argument is invalid.
            TokenOverflow: If there are more tokens than `max_num_tokens`.
            OutOfOrder: If a combine is pending, or the object is closed.
            GeometryMismatch: If ranks pass different sizes.
            GroupError: If the group is broken.
        """
        workspace, device, limit = (
            self._get_workspace(),
            self.group.device,
            runtime_max_tokens_per_rank,
        )
        check_stats(eplb_local_stats, self.eplb_stats_num_experts, device)
        check_mask(active_rank_mask, self.enable_rank_mask, self.group)
        self._drop_broken_round()
        if self._round is not None:
            raise OutOfOrder(
                f"dispatch before the combine of {self._round.tokens} tokens: call combine first"
            )
        ids = token_selected_experts
        check_batch(ids, limit, self.top_k, self.max_num_tokens, device)
        payloads = check_payloads(input_payloads, ids.shape[0], device)
        rows = [Payload(tuple(t.shape[1:]), t.dtype) for t in payloads]
        ids_index = expert_id_payload_index
        if invalid_token_expert_id is not None:
            check_ids(rows, self.top_k, invalid_token_expert_id, ids_index)
        sizes = tuple(row.row_bytes for row in rows)
        known_row = self._rows.get(sizes)
        row = (
            known_row or workspace.combine_rows.get(sizes) or guess_combine_row(rows, self._hidden)
        )
        dispatch_operator = workspace.get_operator(sizes, row)
        stats = workspace.zero_stats if eplb_local_stats is None else eplb_local_stats
        byte_views = [_view_as_bytes(t, size) for t, size in zip(payloads, sizes, strict=True)]
        try:
            received = self._send(dispatch_operator, byte_views, ids, stats, limit)
        except UsageError as error:
            names = {"topk_ids": "token_selected_experts", "stats": "eplb_local_stats"}
            raise rename_argument(error, names) from error
        self._open_rounds.add(dispatch_operator)
        self._round = _Round(
            tokens=ids.shape[0],
            limit=limit,
            payloads=sizes,
            row=row,
            dispatch_operator=dispatch_operator,
            combine_operator=dispatch_operator,
            received=received,
            ids=ids.clone() if known_row is None else None,
            stats=None if eplb_local_stats is None else received.stats,
        )
        views = [
            plane.contiguous().view(t.dtype).view(*plane.shape[:2], *t.shape[1:])
            for plane, t in zip(received.payloads, payloads, strict=True)
        ]
        if invalid_token_expert_id is not None and ids_index is not None:
            _fill_unrouted(views[ids_index], received.ids, invalid_token_expert_id)
        return views

    @disable_tracing
    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the buffer `[ep_size, runtime_max_tokens_per_rank, hidden_size]` for combine.

        Call it between dispatch and combine, write the experts' results into the contiguous buffer,
        and pass it to combine with payload_in_workspace=True.

        Raises:
            OutOfOrder: If no dispatch is pending.
            InvalidArgument: If the number of tokens differs from the dispatch's, or combine cannot
                return such rows.
        """
        _, pending = self._require_dispatch("get_combine_payload_tensor_in_workspace")
        _check_limit(runtime_max_tokens_per_rank, pending)
        hidden_size = check_int("hidden_size", hidden_size, 1, max_value(Shape, "hidden"))
        check_choice("dtype", check_instance("dtype", dtype, torch.dtype), DTYPE_NAMES)
        if (hidden_size, dtype) == (pending.row.hidden, pending.row.dtype):
            pending.combine_buffer = pending.combine_operator.output(pending.limit)
        else:
            self._get_saved_ids(CombineRow(hidden_size, dtype), pending)
            self._check_sizes(hidden=hidden_size, dtype=dtype)
            shape = (self.ep_size, pending.limit, hidden_size)
            pending.combine_buffer = torch.empty(shape, dtype=dtype, device=self.group.device)
        return pending.combine_buffer

    @disable_tracing
    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: torch.dtype | None = None,
        output_scales: torch.Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: Any = None,
        output: torch.Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        """Send rows to the ranks that own the tokens, and sum them there in fp32 and rank order.

        Args:
            payload: `[ep_size, runtime_max_tokens_per_rank, hidden_size]`, bfloat16, float16 or
                float32. Row `[s, t]` is this rank's weighted sum for token t of rank s. Rows of
                tokens without an expert here are not read.
            runtime_max_tokens_per_rank: As in dispatch.
            payload_in_workspace: Whether payload is the tensor that
                get_combine_payload_tensor_in_workspace returned.
            output_dtype: None or the result's dtype.
            output_scales: Must be None.
            output_scalar_scale: Must be 1.
            sf_layout: None or linear.
            output: `[tokens, hidden_size]` to write into.
            use_low_precision: Send rows as FP8 with a scale per 128 columns. The result is
                bfloat16.
            active_rank_mask: As in dispatch.
            enable_pdl: Ignored.

        Returns:
            `[tokens, hidden_size]` of payload's dtype.

        Raises:
            InvalidArgument: If an argument is invalid.
            OutOfOrder: If no dispatch is pending, or the object is closed.
            GroupError: If the group is broken.
        """
        workspace, pending = self._require_dispatch("combine")
        check_bools(payload_in_workspace=payload_in_workspace, use_low_precision=use_low_precision)
        check_mask(active_rank_mask, self.enable_rank_mask, self.group)
        check_allowed("output_scales", output_scales, None, RESULT_REASON)
        check_allowed("output_scalar_scale", output_scalar_scale, 1.0, RESULT_REASON)
        check_allowed(
            "sf_layout",
            getattr(sf_layout, "name", sf_layout),
            (None, "layout_linear"),
            RESULT_REASON,
        )
        _check_limit(runtime_max_tokens_per_rank, pending)
        self._check_payload(payload, pending, payload_in_workspace)
        dtype = torch.bfloat16 if use_low_precision else payload.dtype
        check_allowed("output_dtype", output_dtype, (None, dtype), RESULT_REASON)
        operator = self._get_combine_operator(
            CombineRow(payload.shape[2], dtype, use_low_precision)
        )
        combine_input = operator.output(pending.limit)
        if not _is_same_view(payload, combine_input):
            combine_input.copy_(payload)
        try:
            result = operator.combine(out=output)
        except UsageError as error:
            raise rename_argument(error, {"out": "output"}) from error
        if operator is not pending.dispatch_operator:
            pending.dispatch_operator.combine()  # completes the round of the dispatch
        if pending.payloads not in self._rows:
            self._rows[pending.payloads] = pending.row
            workspace.record_combine_row(pending.payloads, pending.row)
        self._round = None
        self._open_rounds.clear()
        return result

    def check(self) -> None:
        """Raise errors recorded by the device (`weft.AllToAll.check`). Not in flashinfer.comm."""
        self._get_workspace().check()

    def close(self) -> None:
        """Free the workspace, and the group if it is not the caller's. Local and idempotent.

        Between dispatch and combine this ends the round: waiting ranks raise PeerLeft.
        """
        self._round = None
        self._finalizer()

    def __enter__(self) -> MoeAlltoAll:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_broken_round(self) -> None:
        """Drop a round that a rank's death broke: its all-to-all has been reset."""
        if self._round is not None and not self._round.dispatch_operator.is_mid_round:
            self._round = None
            self._open_rounds.clear()

    def _get_workspace(self) -> MoeWorkspace:
        if not self._finalizer.alive:
            raise OutOfOrder("this all-to-all was closed; create a new one")
        return self._workspace

    def _require_dispatch(self, call: str) -> tuple[MoeWorkspace, _Round]:
        workspace = self._get_workspace()
        self._drop_broken_round()
        if self._round is None:
            raise OutOfOrder(f"{call} without a dispatch: call dispatch first")
        return workspace, self._round

    def _get_combine_operator(self, row: CombineRow) -> AllToAll:
        """Return this round's all-to-all for combine rows of the format `row`.

        The format is known only at combine. If dispatch assumed another one, the routing is sent
        again through the matching all-to-all.
        """
        workspace, pending = self._require_dispatch("combine")
        if row != pending.row:
            ids = self._get_saved_ids(row, pending)
            operator = workspace.get_operator(pending.payloads, row)
            zero_payloads = [
                torch.zeros((pending.tokens, size), dtype=torch.uint8, device=self.group.device)
                for size in pending.payloads
            ]
            self._send(operator, zero_payloads, ids, workspace.zero_stats, pending.limit)
            self._open_rounds.add(operator)
            pending.row, pending.combine_operator, pending.ids = row, operator, None
        return pending.combine_operator

    def _send(
        self,
        operator: AllToAll,
        byte_views: list[torch.Tensor],
        ids: torch.Tensor,
        stats: torch.Tensor | None,
        rows: int,
    ) -> Received:
        """Dispatch with this object's layer number, so that ranks detect calls of other objects."""
        operator.begin_round(self._layer, rows, 0)
        try:
            return operator.dispatch(byte_views, ids, stats=stats, rows=rows)
        finally:
            operator.end_rounds()

    def _get_saved_ids(self, row: CombineRow, pending: _Round) -> torch.Tensor:
        """Return the tokens' ids. Raises InvalidArgument if this round cannot return other rows."""
        if pending.ids is None:
            raise InvalidArgument(
                f"hidden_size {row.hidden}, dtype {row.dtype} and use_low_precision={row.fp8} of "
                f"payload; earlier rounds with these input_payloads returned rows {pending.row}: "
                "create another MoeAlltoAll for rounds that return other rows"
            )
        return pending.ids

    def _check_sizes(self, **sizes: Any) -> None:
        """Raise InvalidArgument for sizes that weft.AllToAll does not support."""
        tokens, top_k, experts = self.max_num_tokens, self.top_k, self.num_experts
        AllToAll.memory_bytes(
            ranks=self.ep_size, max_tokens=tokens, top_k=top_k, num_experts=experts, **sizes
        )

    def _check_payload(self, payload: torch.Tensor, pending: _Round, in_workspace: bool) -> None:
        """Raise InvalidArgument for a payload that combine does not support."""
        if not isinstance(payload, torch.Tensor):
            raise_not_tensor("payload", payload)
        if payload.layout is not torch.strided or payload.is_nested:
            raise InvalidArgument("payload is a sparse or nested tensor; pass a dense one")
        check_gradient("payload", payload)
        check_alignment("payload", payload, payload.itemsize)
        check_choice("payload.dtype", payload.dtype, DTYPE_NAMES)
        rows_shape, device = (self.ep_size, pending.limit), self.group.device
        if payload.dim() != 3 or payload.shape[:2] != rows_shape or payload.device != device:
            raise InvalidArgument(
                f"payload is {list(payload.shape)} on {payload.device}; it must be "
                f"[{rows_shape[0]}, {rows_shape[1]}, hidden] on {device}"
            )
        combine_buffer = pending.combine_buffer
        if combine_buffer is None and in_workspace:
            raise InvalidArgument(
                "payload_in_workspace=True, but this round has no tensor in the workspace; call "
                "get_combine_payload_tensor_in_workspace and write into what it returns"
            )
        aliases_buffer = (
            combine_buffer is not None and payload.data_ptr() == combine_buffer.data_ptr()
        )
        if (
            combine_buffer is not None
            and (in_workspace or aliases_buffer)
            and not _is_same_view(payload, combine_buffer)
        ):
            raise InvalidArgument(
                f"payload is {list(payload.shape)} {payload.dtype} at {payload.data_ptr():#x} with "
                f"strides {payload.stride()} and payload_in_workspace={in_workspace}; the "
                f"workspace's tensor is {list(combine_buffer.shape)} {combine_buffer.dtype} at "
                f"{combine_buffer.data_ptr():#x} with strides {combine_buffer.stride()}: "
                "write into what "
                "get_combine_payload_tensor_in_workspace returned, or pass another tensor"
            )


def _release_resources(
    shared: Lease[MoeWorkspace], release: Callable[[], None], open_rounds: set[AllToAll]
) -> None:
    run_all(lambda: shared.operator.close_operators(open_rounds), shared.close, release)


def _fill_unrouted(view: torch.Tensor, ids: torch.Tensor, value: int) -> None:
    """Write `value` into the rows of `view` that no token was sent to."""
    unrouted = torch.lt(ids.amax(dim=2, keepdim=True), 0)
    view.masked_fill_(unrouted, value)


def _view_as_bytes(payload: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """View contiguous `[tokens, *]` as uint8 `[tokens, row_bytes]`."""
    flat = payload.view(payload.shape[0], row_bytes // payload.itemsize)
    return flat.view(torch.uint8)


def _is_same_view(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are the same view, ignoring strides of dimensions of size 1."""
    views = [(view.shape, view.dtype, view.data_ptr()) for view in (first, second)]
    if views[0] != views[1]:
        return False
    strides = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in strides)


def _check_limit(tokens: int, pending: _Round) -> None:
    tokens = check_int("runtime_max_tokens_per_rank", tokens, 1, max_value(Shape, "tokens"))
    if tokens != pending.limit:
        raise InvalidArgument(
            f"runtime_max_tokens_per_rank is {tokens}; dispatch was called with "
            f"{pending.limit}: pass the same value to all calls of a round"
        )
