"""AllToAll: expert-parallel dispatch and combine, rank-major, over symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.memory import Group
from weft.memory.header import Record
from weft.ops import library
from weft.ops.args import CombineArgs, DispatchArgs
from weft.ops.check import check_alignment, check_seconds, check_tensor
from weft.ops.entry import CpuEntries, CudaEntries, Entries, payload_addresses
from weft.ops.geometry import Geometry
from weft.ops.received import Payload, Received
from weft.ops.workspace import Workspace


class AllToAll:
    """Send each token once to every rank that owns one of its experts, and bring the sums home.

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
    num_sms: SMs that the kernels may fill; default all of the GPU.
    programmatic_launch: let a kernel take its place on the GPU while its predecessor in the stream
        still runs (programmatic dependent launch); it touches no memory before that one's end.

    Raises InvalidArgument, CreationFailed (on every rank, when one cannot do its part),
    GeometryMismatch (when ranks pass different sizes).
    """

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
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        _defines: Sequence[str] = (),
        _first_epoch: int = 0,
    ) -> None:
        problem: Exception | None = None
        try:
            check_seconds("timeout", timeout)
            check_seconds("first_timeout", first_timeout)
            self._geometry = Geometry.of(
                ranks=group.size,
                max_tokens=max_tokens,
                top_k=top_k,
                num_experts=num_experts,
                hidden=hidden,
                dtype=dtype,
                payloads=payloads,
                expert_map=expert_map,
            )
            self._entries = _load(group, self._geometry, num_sms, programmatic_launch, _defines)
        except Exception as error:  # whatever it is, every rank hears of it
            problem = error
        group.vote(problem, doing="preparing an all-to-all")
        group.agree(self._geometry.manifest(), what="all-to-all geometry")
        self._workspace = Workspace(
            group,
            self._geometry,
            timeout=timeout,
            first_timeout=first_timeout,
            first_epoch=_first_epoch,
        )
        self.group, self.dtype, self.placement = group, dtype, self._geometry.placement
        self._dispatch_args = DispatchArgs(site=self._workspace.site)
        self._combine_args = CombineArgs(site=self._workspace.site)
        if self.placement.explicit:
            self._table = self.placement.table(group.device)
            self._dispatch_args.placement = self._table.data_ptr()
        self._pending: int | None = None
        self._traced_tokens = 0
        self._closed = False
        self._order = torch.zeros(1, device=group.device)
        self._handle = library.register(self)

    @staticmethod
    def memory_bytes(
        *,
        ranks: int,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        payloads: Sequence[Payload] | None = None,
    ) -> int:
        """Bytes of symmetric memory that each rank will allocate, before anything is allocated."""
        geometry = Geometry.of(
            ranks=ranks,
            max_tokens=max_tokens,
            top_k=top_k,
            num_experts=num_experts,
            hidden=hidden,
            dtype=dtype,
            payloads=payloads,
            expert_map=None,
        )
        return geometry.layout.share_bytes

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def ep_size(self) -> int:
        """Ranks of the group."""
        return self._geometry.shape.ranks

    @property
    def max_tokens(self) -> int:
        """Most tokens of one rank in one call."""
        return self._geometry.shape.tokens

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts; a LOCAL id indexes this tuple."""
        return self.placement.experts_of(self.rank)

    @property
    def num_local_experts(self) -> int:
        """How many experts this rank holds."""
        return len(self.local_experts)

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_tokens: torch.Tensor | None = None,
    ) -> Received:
        """Send this rank's tokens; return what all ranks sent here.

        x: the payload tensor `[tokens, ...]`, or one for each declared payload.
        topk_ids: int32 or int64 `[tokens, top_k]`, global expert ids, -1 for none.
        topk_weights: float32 `[tokens, top_k]`; None means ones.
        num_tokens: int32 `[1]` on the device, how many rows count; those beyond are not sent.

        The result shows symmetric memory and is valid until this rank calls combine: peers may
        overwrite it from then on, so only what comes before combine in the stream may read it.

        Ids out of range and repeated ids are noticed on the device and raised by `check()`; they
        never touch anybody's memory. Raises InvalidArgument, TokenOverflow, OutOfOrder, and what
        broke the group.
        """
        tensors = (x,) if isinstance(x, torch.Tensor) else tuple(x)
        if torch.compiler.is_compiling():
            self._traced_tokens = topk_ids.shape[0]
            parts = library.traced_dispatch(
                tensors, topk_ids, topk_weights, num_tokens, self._order, self._handle
            )
            return Received(*parts)
        return self._dispatch(tensors, topk_ids, topk_weights, num_tokens)

    def output(self) -> torch.Tensor:
        """`[ep_size, max_tokens, hidden]` in symmetric memory for experts to write: zero-copy.

        Row `[s, t]` must hold the sum over this rank's experts of token t of source s, weighted by
        the received weights; rows whose ids are all -1 are never read. Write it between dispatch
        and combine only: from combine until the next dispatch has returned (on a GPU: has run in
        the stream) peers may still be reading it.
        """
        self._check_open()
        return self._workspace.output

    def combine(
        self,
        y: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring every token's rows home: `out[t] = sum over ranks + add[t]`, fp32, in rank order.

        y: `[ep_size, max_tokens, hidden]`; None, or the `output()` tensor itself, for what was
        written in place; any other tensor costs one copy.
        out: `[tokens, hidden]` to write into.
        add: `[tokens, hidden]`, for example a shared expert's result.

        Returns `[tokens, hidden]` for the tokens of the last dispatch; tokens without experts get
        `add`, or zeros. Raises InvalidArgument, OutOfOrder, and what broke the group.
        """
        if torch.compiler.is_compiling():
            if out is None:
                size = (self._traced_tokens, self._geometry.shape.hidden)
                out = torch.empty(size, dtype=self.dtype, device=self._order.device)
            return library.traced_combine(y, out, add, self._order, self._handle)
        return self._combine(y, out, add)

    def check(self) -> None:
        """Raise what the device has recorded: a broken group, or input that was refused.

        Reads host memory only, so it costs nothing and sees the past: synchronise first to be sure
        of the last call. A refusal is raised once; a broken group stays broken.
        """
        self._check_open()
        self._workspace.raise_if_broken()
        self._workspace.raise_refusal()

    def abort(self) -> None:
        """Ask the kernels of all ranks to leave their waits. Waits for no peer.

        May be called from any thread. Every wait that is under way, and every later one that
        would last, ends with Aborted naming this rank; a round whose flags have all arrived may
        still finish, but on this rank every later call raises. Close the group after it.
        """
        self._check_open()
        self._workspace.abort()

    def history(self, rank: int | None = None) -> list[Record]:
        """The last 128 rounds of a rank (default: this one), oldest first; also of a dead one."""
        self._check_open()
        return self._workspace.history(rank)

    def close(self) -> None:
        """Give the memory back. Waits for this rank's own work, never for a peer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        library.forget(self._handle)
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        self._entries.close()
        self._workspace.close()

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _dispatch(
        self,
        tensors: tuple[torch.Tensor, ...],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
    ) -> Received:
        self._check_running()
        if self._pending is not None:
            raise OutOfOrder(
                f"dispatch of {topk_ids.shape[0]} tokens while {self._pending} tokens are away: "
                "call combine first; a round is one dispatch and one combine"
            )
        tokens = self._geometry.check_dispatch(
            tensors, topk_ids, topk_weights, num_tokens, self.group.device
        )
        args = self._dispatch_args
        args.payload = payload_addresses(tensors)
        args.ids = topk_ids.data_ptr()
        args.ids_bytes = topk_ids.element_size()
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.num_tokens = 0 if num_tokens is None else num_tokens.data_ptr()
        args.tokens = tokens
        self._entries.dispatch(args)
        self._pending = tokens
        self._workspace.raise_if_broken()
        return self._workspace.received

    def _combine(
        self, y: torch.Tensor | None, out: torch.Tensor | None, add: torch.Tensor | None
    ) -> torch.Tensor:
        self._check_running()
        if self._pending is None:
            raise OutOfOrder("combine without a dispatch: no tokens of this rank are away")
        shape, device = (self._pending, self._geometry.shape.hidden), self.group.device
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=device)
        for name, tensor in (("out", out), ("add", add)):
            if tensor is not None:
                check_tensor(name, tensor, shape=shape, dtypes=(self.dtype,), device=device)
                check_alignment(name, tensor, self._geometry.shape.out_bytes)
        output = self._workspace.output
        if y is not None and y.data_ptr() != output.data_ptr():
            check_tensor("y", y, shape=output.shape, dtypes=(self.dtype,), device=device)
            output.copy_(y)
        args = self._combine_args
        args.out = out.data_ptr()
        args.add = 0 if add is None else add.data_ptr()
        args.tokens = self._pending
        self._entries.combine(args)
        self._pending = None
        self._workspace.raise_if_broken()
        return out

    def _check_open(self) -> None:
        if self._closed:
            raise OutOfOrder("this all-to-all was closed; make a new one")

    def _check_running(self) -> None:
        self._check_open()
        self._workspace.raise_if_broken()


def _load(
    group: Group,
    geometry: Geometry,
    num_sms: int | None,
    programmatic: bool,
    defines: Sequence[str],
) -> Entries:
    """Compile and load both operations for the group's device."""
    if group.device.type == "cuda":
        with torch.cuda.device(group.device):
            torch.cuda.synchronize()  # makes the primary context that the module is loaded into
            return CudaEntries(
                geometry.shape,
                geometry.layout,
                group.rank,
                num_sms=num_sms,
                programmatic=programmatic,
                defines=defines,
            )
    if num_sms is not None:
        raise InvalidArgument(f"num_sms={num_sms} on a CPU group; it limits GPU kernels")
    return CpuEntries(geometry.shape, geometry.layout, defines=defines)
