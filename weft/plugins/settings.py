# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the engine plug-ins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from weft.arguments import check_choice, check_int, check_seconds
from weft.errors import InvalidArgument

MODES = ("low_latency", "throughput", "auto")
OVERLAPS = ("auto", "none", "shared_expert", "gemm_push")
MAX_PREFILL = 1 << 20
# For each engine, the variable that selects the form, and its values. The first is the default.
FORMS = {
    "SGLANG": ("WEFT_SGLANG_FORM", ("block", "dispatcher")),
    "VLLM": ("WEFT_VLLM", ("", "block", "exchange")),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a plug-in. Each field has a variable, such as WEFT_SGLANG_OVERLAP.

    Attributes:
        form: "block": weft runs whole MoE blocks. "": weft does not change MoE blocks. Other forms:
            weft moves the tokens, and the engine computes the experts.
        decode: Mode of the decode operators, as in `weft.MoE(mode=)`.
        overlap: Overlap of the decode and prefill operators, as in `weft.MoE(overlap=)`.
        combine_dtype: "fp8" halves the bytes of combined results; None ("" in the variable): no
            conversion.
        prefill_tokens: Maximum tokens per rank in one round of a prefill operator. None: derived
            from the engine's flags, at most 4096. A larger batch runs in several rounds.
        timeout: Seconds that a layer waits for a late peer. A rank may compile for minutes while
            its peers wait; a dead peer is detected at once.
        allreduce: Whether weft runs the all-reduces of tensor-parallel ranks. The variable is "1"
            or "0".
        batch_invariant: Whether the engine is in its batch-invariant mode. vLLM's variable is
            VLLM_BATCH_INVARIANT; SGLang has a flag instead.
    """

    form: str = "block"
    decode: str = "low_latency"
    overlap: str = "auto"
    combine_dtype: str | None = None
    prefill_tokens: int | None = None
    timeout: float = 300.0
    allreduce: bool = False
    batch_invariant: bool = False

    @classmethod
    def read(cls, engine: str, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from environment variables.

        Args:
            engine: "SGLANG" or "VLLM".
            environment: Variables to read. Default: os.environ.

        Raises:
            InvalidArgument: If a value is invalid; the error names the variable.
        """
        form, values = FORMS[engine]
        variables = os.environ if environment is None else environment

        def read_value(name: str, default: str = "") -> str:
            return variables.get(name, "").strip() or default

        def read_choice(name: str, allowed: tuple[str, ...], default: str) -> str:
            return check_choice(name, read_value(name, default), allowed)

        def read_number(name: str, default: str) -> int | float:
            return _parse_number(name, read_value(name, default))

        defaults = cls()
        tokens_name, timeout_name = f"WEFT_{engine}_PREFILL_TOKENS", f"WEFT_{engine}_TIMEOUT"
        prefill_tokens = check_int(tokens_name, read_number(tokens_name, "1"), 1, MAX_PREFILL)
        return cls(
            form=read_choice(form, values, values[0]),
            decode=read_choice(f"WEFT_{engine}_DECODE", MODES, defaults.decode),
            overlap=read_choice(f"WEFT_{engine}_OVERLAP", OVERLAPS, defaults.overlap),
            combine_dtype=read_choice(f"WEFT_{engine}_COMBINE_DTYPE", ("", "fp8"), "") or None,
            prefill_tokens=prefill_tokens if read_value(tokens_name) else None,
            timeout=check_seconds(timeout_name, read_number(timeout_name, str(defaults.timeout))),
            allreduce=read_choice(f"WEFT_{engine}_ALLREDUCE", ("0", "1"), "0") == "1",
            batch_invariant=engine == "VLLM" and read_number("VLLM_BATCH_INVARIANT", "0") != 0,
        )


def compute_first_timeout(timeout: float) -> float:
    """Return the timeout of a first round: at least 120 s, because a peer may compile."""
    return max(timeout, 120.0)


def _parse_number(name: str, text: str) -> int | float:
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} is {text!r}; it must be a number") from error
