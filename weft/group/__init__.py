# SPDX-License-Identifier: Apache-2.0
"""Group of the ranks of one job: rendezvous, control messages, liveness, recovery, hosts."""

from weft.group.group import Group

__all__ = ["Group"]
