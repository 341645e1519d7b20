"""What engines import from flashinfer.comm, under the same names.

What is the same, other and refused stands in docs/compat.md, name by name.
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
from weft.compat.moe_a2a import (
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_initialize,
    moe_a2a_sanitize_expert_ids,
    moe_a2a_wrap_payload_tensor_in_workspace,
)
from weft.compat.moe_alltoall import MoeAlltoAll
from weft.compat.refusals import moe_a2a_active_rank_mask
from weft.compat.sizes import moe_a2a_get_workspace_size_per_rank
from weft.compat.trtllm_allreduce import (
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
)
from weft.compat.trtllm_moe_allreduce import (
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
)

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "MoeAlltoAll",
    "QuantizationSFLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
]
