# SPDX-License-Identifier: Apache-2.0
"""Fused all-reduce, residual and RMSNorm for vLLM's tensor parallelism.

Two modules of vLLM call FlashInfer's functions through an attribute. `register` replaces it by
`weft.compat.flashinfer`. vLLM still runs all-reduces that its Inductor pass does not fuse.
"""

from __future__ import annotations

import importlib

from weft.errors import SetupError
from weft.plugins.engine_api import ExpectedAPI
from weft.plugins.vllm.engine import VLLM, WORKER_API

MODULES = (
    "vllm.compilation.passes.fusion.allreduce_rms_fusion",
    "vllm.distributed.device_communicators.flashinfer_all_reduce",
)
ATTRIBUTE = "flashinfer_comm"


def register() -> None:
    """Make vLLM call `weft.compat.flashinfer` for its fused all-reduce.

    Raises SetupError if vLLM is not supported or lacks FlashInfer.
    """
    VLLM.check(EXPECTED_API)
    from weft.compat import flashinfer

    modules = [importlib.import_module(name) for name in MODULES]
    for module in modules:
        if getattr(module, ATTRIBUTE, None) is None:
            raise SetupError(
                f"WEFT_VLLM_ALLREDUCE=1 replaces FlashInfer, but {module.__name__} could not "
                "import it: vLLM defines its fused operator only with FlashInfer, so install "
                "the flashinfer-python version that vLLM requires"
            )
    for module in modules:
        setattr(module, ATTRIBUTE, flashinfer)


# The second module has the attribute only if it imported FlashInfer.
EXPECTED_API = (
    *WORKER_API,
    ExpectedAPI(f"{MODULES[0]}.{ATTRIBUTE}"),
    ExpectedAPI(f"{MODULES[1]}.fi_ar_available"),
)
