# SPDX-License-Identifier: Apache-2.0
"""Checks of dispatches between hosts on the device: ids, counts, and equal calls on every host."""

from __future__ import annotations

import torch

from weft.group import Group
from weft.heap.header import ErrorRecord
from weft.hosts.config import HostSpan
from weft.runtime.identity import CALL_WORDS
from weft.runtime.report import BAD_EXPERT_ID, DUPLICATE_EXPERT, TOKEN_OVERFLOW

SENT, RECEIVED = range(2)  # origin of an input: this rank's call, or another host's


class InputErrorRecorder:
    """Recorder of errors about counts and ids: written in stream order, read from host memory."""

    def __init__(self, group: Group, span: HostSpan) -> None:
        self._group, self._span = group, span
        self._num_experts = len(span.placement.ranks)
        # For SENT and RECEIVED the number of errors and, of the last one, its code, the value, and
        # the index of the value together with the number of rows.
        self._records = torch.zeros((2, 4), dtype=torch.int64, device=group.device)
        self._host_records = self._records
        if group.device.type == "cuda":
            self._host_records = torch.zeros((2, 4), dtype=torch.int64).pin_memory()
        self._num_read = [0, 0]

    def record(
        self,
        origin: int,
        counts: torch.Tensor,
        ids: torch.Tensor,
        rows: int,
        *,
        repeats: torch.Tensor | None = None,
    ) -> None:
        """Record errors about counts and ids.

        Args:
            origin: SENT or RECEIVED.
            counts: Token counts, `[hosts]` or, of this rank, `[1]`.
            ids: Ids of `rows` rows for each count.
            rows: Number of rows.
            repeats: Ids with -1 for invalid ones, to find repeats in a row.
        """
        invalid = ((ids < -1) | (ids >= self._num_experts)) * BAD_EXPERT_ID
        if repeats is not None:
            top_k = self._span.top_k
            earlier = torch.ones((top_k, top_k), dtype=torch.bool, device=ids.device).tril(-1)
            equal = (repeats[:, :, None] == repeats[:, None, :]) & earlier
            invalid = invalid + (equal & (repeats >= 0)[:, :, None]).any(dim=2) * DUPLICATE_EXPERT
        overflow = ((counts < 0) | (counts > rows)) * TOKEN_OVERFLOW
        code, value = torch.cat([overflow, invalid.flatten()]), torch.cat([counts, ids.flatten()])
        # `code[index]` would read `index` on the CPU, which a graph capture forbids.
        index, count = (code > 0).long().argmax(0, keepdim=True), (code > 0).sum()
        record = self._records[origin]
        position = index[0] * (1 << 32) + rows
        last = torch.stack(
            [record[0] + count, code.take(index)[0], value.take(index)[0].long(), position]
        )
        record.copy_(torch.where(count > 0, last, record))
        if self._host_records is not self._records:
            self._host_records.copy_(self._records, non_blocking=True)

    def read(self) -> tuple[ErrorRecord, int] | None:
        """Return the last error since the last read and the number of errors, or None.

        An error about rows that arrived names the rank that sent them.
        """
        for origin, (total, code, value, position) in enumerate(self._host_records.tolist()):
            count, self._num_read[origin] = total - self._num_read[origin], total
            if count:
                return self._build_record(origin, code, value, position), count
        return None

    def _build_record(self, origin: int, code: int, value: int, position: int) -> ErrorRecord:
        group, num_experts = self._group, self._num_experts
        record = ErrorRecord(code=code, rank=group.rank, observed=value & (1 << 64) - 1)
        index, rows = divmod(position, 1 << 32)
        num_counts = 1 if origin == SENT else group.hosts
        if index < num_counts:
            host, record.expected = index, rows
        else:
            token, record.index = divmod(index - num_counts, self._span.top_k)
            host, record.token = divmod(token, rows)
            record.expected = num_experts
        if origin == RECEIVED:
            record.reported_by = 1 + group.rank
            record.rank = group.host_ranks[host][group.local.rank]
        return record


class CallCheck:
    """Check for equal calls on all hosts: written in stream order, read from host memory."""

    def __init__(self, group: Group) -> None:
        self._own_host, self._num_hosts = group.host, group.hosts
        # Whether calls have differed, followed by the first calls that did.
        size = 1 + group.hosts * CALL_WORDS
        self._record = torch.zeros(size, dtype=torch.int32, device=group.device)
        self._host_record = self._record
        if group.device.type == "cuda":
            self._host_record = torch.zeros(size, dtype=torch.int32).pin_memory()

    def compare(self, calls: torch.Tensor) -> torch.Tensor:
        """Record unequal calls; return bool `[hosts]`, whether each host makes this host's call."""
        same = (calls == calls[self._own_host]).all(dim=1)
        latest = torch.cat([(~same.all()).int()[None], calls.flatten()])
        record = self._record
        record.copy_(torch.where((record[0] == 0) & (latest[0] == 1), latest, record))
        if self._host_record is not record:
            self._host_record.copy_(record, non_blocking=True)
        return same

    def find_mismatch(self) -> tuple[int, list[int], list[int]] | None:
        """Return a host whose call differed, its call words and this host's; None without one."""
        if not self._host_record[0]:
            return None
        calls = self._host_record[1:].view(self._num_hosts, CALL_WORDS).tolist()
        own_call = calls[self._own_host]
        other = next(host for host, call in enumerate(calls) if call != own_call)
        return other, calls[other], own_call
