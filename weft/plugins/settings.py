# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the engine plug-ins, validated when an engine loads the plug-in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from weft.arguments import check_choice, check_int, check_seconds
from weft.errors import InvalidArgument

MODES = ("low_latency", "throughput", "auto")
OVERLAPS = ("auto", "none", "shared_expert", "gemm_push")
MOST_TOKENS = 1 << 20
# The variable that selects each engine's form, and its values; the first is the default.
FORMS = {
    "SGLANG": ("WEFT_SGLANG_FORM", ("block", "dispatcher")),
    "VLLM": ("WEFT_VLLM", ("", "block", "exchange")),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a plug-in. Field `overlap` is read from WEFT_SGLANG_OVERLAP, and so on.

    Attributes:
        form: "block": weft runs whole MoE blocks. Other forms: weft moves the tokens, and the
            engine's own experts multiply. "": weft does not touch MoE blocks.
        decode: Mode of the decode operators, as in `weft.MoE(mode=)`.
        overlap: Overlap of the decode and prefill operators, as in `weft.MoE(overlap=)`.
        combine_dtype: "fp8" halves the bytes of combined results; None ("" in the variable) keeps
            the dtype.
        prefill_tokens: Tokens per rank in one round of a large batch. None: the number that the
            engine's flags give a rank, at most 4096. A larger batch takes several rounds.
        timeout: Seconds that a layer waits for a late peer. A rank may compile for minutes while
            its peers wait; a dead peer is detected at once.
        allreduce: Whether weft runs the all-reduces of tensor-parallel ranks; "1" or "0" in the
            variable.
    """

    form: str = "block"
    decode: str = "low_latency"
    overlap: str = "auto"
    combine_dtype: str | None = None
    prefill_tokens: int | None = None
    timeout: float = 300.0
    allreduce: bool = False

    @classmethod
    def read(cls, engine: str, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from environment variables.

        Args:
            engine: "SGLANG" or "VLLM".
            environment: Variables to read instead of os.environ.

        Raises:
            InvalidArgument: If a value is invalid; the error names the variable.
        """
        form, forms = FORMS[engine]
        environ = os.environ if environment is None else environment

        def value(name: str, default: str = "") -> str:
            return environ.get(name, "").strip() or default

        def choice(name: str, allowed: tuple[str, ...], default: str) -> str:
            return check_choice(name, value(name, default), allowed)

        defaults, tokens, limit = cls(), f"WEFT_{engine}_PREFILL_TOKENS", f"WEFT_{engine}_TIMEOUT"
        most = check_int(tokens, _number(tokens, value(tokens, "1")), 1, MOST_TOKENS)
        return cls(
            form=choice(form, forms, forms[0]),
            decode=choice(f"WEFT_{engine}_DECODE", MODES, defaults.decode),
            overlap=choice(f"WEFT_{engine}_OVERLAP", OVERLAPS, defaults.overlap),
            combine_dtype=choice(f"WEFT_{engine}_COMBINE_DTYPE", ("", "fp8"), "") or None,
            prefill_tokens=most if value(tokens) else None,
            timeout=check_seconds(limit, _number(limit, value(limit, str(defaults.timeout)))),
            allreduce=choice(f"WEFT_{engine}_ALLREDUCE", ("0", "1"), "0") == "1",
        )


def first_timeout(timeout: float) -> float:
    """Return the timeout of a first round: at least two minutes, because a peer may compile."""
    return max(timeout, 120.0)


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} is {text!r}; it must be a number") from error
