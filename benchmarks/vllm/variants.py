# SPDX-License-Identifier: Apache-2.0
"""Compared variants of vLLM: their additional EngineArgs and environment."""

from __future__ import annotations

from job import Variant, by_name

SERVED = "MoE layers of vLLM on"  # part of weft's log line when it serves a model
TRITON = ("moe_backend=triton",)


def _weft(form: str, what: str, *flags: str) -> Variant:
    return Variant(form, what, flags, {"WEFT_VLLM": form}, SERVED)


VARIANTS = by_name(
    Variant("stock", "vLLM, Triton experts", TRITON),
    Variant(
        "deep_gemm",
        "vLLM, DeepGEMM experts",
        ("moe_backend=deep_gemm",),
        startup_text="Using DEEPGEMM Fp8 MoE backend",
    ),
    _weft("block", "whole MoE blocks by weft"),
    _weft("exchange", "weft moves tokens; vLLM's Triton experts", *TRITON),
)
