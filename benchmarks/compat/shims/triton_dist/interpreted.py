# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter with the roundings of a GPU.

Version 3.6 cuts bfloat16 off, and its e4m3 neither rounds halves to even nor carries into the
exponent.
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
    """Let conversions between float32, bfloat16 and e4m3 be torch's, which saturates e4m3 here."""
    interpreters: Any = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if not {str(source), str(target)} <= KINDS.keys():
            return interpreters(data, source, target, rounding)
        (given, bits, _), (wanted, out_bits, word) = KINDS[str(source)], KINDS[str(target)]
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(bits)).view(given).float()
        if wanted == torch.float8_e4m3fn:
            numbers = numbers.clamp(-448.0, 448.0)
        made = numbers.to(wanted).view(getattr(torch, np.dtype(out_bits).name))
        return made.numpy().view(word).reshape(data.shape)

    interpreter._convert_float = convert
