# SPDX-License-Identifier: Apache-2.0
"""Launches of a low-latency all-to-all among the ranks of one host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.heap.header import CallRecord, Site
from weft.lowlatency.config import (
    LowLatencyCombineArgs,
    LowLatencyConfig,
    LowLatencyDispatchArgs,
)
from weft.lowlatency.results import ResultBuffer
from weft.runtime.kernels import Kernels


class LocalExchange:
    """Fill the kernels' arguments from checked tensors, and launch the kernels.

    Args:
        kernels: Kernels of the all-to-all.
        config: Sizes of the host's part.
        site: Location of this rank's share.
        num_local_experts: Number of experts of this rank.
        tracks: Records of profiled kernels.
    """

    def __init__(
        self,
        kernels: Kernels,
        config: LowLatencyConfig,
        site: Site,
        num_local_experts: int,
        tracks: torch.Tensor,
    ) -> None:
        self.kernels = kernels
        self._dispatch_args = LowLatencyDispatchArgs(site=site)
        self._combine_args = LowLatencyCombineArgs(site=site)
        self._call: CallRecord | None = None  # of the latest dispatch
        placement = config.local_placement
        self._table = placement.table(tracks.device) if placement.explicit else None
        for args in (self._dispatch_args, self._combine_args):
            args.own_experts, args.traces = num_local_experts, tracks.data_ptr()
            if self._table is not None:
                args.placement = self._table.data_ptr()

    def dispatch(
        self,
        entry: str,
        call: CallRecord,
        buffer: ResultBuffer,
        results: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> None:
        """Launch `dispatch` or `dispatch_send`.

        Args:
            entry: Name of the entry.
            call: Identity of the dispatch.
            buffer: Memory of the result and of the routing that combine needs.
            results: Output tensors of the rows and their metadata, by name.
            x: This rank's tokens, `[tokens, hidden]`.
            topk_ids: As in `LowLatencyAllToAll.dispatch`.
            topk_weights: As in `LowLatencyAllToAll.dispatch`.
        """
        args, tokens = self._dispatch_args, topk_ids.shape[0]
        if call is not self._call:
            self._call = args.call = call
        buffer.set_routing(args)
        args.rows, args.scales = results["x"].data_ptr(), results["scales"].data_ptr()
        args.counts, args.source = results["counts"].data_ptr(), results["source"].data_ptr()
        args.ranges = results["ranges"].data_ptr()
        args.x, args.ids, args.ids_bytes = x.data_ptr(), topk_ids.data_ptr(), topk_ids.itemsize
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.tokens = tokens
        self.kernels.run(entry, args, tokens)

    def dispatch_receive(self) -> None:
        """Launch the receive half of the latest dispatch."""
        args = self._dispatch_args
        self.kernels.run("dispatch_receive", args, args.tokens)

    def combine(
        self,
        entry: str,
        buffer: ResultBuffer,
        y: torch.Tensor | None,
        counts: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor,
        add: torch.Tensor | None,
        order: int,
    ) -> None:
        """Launch `combine` or `combine_send`.

        Args:
            entry: Name of the entry.
            buffer: Buffer of the dispatch's result.
            y: Results of the experts; None with combine="gemm_push".
            counts: Rows of each expert.
            topk_ids: As in the dispatch.
            topk_weights: As in `LowLatencyAllToAll.combine`.
            out: Sums of this rank's tokens, `[tokens, hidden]`.
            add: Rows that are added to them.
            order: Position of the result among those alive, 1 for the oldest.
        """
        args, tokens = self._combine_args, topk_ids.shape[0]
        args.y = 0 if y is None else y.data_ptr()
        args.counts = counts.data_ptr()
        args.ids, args.ids_bytes = topk_ids.data_ptr(), topk_ids.itemsize
        args.weights = 0 if topk_weights is None else topk_weights.data_ptr()
        args.out, args.add = out.data_ptr(), 0 if add is None else add.data_ptr()
        args.tokens, args.dispatch_id = tokens, order
        buffer.set_routing(args)
        self.kernels.run(entry, args, tokens)

    def combine_receive(self, out: torch.Tensor, add: torch.Tensor | None) -> None:
        """Launch the receive half of the latest combine, to which `out` and `add` were passed."""
        args = self._combine_args
        self.kernels.run("combine_receive", args, args.tokens)
