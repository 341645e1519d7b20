# SPDX-License-Identifier: Apache-2.0
"""flashinfer.comm, from weft.

NVFP4 is refused by weft, which has nothing for it to run on. flashinfer's own test takes these
patterns in the middle of a loop and looks at their sum and norm alone. So that the rest of the loop
runs, they are made here without the FP4 numbers, and the runner counts and shows how often. The
same test passes a quant_out of a wider dtype, which flashinfer takes as memory: its first bytes.
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
    def made(*args: Any, **given: Any) -> Any:
        if given.get(name) in _WITHOUT_FP4:
            print(f"RIVALS-REFUSED pattern {given[name]}: NVFP4 needs Blackwell", flush=True)
            given = {**given, name: _WITHOUT_FP4[given[name]], "quant_out": None}
            given["scale_out"] = None
        quant = given.get("quant_out")
        if quant is not None and quant.itemsize > 1:
            memory = quant.view(-1).view(torch.uint8)[: quant.numel()]
            given = {**given, "quant_out": memory.view(torch.float8_e4m3fn).view(quant.shape)}
        for capture in captures:
            capture.append(functools.partial(call, *args, **given))
        return call(*args, **given)

    return made


allreduce_fusion = _without_fp4(_weft.allreduce_fusion, "pattern")


def compute_fp4_swizzled_layout_sf_size(rows: int, columns: int) -> int:
    """Scales of a place for FP4 numbers: rows in tiles of 128, columns of 4."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def __getattr__(name: str) -> object:
    return getattr(_weft, name)
