# SPDX-License-Identifier: Apache-2.0
"""Floor 1: bytes that every rank can see, and the ranks that see them."""

from weft.memory.group import Group
from weft.memory.heap import Heap, Mailbox
from weft.memory.launch import launch

__all__ = ["Group", "Heap", "Mailbox", "launch"]
