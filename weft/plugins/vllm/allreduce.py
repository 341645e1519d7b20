# SPDX-License-Identifier: Apache-2.0
"""Fused all-reduce, residual and RMSNorm of vLLM's tensor parallelism, by weft.

Two modules of vLLM call FlashInfer's functions through an attribute, which is replaced by
`weft.compat.flashinfer`. Other kernels still run what vLLM's Inductor pass does not fuse.
"""

from __future__ import annotations

import importlib

from weft.errors import SetupError
from weft.plugins.names import Known
from weft.plugins.vllm.engine import VLLM

HOLDERS = (
    "vllm.compilation.passes.fusion.allreduce_rms_fusion",
    "vllm.distributed.device_communicators.flashinfer_all_reduce",
)
ATTRIBUTE = "flashinfer_comm"


def register() -> None:
    """Set both attributes. Raises SetupError if vLLM is not supported or found no FlashInfer."""
    VLLM.check(KNOWN)
    from weft.compat import flashinfer

    holders = [importlib.import_module(name) for name in HOLDERS]
    for module in holders:
        if getattr(module, ATTRIBUTE, None) is None:
            raise SetupError(
                f"WEFT_VLLM_ALLREDUCE=1 replaces FlashInfer, and {module.__name__} found none that "
                "it can import: vLLM defines its fused operator only with FlashInfer, so install "
                "the flashinfer-python version that vLLM requires"
            )
    for module in holders:
        setattr(module, ATTRIBUTE, flashinfer)


# The second module has the attribute only if it found FlashInfer.
KNOWN = (Known(f"{HOLDERS[0]}.{ATTRIBUTE}"), Known(f"{HOLDERS[1]}.fi_ar_available"))
