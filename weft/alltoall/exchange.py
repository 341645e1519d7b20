# SPDX-License-Identifier: Apache-2.0
"""Launches of an all-to-all among the ranks of one host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.alltoall.config import AllToAllConfig, CombineArgs, DispatchArgs
from weft.heap.header import CallRecord, Site
from weft.runtime.kernels import Kernels


class LocalExchange:
    """Fill the kernels' arguments from checked tensors, and launch the kernels.

    Args:
        kernels: Kernels of the all-to-all.
        config: Sizes of the host's part.
        site: Location of this rank's share.
        device: Device of the rank.
    """

    def __init__(
        self, kernels: Kernels, config: AllToAllConfig, site: Site, device: torch.device
    ) -> None:
        self.kernels = kernels
        self._planes = config.planes
        self._dispatch_args = DispatchArgs(site=site)
        self._combine_args = CombineArgs(site=site)
        self._call: CallRecord | None = None  # of the latest dispatch
        if config.local_placement.explicit:
            self._table = config.local_placement.table(device)
            self._dispatch_args.placement = self._table.data_ptr()

    def dispatch(
        self,
        entry: str,
        call: CallRecord,
        tensors: Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        stats: torch.Tensor | None,
        rows: int,
    ) -> None:
        """Launch `dispatch` or `dispatch_send`.

        Args:
            entry: Name of the entry.
            call: Identity of the dispatch.
            tensors: Payloads.
            topk_ids: As in `AllToAll.dispatch`.
            topk_weights: As in `AllToAll.dispatch`.
            num_tokens: As in `AllToAll.dispatch`.
            stats: As in `AllToAll.dispatch`.
            rows: Slots of each source.
        """
        args, tokens = self._dispatch_args, topk_ids.shape[0]
        if call is not self._call:
            self._call = args.call = call
        for plane, tensor in zip(self._planes, tensors, strict=True):
            args.payload[plane] = tensor.data_ptr()
        args.ids = topk_ids.data_ptr()
        args.ids_bytes = topk_ids.itemsize
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.num_tokens = 0 if num_tokens is None else num_tokens.data_ptr()
        args.stats = 0 if stats is None else stats.data_ptr()
        args.tokens, args.source_rows = tokens, rows
        self.kernels.run(entry, args, tokens)

    def dispatch_receive(self) -> None:
        """Launch the receive half of the latest dispatch."""
        args = self._dispatch_args
        self.kernels.run("dispatch_receive", args, args.tokens)

    def combine_send(self, rows: int, tokens: int) -> None:
        """Launch the send half of combine.

        Args:
            rows: Slots of each source.
            tokens: Number of this rank's tokens.
        """
        args = self._combine_args
        args.source_rows = rows
        self.kernels.run("combine_send", args, tokens)

    def combine(self, entry: str, out: torch.Tensor, add: torch.Tensor | None, rows: int) -> None:
        """Launch `combine` or `combine_receive`.

        Args:
            entry: Name of the entry.
            out: Sums of this rank's tokens, `[tokens, hidden]`.
            add: Rows that are added to them.
            rows: Slots of each source.
        """
        args, tokens = self._combine_args, out.shape[0]
        args.out, args.add = out.data_ptr(), 0 if add is None else add.data_ptr()
        args.tokens, args.source_rows = tokens, rows
        self.kernels.run(entry, args, tokens)

    def finish(self, rows: int) -> None:
        """Launch a combine that returns no rows.

        Args:
            rows: Slots of each source.
        """
        args = self._combine_args
        args.out = args.add = args.tokens = 0
        args.source_rows = rows
        self.kernels.run("combine", args, 0)
