# SPDX-License-Identifier: Apache-2.0
"""What engines import from flashinfer.comm, under the same names.

docs/user/compat.md says what is the same, what differs and what is refused, name by name.
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
