"""LowLatencyAllToAll: expert-parallel dispatch and combine for decoding, expert-major."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from weft.arguments import flags, refuse, seconds
from weft.lowlatency import library as lowlatency_library
from weft.lowlatency.entry import load_low_entries
from weft.lowlatency.geometry import LowGeometry, memory_bytes
from weft.lowlatency.results import ExpertRows, Handle
from weft.lowlatency.rounds import open_rounds
from weft.lowlatency.trace import dump
from weft.memory import Group
from weft.memory.driver import in_relaxed_mode
from weft.placement import Placed
from weft.runtime import library
from weft.runtime.check import check_group
from weft.runtime.kernels import Build
from weft.runtime.layout import Memory
from weft.runtime.timeline import DEFINE
from weft.runtime.watched import Watched, WatchedOperator

Hook = Callable[[], None]


class LowLatencyAllToAll(Placed, WatchedOperator):
    """Quantise each token on its way to its experts' ranks, lay it out by expert, and back.

    Meaning: `weft.lowlatency.reference`. All memory is allocated here; a call allocates nothing
    but its result, synchronises with no host, and may be captured in CUDA graphs. Every rank makes
    the same sequence of calls; a rank without tokens calls with zero of them.

    max_tokens: most tokens of this rank in one call, 1..8192, equal on all ranks.
    hidden: numbers of a token, a multiple of 16 and of group_size.
    top_k: experts per token, 1..32.   num_experts: experts of the layer, on all ranks together.
    quantize: "fp8": dispatch takes x `[tokens, hidden]` of dtype and delivers e4m3 numbers and
        scales; None: it delivers rows as they are.
    group_size: columns that share a scale: 32, 64 or 128.
    scale: "fp32_row", "fp32_col" (column by column, as TMA wants them), "ue8m0" (powers of two,
        four to an int32, column by column).
    slots: results that may be alive at once, 1 or 2.
    reduce: "receiver": a token's owner adds its rows, weighted, in fp32 in top-k order; "sender":
        each rank adds those of its own experts first, and fewer rows travel.
    combine: "push": combine sends the experts' rows to the tokens' owners; "gemm_push": the kernel
        that makes a row stores it at its owner (`ExpertRows.dst_addr`), and combine sends nothing;
        with slots=1, reduce="receiver", and without combine_dtype and split_phase.
    combine_dtype: None: rows travel in dtype; "fp8": as FP8 with a scale for 128 columns.
    dtype: of x, y and out: bfloat16, float16 or float32.
    split_phase: also build `dispatch_send` .. `combine_recv`: a dispatch and a combine may then be
        on their way at once.
    expert_map: rank of each expert; default contiguous blocks, the first ranks holding one more.
    timeout, first_timeout: seconds that a wait for a peer may take, and the first one.
    num_sms: SMs that the kernels may fill; default all.
    programmatic_launch: let a kernel take its place on the GPU while its predecessor in the stream
        still runs; it touches no memory before that one's end.
    profile: let kernels keep the times of the last 32 rounds (`dump_trace`).

    Raises InvalidArgument, CreationFailed (on every rank, when one cannot do its part),
    GeometryMismatch (when ranks pass different sizes).
    """

    @in_relaxed_mode
    def __init__(
        self,
        group: Group,
        max_tokens: int,
        hidden: int,
        top_k: int,
        num_experts: int,
        quantize: str | None = "fp8",
        group_size: int = 128,
        scale: str = "fp32_row",
        slots: int = 2,
        *,
        reduce: str = "receiver",
        combine: str = "push",
        combine_dtype: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        split_phase: bool = False,
        expert_map: Sequence[int] | torch.Tensor | None = None,
        timeout: float = 2.0,
        first_timeout: float = 120.0,
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        profile: bool = False,
        _recipe: str = "weft",
        _defines: Sequence[str] = (),
        _first_epoch: int = 0,
    ) -> None:
        check_group(group)
        problem: Exception | None = None
        try:
            limits = seconds("timeout", timeout), seconds("first_timeout", first_timeout)
            flags(split_phase=split_phase, programmatic_launch=programmatic_launch, profile=profile)
            geometry = LowGeometry.of(
                ranks=group.size,
                max_tokens=max_tokens,
                hidden=hidden,
                top_k=top_k,
                num_experts=num_experts,
                dtype=dtype,
                quantize=quantize,
                group_size=group_size,
                scale=scale,
                slots=slots,
                reduce=reduce,
                combine=combine,
                combine_dtype=combine_dtype,
                expert_map=expert_map,
                profile=profile,
                _recipe=_recipe,
            )
            defines = (*_defines, *((DEFINE,) if profile else ()))
            build = Build(num_sms, programmatic_launch, split_phase, defines)
            entries = load_low_entries(group.device, geometry.shape, build)
        except Exception as error:  # whatever it is, every rank hears of it
            problem = error
        group.vote(
            problem, doing="preparing a low-latency all-to-all", undo=lambda: entries.close()
        )
        self.group, self.dtype, self.placement = group, dtype, geometry.placement
        self._geometry = self.config = geometry
        self._rounds = open_rounds(
            group, geometry, entries, limits, _first_epoch, split_phase=split_phase
        )
        self._order, self._handle, self._sites = lowlatency_library.enrol(self)

    memory_bytes = staticmethod(memory_bytes)

    @property
    def max_tokens(self) -> int:
        """Most tokens of one rank in one call."""
        return self._geometry.shape.tokens

    @property
    def memory(self) -> Memory:
        """Bytes that the rank with most experts holds for this object."""
        return self._geometry.memory

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
    ) -> ExpertRows:
        """Send this rank's tokens; return what all ranks sent to its experts.

        x: `[tokens, hidden]` of dtype.
        topk_ids: int32 or int64 `[tokens, top_k]`, global expert ids, -1 for none.
        topk_weights: float32 `[tokens, top_k]`; needed where reduce is "sender", None means ones.

        Ids out of range, and those that an earlier one of their row names, are dropped; `check()`
        raises them. Raises InvalidArgument, TokenOverflow, OutOfOrder (when `slots` results are
        alive), and what broke the group.
        """
        if torch.compiler.is_dynamo_compiling():
            return lowlatency_library.traced_dispatch(self, x, topk_ids, topk_weights)
        self._check_open()
        return self._rounds.dispatch(x, topk_ids, topk_weights, entry="dispatch")

    def combine(
        self,
        y: torch.Tensor | None,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum the experts' results at their tokens' owners.

        `out[t] = sum over k of weight * y + add[t]`, in fp32.

        y: `[local_experts, ep_size * max_tokens, hidden]` of dtype, a result for each row of the
            dispatch; rows behind `counts` are not read. Any tensor of this rank; no copy is made.
            None with combine="gemm_push": every row has been stored at its owner, in stream order.
        topk_ids, topk_weights: as in the dispatch. reduce="receiver" multiplies with these weights
            (None: ones); reduce="sender" with those of the dispatch.
        handle: of the dispatch; its result may be overwritten from now on.
        out: `[tokens, hidden]` to write into.   add: `[tokens, hidden]`, a shared expert's result.

        Products and sums are rounded to fp32, in top-k order from 0 ("sender": those of a rank in
        top-k order, rounded to what travels, then by rank); then `add`; one rounding to dtype. A
        token without experts gets `add`, or zeros. Raises InvalidArgument, OutOfOrder, and what
        broke the group.
        """
        if torch.compiler.is_dynamo_compiling() or lowlatency_library.is_of_graph(handle):
            given = (y, topk_ids, topk_weights, handle, out, add)
            return lowlatency_library.traced_combine(self, *given)
        self._check_open()
        return self._rounds.combine(
            y, topk_ids, topk_weights, handle, out=out, add=add, entry="combine"
        )

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[ExpertRows, Hook]:
        """The first half of `dispatch`: send; what follows in the stream runs meanwhile.

        Returns the result, which holds nothing yet, and a function that receives it: call that, or
        `dispatch_recv`.
        """
        library.refuse_split_phase("dispatch_send")
        self._check_open()
        rows = self._rounds.dispatch(x, topk_ids, topk_weights, entry="dispatch_send")
        return rows, self._hook(self._rounds.receive)

    def dispatch_recv(self) -> ExpertRows:
        """The second half of `dispatch`: wait for all peers' tokens, and lay them out."""
        library.refuse_split_phase("dispatch_recv")
        self._check_open()
        return self._rounds.receive()

    def combine_send(
        self,
        y: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Hook]:
        """The first half of `combine`: send rows to their owners.

        The arguments are the whole call's: `add`, `out`, ids and weights must stay until the second
        half has run. Returns `out`, which holds nothing yet, and a function that receives: call
        that, or `combine_recv`.
        """
        library.refuse_split_phase("combine_send")
        self._check_open()
        result = self._rounds.combine(
            y, topk_ids, topk_weights, handle, out=out, add=add, entry="combine_send"
        )
        return result, self._hook(self._rounds.combine_receive)

    def combine_recv(self) -> torch.Tensor:
        """The second half of `combine`: wait for the rows and add them; return `out`."""
        library.refuse_split_phase("combine_recv")
        self._check_open()
        return self._rounds.combine_receive()

    def dump_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's last 32 rounds, team by team, as JSON for Perfetto.

        Needs profile=True; waits for this rank's own work. Every rank writes a file of its own, all
        on rank 0's clock; `weft.lowlatency.trace.merge` joins them. Call it when all ranks have
        finished the same rounds. Raises InvalidArgument, OutOfOrder.
        """
        self._check_open()
        if not isinstance(path, str | os.PathLike):
            refuse("path", path, "a str or os.PathLike")
        dump(Path(path), self._rounds.tracks, self._rounds.premises)

    def close(self) -> None:
        """Give the memory back; any thread may call it, as `AllToAll.close`. Idempotent."""
        library.forget(self._handle)
        self._rounds.close()

    def _hook(self, receive: Callable[[], object]) -> Hook:
        def hook() -> None:
            self._check_open()
            receive()

        return hook

    @property
    def _watched(self) -> Watched:
        return self._rounds.premises
