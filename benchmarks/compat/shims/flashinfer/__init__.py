# SPDX-License-Identifier: Apache-2.0
"""As much of flashinfer as tests of its communication import; communication is weft's."""

from typing import Any, NoReturn

from flashinfer.tllm_enums import SfLayout as SfLayout


def mxfp4_quantize(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("FP4 of flashinfer's, for Blackwell")


nvfp4_quantize = mxfp4_quantize
