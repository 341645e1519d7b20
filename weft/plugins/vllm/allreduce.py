# SPDX-License-Identifier: Apache-2.0
"""vLLM's tensor parallelism: its fused all-reduces, residual and RMSNorm, by weft.

vLLM makes them by FlashInfer's names, which two of its modules hold as an attribute. Here that is
`weft.compat.flashinfer`. What vLLM's Inductor pass does not fuse, and sizes that it leaves to other
kernels, stay as they are.
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
    """Set both attributes. Raises SetupError where vLLM is another, or found no FlashInfer."""
    VLLM.check(KNOWN)
    from weft.compat import flashinfer

    holders = [importlib.import_module(name) for name in HOLDERS]
    for module in holders:
        if getattr(module, ATTRIBUTE, None) is None:
            raise SetupError(
                f"WEFT_VLLM_ALLREDUCE=1 stands in for FlashInfer, and {module.__name__} found none "
                "that it can import: vLLM defines its fused operator only then, so install "
                "the flashinfer-python that vLLM names"
            )
    for module in holders:
        setattr(module, ATTRIBUTE, flashinfer)


# The second has the attribute only where it found FlashInfer.
KNOWN = (Known(f"{HOLDERS[0]}.{ATTRIBUTE}"), Known(f"{HOLDERS[1]}.fi_ar_available"))
