"""weft carries tokens across GPUs: one-sided NVLink communication for MoE inference.

The same protocol runs on CPU ranks over shared memory.

Every error is in `weft.errors`. `weft.reference`, which is `weft.ops.reference`, says in plain
torch what each operation means. The parts of a layer are in `weft.moe`, the experts' products in
`weft.gemm`. Other projects' calls are in `weft.compat.flashinfer`, `weft.compat.deep_ep` and
`weft.compat.triton_dist`.
"""

from weft import errors, logs
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

__version__ = "0.1.0"

logs.set_up()

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
