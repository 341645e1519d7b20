# SPDX-License-Identifier: Apache-2.0
"""The names of flashinfer.comm that engines import.

docs/user/compat.md lists for each name what is the same, different or unsupported.
"""

from __future__ import annotations

from weft.compat.allreduce_fusion import (
    AllReduceFusionPattern,
    QuantizationSFLayout,
    allreduce_fusion,
)
from weft.compat.fusion_workspace import (
    AllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    create_allreduce_fusion_workspace,
)
from weft.compat.moe_alltoall import MoeAlltoAll
from weft.compat.sizes import moe_a2a_get_workspace_size_per_rank
from weft.keywords import explain_keywords

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "MoeAlltoAll",
    "QuantizationSFLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "moe_a2a_get_workspace_size_per_rank",
]

explain_keywords(globals())
