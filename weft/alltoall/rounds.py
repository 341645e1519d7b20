"""The calls of an all-to-all in their order: what is checked, what is handed to the entries, when.

A round is dispatch then combine; each is one call, or a send and a receive with anything between.
The order is strict on one workspace: that is what makes single buffers safe (docs/protocol.md).
"""

from __future__ import annotations

from enum import Enum

import torch

from weft.alltoall.args import CombineArgs, DispatchArgs
from weft.alltoall.entry import place_payload
from weft.alltoall.geometry import Geometry
from weft.alltoall.received import Received
from weft.alltoall.workspace import Workspace
from weft.errors import InvalidArgument, OutOfOrder
from weft.memory.driver import relaxed
from weft.runtime.check import check_alignment, check_tensor, refuse_tensor
from weft.runtime.entries import Entries
from weft.runtime.watched import one_call


class State(Enum):
    """Where a round stands, and what may come next."""

    IDLE = "dispatch or dispatch_send"
    SENT = "dispatch_recv"
    RECEIVED = "combine or combine_send"
    RETURNED = "combine_recv"


class Rounds:
    """One workspace's rounds on one device."""

    def __init__(self, geometry: Geometry, workspace: Workspace, entries: Entries) -> None:
        self._geometry, self._workspace, self._entries = geometry, workspace, entries
        self._watched = workspace
        self.device = workspace.heap.group.device
        self._dispatch_args = DispatchArgs(site=workspace.site)
        self._combine_args = CombineArgs(site=workspace.site)
        if geometry.placement.explicit:
            self._table = geometry.placement.table(self.device)
            self._dispatch_args.placement = self._table.data_ptr()
        self.state = State.IDLE
        self.tokens = 0
        self.rows = geometry.shape.tokens  # slots for each source in this round
        self.number = 0  # of this round, counted from its dispatch

    @one_call("dispatch")
    def dispatch(
        self,
        entry: str,
        tensors: tuple[torch.Tensor, ...],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        stats: torch.Tensor | None,
        rows: int | None,
    ) -> None:
        """Run `dispatch` or `dispatch_send`."""
        self._expect(State.IDLE, entry)
        tokens = self._geometry.check_dispatch(
            tensors, topk_ids, topk_weights, num_tokens, self.device
        )
        rows = self._geometry.check_rows(rows, tokens)
        self._geometry.check_stats(stats, self.device)
        if stats is not None:
            check_alignment("stats", stats, stats.itemsize)
        args = self._dispatch_args
        place_payload(args, tensors, quantized=self._geometry.quantized)
        args.ids = topk_ids.data_ptr()
        args.ids_bytes = topk_ids.element_size()
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.num_tokens = 0 if num_tokens is None else num_tokens.data_ptr()
        args.stats = 0 if stats is None else stats.data_ptr()
        args.tokens, args.source_rows = tokens, rows
        self._entries.run(entry, args, tokens)
        self.tokens, self.rows = tokens, rows
        self.number += 1
        self._reach(State.RECEIVED if entry == "dispatch" else State.SENT)

    @one_call("dispatch_recv")
    def receive(self) -> Received:
        """Run `dispatch_receive`."""
        self._expect(State.SENT, "dispatch_recv")
        self._entries.run("dispatch_receive", self._dispatch_args, self.tokens)
        self._reach(State.RECEIVED)
        return self.received

    @one_call("combine_send")
    def give_back(self, y: torch.Tensor | None) -> None:
        """Run `combine_send`."""
        self._expect(State.RECEIVED, "combine_send")
        self._stage(y)
        self._combine_args.source_rows = self.rows
        self._entries.run("combine_send", self._combine_args, self.tokens)
        self._reach(State.RETURNED)

    def expect_send(self) -> None:
        """Raise OutOfOrder unless experts' rows may be sent now."""
        self._expect(State.RECEIVED, "send")

    def sent(self, tokens: int | None = None) -> None:
        """Experts' rows were sent by another kernel, which set the flags at the peers.

        tokens: of this rank, that rows come back for, where they are not those of the dispatch.
        """
        self.tokens = self.tokens if tokens is None else tokens
        self._reach(State.RETURNED)

    @one_call("combine")
    def combine(
        self,
        entry: str,
        y: torch.Tensor | None,
        out: torch.Tensor | None,
        add: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run `combine` or `combine_receive`; return what `out` holds."""
        self._expect(State.RECEIVED if entry == "combine" else State.RETURNED, entry)
        dtype, row_bytes = self._geometry.dtype, self._geometry.shape.out_bytes
        shape = (self.tokens, self._geometry.shape.hidden)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=self.device)
        for name, tensor in (("out", out), ("add", add)):
            if tensor is not None:
                check_tensor(name, tensor, shape=shape, dtypes=(dtype,), device=self.device)
                check_alignment(name, tensor, row_bytes)
        self._stage(y)
        args = self._combine_args
        args.out = out.data_ptr()
        args.add = 0 if add is None else add.data_ptr()
        args.tokens, args.source_rows = self.tokens, self.rows
        self._entries.run(entry, args, self.tokens)
        self._reach(State.IDLE)
        return out

    @one_call("combine")
    def finish(self) -> None:
        """End a round that returns no rows: peers may write this rank's inbox again."""
        self._expect(State.RECEIVED, "finish")
        args = self._combine_args
        args.out = args.add = args.tokens = 0
        args.source_rows = self.rows
        self._entries.run("combine", args, 0)
        self._reach(State.IDLE)

    @property
    def received(self) -> Received:
        """What this round's dispatch brought."""
        return self._workspace.views(self.rows)[0]

    def close(self) -> None:
        """Notify the peers, wait for this rank's own work, give everything back. Idempotent."""
        if not self._workspace.begin_close():
            return
        with relaxed(self.device):
            try:
                self._entries.close()
            finally:
                self._workspace.close()

    def _stage(self, y: torch.Tensor | None) -> None:
        output = self._workspace.views(self.rows)[1]
        if y is not None and not isinstance(y, torch.Tensor):
            refuse_tensor("y", y)
        if y is not None and self._geometry.shape.combine == "gemm_push" and y.numel():
            raise InvalidArgument(
                "y in an all-to-all with combine='gemm_push': every row is stored at its "
                "token's owner, by ExpertGroups.send or by the kernel that makes it"
            )
        if y is None or y is output:
            return
        dtypes = (self._geometry.dtype,)
        strided = y.layout is torch.strided and not y.is_nested
        if strided and y.data_ptr() == output.data_ptr():
            return
        check_tensor("y", y, shape=output.shape, dtypes=dtypes, device=self.device)
        check_alignment("y", y, y.itemsize)
        output.copy_(y)

    def _expect(self, state: State, doing: str) -> None:
        if self.state is state:
            return
        away = "" if self.state is State.IDLE else f" while {self.tokens} tokens are away"
        raise OutOfOrder(
            f"{doing} out of turn{away}: this all-to-all expects {self.state.value}. A round is "
            "one dispatch and one combine, each whole or as send then recv"
        )

    def _reach(self, state: State) -> None:
        self.state = state
        self._workspace.raise_if_broken()
