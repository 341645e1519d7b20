"""`MoeAlltoAll` with the signatures of flashinfer.comm, on weft.AllToAll; and `allreduce_fusion`.

What is the same, stricter and refused stands in docs/compat.md, call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.alltoall.geometry import declared
from weft.alltoall.received import Payload
from weft.arguments import flags, instance, integer, one_of, seconds, shown
from weft.compat.allreduce_fusion import AllReduceFusionPattern, allreduce_fusion
from weft.compat.fusion_workspace import (
    AllReduceFusionWorkspace,
    create_allreduce_fusion_workspace,
)
from weft.compat.leases import SharedWorkspace, Terms, lease, release
from weft.compat.ranks import EpMapping, lease_group, place, release_group
from weft.compat.refusals import (
    BACKEND,
    MASK,
    RESULT,
    StaysMapped,
    check_batch,
    check_ids,
    check_stats,
    refuse,
    renamed,
    row_text,
)
from weft.compat.sizes import (
    default_payloads,
    moe_a2a_get_workspace_size_per_rank,
    moe_workspace_size,
)
from weft.errors import InvalidArgument, OutOfOrder, TokenOverflow, UsageError
from weft.fields import largest
from weft.memory import Group
from weft.runtime.check import refuse_tensor, tensors_of
from weft.runtime.stream import capturing
from weft.shape import DTYPE_NAMES, MAX_TOP_K, Shape

__all__ = ["MoeAlltoAll", "moe_a2a_get_workspace_size_per_rank"]
__all__ += ["AllReduceFusionPattern", "AllReduceFusionWorkspace"]
__all__ += ["allreduce_fusion", "create_allreduce_fusion_workspace"]


@dataclass(frozen=True, slots=True)
class _Round:
    """A dispatch that waits for its combine."""

    tokens: int
    runtime_max: int
    counts: torch.Tensor
    stats: torch.Tensor | None


class MoeAlltoAll(StaysMapped):
    """Expert-parallel dispatch and combine with the calls of `flashinfer.comm.MoeAlltoAll`.

    mapping: anything with moe_ep_rank and moe_ep_size, such as flashinfer's Mapping.
    max_num_tokens: most tokens of one rank in one call.
    workspace_size_per_rank: accepted and not used; sizes follow from the other arguments.
    hidden_size: elements of a combine row; needed.
    mnnvl_config: its comm_backend, if any, is how the ranks meet.
    eplb_stats_num_experts: int32 numbers that each rank may send to all ranks in dispatch.

    Arguments of weft's own:
    group: the ranks; default mnnvl_config's, else torch.distributed's world, else torchrun's.
    payloads: the rows that dispatch will carry. Default hidden_size x dtype, top_k x int32 and
        top_k x float32. If it is left out and the first dispatch brings another list, that call
        makes the workspace anew, on all ranks; it may not be in a graph capture. After that, or if
        `payloads` was given, another list is refused.
    dtype: of combine rows; bfloat16, float16 or float32.
    contiguous: return contiguous tensors for runtime_max_tokens_per_rank below max_num_tokens too,
        at the price of a local copy and as much ordinary memory again; else strided views.
    timeout, first_timeout: seconds that a wait for a peer may take, and the first one.

    Objects of one process with equal sizes share one workspace, as there; only one of them may be
    between dispatch and combine. Collective. Raises InvalidArgument, CreationFailed,
    GeometryMismatch, RendezvousFailed.
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
        group: Group | None = None,
        payloads: Sequence[Payload] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        contiguous: bool = False,
        timeout: float = 120.0,
        first_timeout: float = 120.0,
    ) -> None:
        refuse("enable_rank_mask", enable_rank_mask, False, MASK)
        refuse("backend", backend, "trtllm", BACKEND)
        if hidden_size is None:
            raise InvalidArgument(
                f"hidden_size is None and workspace_size_per_rank is "
                f"{shown(workspace_size_per_rank)}; pass hidden_size: rows are laid out one by "
                "one, not carved from a byte count"
            )
        limit = largest(Shape, "tokens")
        max_num_tokens = integer("max_num_tokens", max_num_tokens, 1, limit)
        top_k = integer("top_k", top_k, 1, MAX_TOP_K)
        num_experts = integer("num_experts", num_experts, 1, largest(Shape, "experts"))
        hidden_size = integer("hidden_size", hidden_size, 1, largest(Shape, "hidden"))
        stats = integer(
            "eplb_stats_num_experts", eplb_stats_num_experts, 0, largest(Shape, "stats")
        )
        dtype = one_of("dtype", dtype, DTYPE_NAMES)
        rows = declared(payloads) if payloads else default_payloads(hidden_size, top_k, dtype)
        flags(contiguous=contiguous)
        timeout = seconds("timeout", timeout)
        first_timeout = seconds("first_timeout", first_timeout)
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        self.ep_rank, self.ep_size = place(mapping)
        self.eplb_stats_num_experts = stats
        self.enable_eplb = stats > 0
        self.enable_rank_mask = enable_rank_mask
        self.group = lease_group(mapping, mnnvl_config, group)
        self._owns_group = group is None
        self._settled = bool(payloads)
        self._round: _Round | None = None
        self._workspace: SharedWorkspace | None = None
        terms = Terms(
            group=self.group,
            max_tokens=max_num_tokens,
            top_k=top_k,
            num_experts=num_experts,
            hidden=hidden_size,
            dtype=dtype,
            payloads=rows,
            stats=stats,
            contiguous=contiguous,
            timeout=timeout,
            first_timeout=first_timeout,
        )
        try:
            self._workspace = lease(terms)
        except Exception:
            self.close()
            raise

    get_moe_workspace_size_per_rank = staticmethod(moe_workspace_size)

    @property
    def workspace_size_per_rank(self) -> int:
        """Bytes of symmetric memory that each rank holds now."""
        return self._open().terms.memory_bytes()

    @property
    def eplb_gathered_stats(self) -> torch.Tensor | None:
        """int32 `[ep_size, eplb_stats_num_experts]`, every rank's; symmetric memory.

        Between a dispatch that brought eplb_local_stats and its combine; None otherwise.
        """
        return None if self._round is None else self._round.stats

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
        """Send each token's rows to the ranks that hold its experts; return what came here.

        token_selected_experts: int32 or int64 `[tokens, top_k]`, global ids, -1 for none.
        input_payloads: tensors `[tokens, *]`; errors call number i `x[i]`.
        runtime_max_tokens_per_rank: at least every rank's tokens in this call.
        invalid_token_expert_id: if given, replaces in payload number expert_id_payload_index, which
            holds the ids `[tokens, top_k]`, every id that names no expert of this rank.
        eplb_local_stats: int32 `[eplb_stats_num_experts]`, for `eplb_gathered_stats` of all ranks;
            a rank that leaves it out counts as zeros there.
        enable_pdl: accepted; changes nothing.

        Returns a tensor `[ep_size, runtime_max_tokens_per_rank, *]` for each payload. Row `[s, t]`
        is token t of rank s; rows of tokens that chose no expert here are undefined. They are valid
        until combine. Raises InvalidArgument, TokenOverflow, OutOfOrder, what making a workspace
        raises if the list is new, and what broke the group.
        """
        self._open()
        device = self.group.device
        check_stats(eplb_local_stats, self.eplb_stats_num_experts, device)
        refuse("active_rank_mask", active_rank_mask, None, MASK)
        if self._round is not None:
            raise OutOfOrder(
                f"dispatch while {self._round.tokens} tokens are away: call combine first"
            )
        limit = runtime_max_tokens_per_rank
        check_batch(token_selected_experts, limit, self.top_k, self.max_num_tokens, device)
        if isinstance(input_payloads, torch.Tensor):  # its rows would count as payloads
            refuse("input_payloads", input_payloads, (), "pass a list of tensors")
        given = tensors_of("input_payloads", input_payloads)
        rows = tuple(Payload(tuple(t.shape[1:]), t.dtype) for t in given)
        invalid, ids = invalid_token_expert_id, expert_id_payload_index
        if invalid is not None:
            check_ids(rows, self.top_k, invalid, ids)
        workspace = self._settle(rows)
        try:
            received = workspace.dispatch(given, token_selected_experts, eplb_local_stats)
        except UsageError as error:
            names = {"topk_ids": "token_selected_experts", "stats": "eplb_local_stats"}
            raise renamed(error, names) from error
        gathered = None if eplb_local_stats is None else received.stats
        tokens = token_selected_experts.shape[0]
        self._round = _Round(tokens, limit, received.counts, gathered)
        views = [workspace.view(p, t, limit) for p, t in enumerate(received.payloads)]
        if invalid is not None and ids is not None:
            workspace.mark_unrouted(views[ids], received.ids, invalid)
        return views

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """`[ep_size, runtime_max_tokens_per_rank, hidden_size]` for experts to write.

        Between dispatch and combine only; then pass it to combine with payload_in_workspace=True.
        Raises OutOfOrder, and InvalidArgument for other sizes than dispatch's and the object's.
        """
        workspace, running = self._dispatched("get_combine_payload_tensor_in_workspace")
        _check_runtime_max(runtime_max_tokens_per_rank, running)
        terms = workspace.terms
        hidden_size = integer("hidden_size", hidden_size, 1, largest(Shape, "hidden"))
        instance("dtype", dtype, torch.dtype)
        if (hidden_size, dtype) != (terms.hidden, terms.dtype):
            raise InvalidArgument(
                f"hidden_size is {hidden_size} and dtype {dtype}; this all-to-all was built for "
                f"{terms.hidden} x {terms.dtype}: pass hidden_size= and dtype= to it"
            )
        return workspace.results(runtime_max_tokens_per_rank)

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
        """Return the rows and add those of each token at its owner, in fp32 and in rank order.

        payload: `[ep_size, runtime_max_tokens_per_rank, hidden_size]`; row `[s, t]` is this rank's
            weighted sum for token t of rank s. Rows of tokens without an expert here are not read.
        runtime_max_tokens_per_rank: as in dispatch.
        payload_in_workspace: payload is what get_combine_payload_tensor_in_workspace returned.
        output: `[tokens, hidden_size]` to write into.

        Returns `[tokens, hidden_size]`. Raises InvalidArgument, OutOfOrder, what broke the group.
        """
        workspace, running = self._dispatched("combine")
        terms = workspace.terms
        refuse("use_low_precision", use_low_precision, False, RESULT)
        refuse("active_rank_mask", active_rank_mask, None, MASK)
        refuse("output_scales", output_scales, None, RESULT)
        refuse("output_scalar_scale", output_scalar_scale, 1.0, RESULT)
        refuse("sf_layout", getattr(sf_layout, "name", sf_layout), (None, "layout_linear"), RESULT)
        refuse("output_dtype", output_dtype, (None, terms.dtype), RESULT)
        _check_runtime_max(runtime_max_tokens_per_rank, running)
        flags(payload_in_workspace=payload_in_workspace)
        if not isinstance(payload, torch.Tensor):
            refuse_tensor("payload", payload)
        workspace.take(payload, running.runtime_max, payload_in_workspace)
        try:
            result = workspace.a2a.combine(out=output)
        except UsageError as error:
            raise renamed(error, {"out": "output"}) from error
        self._round = None
        return result

    def check(self) -> None:
        """Raise what the device has recorded (`weft.AllToAll.check`).

        Between dispatch and combine it waits for the device, and also raises TokenOverflow if a
        rank brought more tokens than this rank's runtime_max_tokens_per_rank shows.
        """
        workspace, running = self._open(), self._round
        workspace.a2a.check()
        counts = [] if running is None else running.counts.tolist()
        for source, tokens in enumerate(counts):
            if running is not None and tokens > running.runtime_max:
                raise TokenOverflow(
                    f"rank {source} brought {tokens} tokens; rank {self.ep_rank} was called with "
                    f"runtime_max_tokens_per_rank={running.runtime_max}: pass the largest number "
                    "of tokens of any rank, the same on every rank"
                )

    def close(self) -> None:
        """Give up the workspace, and the group if it was not given. Local and idempotent."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            release(workspace)
        if self._owns_group:
            self._owns_group = False
            release_group(self.group)

    def __enter__(self) -> MoeAlltoAll:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> SharedWorkspace:
        if self._workspace is None:
            raise OutOfOrder("this all-to-all was closed; make a new one")
        return self._workspace

    def _dispatched(self, call: str) -> tuple[SharedWorkspace, _Round]:
        workspace = self._open()
        if self._round is None:
            raise OutOfOrder(f"{call} without a dispatch: no tokens of this rank are away")
        return workspace, self._round

    def _settle(self, rows: tuple[Payload, ...]) -> SharedWorkspace:
        """The workspace for this payload list, made anew if it is the first one and is another."""
        workspace = self._open()
        terms = workspace.terms
        if rows == terms.payloads:
            self._settled = True
            return workspace
        if self._settled or capturing(self.group.device):
            why = "was built for" if self._settled else "is in a graph capture and was built for"
            raise InvalidArgument(
                f"payload rows {', '.join(map(row_text, rows))}; this all-to-all {why} "
                f"{', '.join(map(row_text, terms.payloads))}: pass payloads= to its constructor, "
                "and make one all-to-all for each list"
            )
        self._workspace = None
        release(workspace)  # before the new one is made, so that memory need not hold both
        self._workspace = lease(replace(terms, payloads=rows))
        self._settled = True
        return self._workspace


def _check_runtime_max(given: int, running: _Round) -> None:
    given = integer("runtime_max_tokens_per_rank", given, 1, largest(Shape, "tokens"))
    if given != running.runtime_max:
        raise InvalidArgument(
            f"runtime_max_tokens_per_rank is {given}; dispatch was called with "
            f"{running.runtime_max}: pass the same to all calls of a round"
        )
