# SPDX-License-Identifier: Apache-2.0
"""Public names of weft, which the package `weft` imports at their first use."""

from weft import errors, reference
from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize, Reduced
from weft.allreduce.operator import AllReduce
from weft.alltoall.capacity import tokens_per_rank
from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.group import Group
from weft.grouping.operator import ExpertGroups, Grouped
from weft.heap import Heap
from weft.keywords import explain_keywords
from weft.launcher import launch
from weft.leases import Lease, lease
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.moe import MoE, MoEConfig
from weft.placement import Placement

__all__ = [
    "AllReduce",
    "AllToAll",
    "ExpertGroups",
    "ExpertRows",
    "FP8Group",
    "FP8Static",
    "FP8Token",
    "Group",
    "Grouped",
    "Heap",
    "Lease",
    "LowLatencyAllToAll",
    "MoE",
    "MoEConfig",
    "MoEFinalize",
    "Payload",
    "Placement",
    "Received",
    "Reduced",
    "errors",
    "launch",
    "lease",
    "reference",
    "tokens_per_rank",
]

explain_keywords(globals())
