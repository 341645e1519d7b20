# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter with a GPU's rounding.

Version 3.6 truncates to bfloat16, and its e4m3 conversion neither rounds half to even nor carries
into the exponent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

KINDS = {
    "bf16": (torch.bfloat16, np.int16, np.uint16),
    "fp32": (torch.float32, np.int32, np.uint32),
    "fp8e4nv": (torch.float8_e4m3fn, np.uint8, np.uint8),
}


def round_as_gpus_do() -> None:
    """Convert between float32, bfloat16 and e4m3 with torch; e4m3 saturates."""
    original: Any = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if not {str(source), str(target)} <= KINDS.keys():
            return original(data, source, target, rounding)
        (source_type, bits, _), (target_type, out_bits, word) = (
            KINDS[str(source)],
            KINDS[str(target)],
        )
        values = torch.from_numpy(np.ascontiguousarray(data).view(bits)).view(source_type).float()
        if target_type == torch.float8_e4m3fn:
            values = values.clamp(-448.0, 448.0)
        converted = values.to(target_type).view(getattr(torch, np.dtype(out_bits).name))
        return converted.numpy().view(word).reshape(data.shape)

    interpreter._convert_float = convert
