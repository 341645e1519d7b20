"""The public names of weft; `weft` itself offers them and imports them at first use."""

from weft import errors
from weft.memory import Group, Heap, launch
from weft.moe import MoE, MoEConfig
from weft.ops import reference
from weft.ops.allreduce import AllReduce
from weft.ops.alltoall import AllToAll
from weft.ops.capacity import tokens_per_rank
from weft.ops.collective import CollectiveAllToAll
from weft.ops.grouping import Compact, Compactor, ExpertGroups, Grouped
from weft.ops.lowlatency import LowLatencyAllToAll
from weft.ops.lowlatency_results import ExpertRows
from weft.ops.placement import Placement
from weft.ops.received import Payload, Received
from weft.ops.reduce_spec import FP8Group, FP8Static, FP8Token, MoEFinalize, Reduced

__all__ = [
    "AllReduce",
    "AllToAll",
    "CollectiveAllToAll",
    "Compact",
    "Compactor",
    "ExpertGroups",
    "ExpertRows",
    "FP8Group",
    "FP8Static",
    "FP8Token",
    "Group",
    "Grouped",
    "Heap",
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
    "reference",
    "tokens_per_rank",
]
