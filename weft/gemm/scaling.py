"""FP8 blocks in the kernel: the bits of weft.reference.quantize. (docs/quantisation.md)"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize(x):
    """A tile of one block of columns -> (numbers before their rounding to e4m3, scale by row)."""
    amax = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)
    broken = amax == float("inf")
    small = amax < 6.018531076210112e-36  # 2^-117
    top = tl.full(amax.shape, 448.0, tl.float32)
    scale = tl.where(small, 0.0, tl.div_rn(amax, top))
    inverse = tl.where(small, 0.0, tl.div_rn(top, amax))
    scale = tl.where(broken, float("nan"), scale)
    return tl.where(broken[:, None], float("nan"), x * inverse[:, None]), scale
