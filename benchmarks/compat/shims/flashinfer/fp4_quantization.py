# SPDX-License-Identifier: Apache-2.0
"""A name that flashinfer's tests import for Blackwell."""

from flashinfer import mxfp4_quantize as e2m1_and_ufp8sf_scale_to_float

__all__ = ["e2m1_and_ufp8sf_scale_to_float"]
