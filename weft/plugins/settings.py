# SPDX-License-Identifier: Apache-2.0
"""What a user may set through the environment, each checked when an engine loads the plug-in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from weft.arguments import integer, one_of, seconds
from weft.errors import InvalidArgument

MODES = ("low_latency", "throughput", "auto")
OVERLAPS = ("auto", "none", "shared_expert", "gemm_push")
MOST_TOKENS = 1 << 20
# The variable of each engine's form, and what it may be; the first where it is unset.
FORMS = {
    "SGLANG": ("WEFT_SGLANG_FORM", ("block", "dispatcher")),
    "VLLM": ("WEFT_VLLM", ("", "block", "exchange")),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is a variable of its name after the engine's, such as WEFT_SGLANG_OVERLAP.

    form: "block": weft runs whole MoE blocks; otherwise it moves the tokens, and the engine's own
        experts multiply. "": the engine's MoE blocks are left alone.
    decode: mode of the layers that serve small batches, as `weft.MoE(mode=)`.
    overlap: of both sizes, as `weft.MoE(overlap=)`.
    combine_dtype: "fp8" for results that travel in half the bytes, or None ("" in the variable).
    prefill_tokens: tokens of a rank that one round of a large batch moves; None: what the engine's
        flags give a rank, at most 4096. A larger batch takes several rounds.
    timeout: seconds that a layer waits for a peer that is late. A rank may compile for minutes
        while its peers wait; one that died is noticed at once.
    allreduce: do tensor-parallel ranks sum by weft? "1" or "0" in the variable.
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
        """Those of the environment. Raises InvalidArgument naming the variable.

        engine: what the variables have after WEFT_, "SGLANG" or "VLLM".
        """
        form, forms = FORMS[engine]
        environ = os.environ if environment is None else environment

        def said(name: str, default: str = "") -> str:
            return environ.get(name, "").strip() or default

        def choice(name: str, allowed: tuple[str, ...], default: str) -> str:
            return one_of(name, said(name, default), allowed)

        plain, tokens, limit = cls(), f"WEFT_{engine}_PREFILL_TOKENS", f"WEFT_{engine}_TIMEOUT"
        most = integer(tokens, _number(tokens, said(tokens, "1")), 1, MOST_TOKENS)
        return cls(
            form=choice(form, forms, forms[0]),
            decode=choice(f"WEFT_{engine}_DECODE", MODES, plain.decode),
            overlap=choice(f"WEFT_{engine}_OVERLAP", OVERLAPS, plain.overlap),
            combine_dtype=choice(f"WEFT_{engine}_COMBINE_DTYPE", ("", "fp8"), "") or None,
            prefill_tokens=most if said(tokens) else None,
            timeout=seconds(limit, _number(limit, said(limit, str(plain.timeout)))),
            allreduce=choice(f"WEFT_{engine}_ALLREDUCE", ("0", "1"), "0") == "1",
        )


def first_timeout(timeout: float) -> float:
    """Seconds that a first round waits: two minutes at least, as a peer may compile."""
    return max(timeout, 120.0)


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} is {text!r}; it must be a number") from error
