# SPDX-License-Identifier: Apache-2.0
"""The parts of flashinfer that its communication tests import; weft does the communication."""

from typing import Any, NoReturn

from flashinfer.tllm_enums import SfLayout as SfLayout


def mxfp4_quantize(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("flashinfer's FP4 needs Blackwell")


nvfp4_quantize = mxfp4_quantize
