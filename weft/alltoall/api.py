"""AllToAll: expert-parallel dispatch and combine, rank-major, over symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.alltoall import library as alltoall_library
from weft.alltoall.entry import load_entries
from weft.alltoall.geometry import Geometry, memory_bytes
from weft.alltoall.received import Payload, Received, with_rows
from weft.alltoall.rounds import Rounds, State
from weft.alltoall.workspace import open_workspace
from weft.arguments import flags, seconds
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.memory.driver import in_relaxed_mode
from weft.placement import Placed
from weft.runtime import library
from weft.runtime.check import check_group, tensors_of
from weft.runtime.entries import Build
from weft.runtime.operator import Operator
from weft.runtime.timeline import DEFINE, Span, Wait, read_timeline
from weft.runtime.timeline import wait_times as read_wait_times
from weft.runtime.watched import Watched


class AllToAll(Placed, Operator):
    """Send each token once to every rank that owns one of its experts, and return the sums.

    Meaning: `weft.reference.dispatch` and `weft.reference.combine`. All memory is allocated here; a
    call allocates nothing but its result, synchronises with no host, and may be captured in CUDA
    graphs of any batch size that replay interleaved with eager calls. Every rank makes the same
    sequence of calls; a rank without tokens calls with zero of them.

    max_tokens: most tokens of this rank in one call, equal on all ranks (`weft.tokens_per_rank`).
    top_k: experts per token, 1..32.
    num_experts: experts of the layer, on all ranks together.
    hidden, dtype: a combine row; bfloat16, float16 or float32, a multiple of 16 bytes.
    payloads: what dispatch carries, up to 8 opaque tensors; default x `[tokens, hidden]` of dtype.
    expert_map: rank of each expert; default contiguous blocks, the first ranks holding one more.
    timeout, first_timeout: seconds that a wait for a peer may take, and the first one.
    quantize: None, or "fp8" (one fp32 scale for 128 columns) or "mxfp8" (one power of two for 32):
        dispatch takes the first payload as x `[tokens, hidden]` of dtype and delivers FP8 numbers
        and scales, quantised on the way.
    combine: "pull": a token's owner reads its rows from the ranks that made them (the default);
        "push": those ranks store them at the owner; "gemm_push": the kernel that makes an expert's
        row stores it at the owner (`Grouped.dst_addr`), which weighs and sums. All are exact.
    combine_dtype: None: rows travel in dtype; "fp8": pushed as FP8, a scale for 128 columns.
    split_phase: also build `dispatch_send` .. `combine_recv`.
    stats: int32 numbers of its own that each rank sends to all in every dispatch; default none.
    num_sms: SMs that the kernels may fill; default all. Up to 32, the bulk copy engine moves rows.
    programmatic_launch: let a short kernel take its place on the GPU while its predecessor in the
        stream still runs; it touches no memory before that one's end.
    profile: let kernels keep the times of the last 32 rounds (`timeline`, `wait_times`).

    Raises InvalidArgument, CreationFailed (on every rank, when one cannot do its part),
    GeometryMismatch (when ranks pass different sizes).
    """

    @in_relaxed_mode
    def __init__(
        self,
        group: Group,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        payloads: Sequence[Payload] | None = None,
        expert_map: Sequence[int] | torch.Tensor | None = None,
        timeout: float = 2.0,
        first_timeout: float = 120.0,
        quantize: str | None = None,
        combine: str | None = None,
        combine_dtype: str | None = None,
        split_phase: bool = False,
        stats: int = 0,
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        profile: bool = False,
        _defines: Sequence[str] = (),
        _first_epoch: int = 0,
    ) -> None:
        check_group(group)
        problem: Exception | None = None
        try:
            limits = seconds("timeout", timeout), seconds("first_timeout", first_timeout)
            flags(split_phase=split_phase, programmatic_launch=programmatic_launch, profile=profile)
            self._geometry = Geometry.of(
                ranks=group.size,
                max_tokens=max_tokens,
                top_k=top_k,
                num_experts=num_experts,
                hidden=hidden,
                dtype=dtype,
                payloads=payloads,
                expert_map=expert_map,
                quantize=quantize,
                combine=combine,
                combine_dtype=combine_dtype,
                stats=stats,
            )
            defines = (*_defines, *((DEFINE,) if profile else ()))
            build = Build(num_sms, programmatic_launch, split_phase, defines)
            entries = load_entries(group.device, group.rank, self._geometry.shape, build)
        except Exception as error:  # whatever it is, every rank hears of it
            problem = error
        group.vote(problem, doing="preparing an all-to-all", undo=lambda: entries.close())
        self._workspace = open_workspace(group, self._geometry, entries, limits, _first_epoch)
        self.group, self.dtype, self.placement = group, dtype, self._geometry.placement
        self._rounds = Rounds(self._geometry, self._workspace, entries)
        self._traced_tokens, self._traced_rows = 0, self._geometry.shape.tokens
        self._build = build
        self._order = library.order_of(group.device)
        self._handle = library.register(self, self._geometry.manifest())
        library.mark_static(self._workspace.output)

    memory_bytes = staticmethod(memory_bytes)

    @property
    def max_tokens(self) -> int:
        """Most tokens of one rank in one call."""
        return self._geometry.shape.tokens

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_tokens: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        rows: int | None = None,
    ) -> Received:
        """Send this rank's tokens; return what all ranks sent here.

        x: the payload tensor `[tokens, ...]`, or one for each declared payload.
        topk_ids: int32 or int64 `[tokens, top_k]`, global expert ids, -1 for none.
        topk_weights: float32 `[tokens, top_k]`; None means ones.
        num_tokens: int32 `[1]` on the device, how many rows count; those beyond are not sent.
        stats: int32 `[stats]`, needed if built with stats; for example `reference.expert_load`.
        rows: slots for each source in the result, `[ep_size, rows, ...]`, and in `output(rows)`:
            the most tokens that any rank sends in this call, equal on all ranks; default
            max_tokens. Where ranks differ in it, they raise GeometryMismatch with both numbers.

        The result shows symmetric memory and is valid until this rank calls combine: peers may
        overwrite it from then on, so only what comes before combine in the stream may read it.
        (Under torch.compile it is a copy, because compilers move reads behind combine.)

        Ids out of range and repeated ids are noticed on the device and raised by `check()`; they
        never touch anybody's memory. Raises InvalidArgument, TokenOverflow, OutOfOrder, and what
        broke the group.
        """
        given = (tensors_of("x", x), topk_ids, topk_weights, num_tokens, stats)
        if torch.compiler.is_dynamo_compiling():
            self._traced_tokens = topk_ids.shape[0]
            self._traced_rows = self._geometry.check_rows(rows, self._traced_tokens)
            made = alltoall_library.traced_dispatch(self, *given, self._traced_rows)
            return Received(*made)
        self._check_open()
        self._rounds.dispatch("dispatch", *given, rows)
        self._keep_for_tracing()
        return self._rounds.received

    def output(self, rows: int | None = None) -> torch.Tensor:
        """`[ep_size, rows, hidden]`, contiguous, in symmetric memory, for experts to write.

        Row `[s, t]` must hold the sum over this rank's experts of token t of source s, weighted by
        the received weights; rows whose ids are all -1 are never read. Write it between dispatch
        and combine only: from combine until the next dispatch has returned (on a GPU: has run in
        the stream) peers may still be reading it. There is none with combine="gemm_push".
        rows: those of the round's dispatch; default max_tokens.
        """
        self._check_open()
        if self._geometry.shape.combine == "gemm_push":
            raise InvalidArgument(
                "output() of an all-to-all with combine='gemm_push': every row is stored at its "
                "token's owner by the kernel that makes it, see ExpertGroups"
            )
        rows = self._geometry.check_rows(rows, 0)
        if torch.compiler.is_dynamo_compiling():
            return with_rows(self._workspace.output, rows)
        return self._workspace.views(rows)[1]

    def combine(
        self,
        y: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum every token's rows at its owner: `out[t] = sum over ranks + add[t]`.

        Sums are in fp32 and in rank order.

        y: `[ep_size, rows, hidden]`, with the rows of the dispatch; None, or the `output(rows)`
        tensor itself, for what was written in place; any other tensor costs one copy.
        out: `[tokens, hidden]` to write into.
        add: `[tokens, hidden]`, for example a shared expert's result.

        Returns `[tokens, hidden]` for the tokens of the last dispatch; tokens without experts get
        `add`, or zeros. Raises InvalidArgument, OutOfOrder, and what broke the group.
        """
        if torch.compiler.is_dynamo_compiling():
            return alltoall_library.traced_combine(self, y, out, add)
        self._check_open()
        return self._rounds.combine("combine", y, out, add)

    def dispatch_send(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_tokens: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        rows: int | None = None,
    ) -> None:
        """The first half of `dispatch`: send, and wait for nobody.

        What follows in the stream runs while peers' tokens arrive, for example a shared expert.
        """
        self._check_halves("dispatch_send")
        tensors, entry = tensors_of("x", x), "dispatch_send"
        self._rounds.dispatch(entry, tensors, topk_ids, topk_weights, num_tokens, stats, rows)
        self._keep_for_tracing()

    def dispatch_recv(self) -> Received:
        """The second half of `dispatch`: wait for all peers' tokens."""
        self._check_halves("dispatch_recv")
        return self._rounds.receive()

    def combine_send(self, y: torch.Tensor | None = None) -> None:
        """The first half of `combine`: publish that this rank's rows are ready, or push them."""
        self._check_halves("combine_send")
        self._rounds.give_back(y)

    def combine_recv(
        self, *, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The second half of `combine`: wait for all peers' rows and sum them."""
        self._check_halves("combine_recv")
        return self._rounds.combine("combine_receive", None, out, add)

    def timeline(self, rank: int | None = None) -> list[Span]:
        """A rank's last 32 rounds (built with profile=True; synchronise before reading)."""
        self._check_open()
        return read_timeline(self._workspace, rank)

    def wait_times(self) -> list[Wait]:
        """For whom this rank waited, and how long, in the last 32 rounds; as `timeline`."""
        self._check_open()
        return read_wait_times(self._workspace)

    def close(self) -> None:
        """Give the memory back. Waits for this rank's own work, never for a peer. Idempotent.

        Any thread may call it. A call that waits in another one ends first, with Aborted. Peers
        that are in a round which this rank has not finished raise PeerLeft.
        """
        library.forget(self._handle)
        self._rounds.close()

    def _keep_for_tracing(self) -> None:
        """Keep the sizes of this round for a combine that is compiled alone."""
        self._traced_tokens, self._traced_rows = self._rounds.tokens, self._rounds.rows

    @property
    def _pending(self) -> int | None:
        """Tokens that have been dispatched and not yet combined."""
        return self._rounds.tokens if self._rounds.state is State.RECEIVED else None

    def _check_running(self) -> None:
        self._workspace.check_running()

    def _check_halves(self, name: str) -> None:
        library.refuse_halves(name)
        self._check_open()
        if not self._build.split_phase:
            raise InvalidArgument(
                f"{name} of an all-to-all built without split_phase; pass split_phase=True"
            )

    @property
    def _watched(self) -> Watched:
        return self._workspace
