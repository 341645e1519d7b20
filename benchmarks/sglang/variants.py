# SPDX-License-Identifier: Apache-2.0
"""Compared variants of SGLang: their additional flags and environment."""

from __future__ import annotations

from job import Variant, by_name

MOE = ("--moe-a2a-backend", "weft")
SERVED = " ranks, form "  # part of the plug-in's log line when it serves a model


def _weft(
    name: str, what: str, *flags: str, form: str = "block", answer_text: str = "", **settings: str
) -> Variant:
    settings = {f"WEFT_SGLANG_{key.upper()}": value for key, value in settings.items()}
    return Variant(
        name, what, MOE + flags, {"WEFT_SGLANG_FORM": form, **settings}, SERVED, answer_text
    )


# Two replicas per rank, and experts that are rebalanced every few passes.
BALANCED = (
    *("--enable-eplb", "--ep-num-redundant-experts", "2"),
    *("--eplb-rebalance-num-iterations", "8", "--ep-dispatch-algorithm"),
)
MOVED = "[EPLBManager] rebalance end"


# Disables both of SGLang's all-reduces; the second one would be enabled by default.
NO_OWN_SUMS = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
VARIANTS = by_name(
    Variant("stock", "SGLang as published: NCCL and Triton experts"),
    _weft("weft", "whole MoE blocks by weft"),
    _weft("dispatcher", "weft moves tokens, in bf16; SGLang's experts", form="dispatcher"),
    _weft("no-overlap", "whole blocks, nothing overlapped", overlap="none"),
    _weft("combine-fp8", "whole blocks, results return in FP8", combine_dtype="fp8"),
    _weft("eplb", "whole blocks, experts that move", *BALANCED, "static", answer_text=MOVED),
    _weft(
        "eplb-any",
        "whole blocks, experts that move, any replica",
        *BALANCED,
        "dynamic",
        answer_text=MOVED,
    ),
    _weft(
        "eplb-dispatcher",
        "weft moves tokens, experts move, any replica",
        *BALANCED,
        "dynamic",
        form="dispatcher",
        answer_text=MOVED,
    ),
)
# A replica of each of the trained model's 16 experts on another rank, and the flags of elastic EP.
OUTLIVING = (
    *("--elastic-ep-backend", "weft", "--disable-overlap-schedule", "--enable-dp-lm-head"),
    *("--moe-dense-tp-size", "1", "--enable-dp-attention-local-control-broadcast"),
    *("--ep-num-redundant-experts", "16", "--ep-dispatch-algorithm"),
)
ELASTIC = by_name(
    _weft("elastic", "whole blocks, ranks that outlive each other", *OUTLIVING, "static"),
    _weft("elastic-any", "the same, any replica", *OUTLIVING, "dynamic"),
    _weft(
        "elastic-dispatcher",
        "weft moves tokens, ranks that outlive each other",
        *OUTLIVING,
        "static",
        form="dispatcher",
    ),
)
# All-reduces of tensor parallelism.
SUMS = by_name(
    Variant("nccl", "SGLang, NCCL", NO_OWN_SUMS),
    Variant("stock", "SGLang's custom all-reduce", NO_OWN_SUMS[1:]),
    Variant(
        "flashinfer",
        "SGLang's custom all-reduce, FlashInfer's fused one",
        ("--flashinfer-allreduce-fusion-backend", "trtllm"),
        startup_text="FlashInfer AllReduce Fusion enabled",
    ),
    Variant(
        "weft",
        "weft's all-reduce, fused with residual and norm",
        NO_OWN_SUMS,
        {"WEFT_SGLANG_ALLREDUCE": "1"},
        startup_text="weft runs the all-reduces of",
    ),
)
