# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: one share per rank of a group that every rank can address."""

from weft.heap.heap import Heap, Mailbox

__all__ = ["Heap", "Mailbox"]
