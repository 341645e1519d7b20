"""What a user may set through the environment, each checked when SGLang loads the plug-in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from weft.arguments import integer, one_of, seconds
from weft.errors import InvalidArgument

PREFIX = "WEFT_SGLANG_"
FORMS = ("block", "dispatcher")
MODES = ("low_latency", "throughput", "auto")
OVERLAPS = ("auto", "none", "shared_expert", "gemm_push")
MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the variable WEFT_SGLANG_ and its name in capitals.

    form: "block": weft serves whole MoE blocks, shared expert included; "dispatcher": it moves the
        tokens, and SGLang's runner has the experts.
    decode: mode of the layers that serve small batches, as `weft.MoE(mode=)`.
    overlap: of both sizes, as `weft.MoE(overlap=)`.
    combine_dtype: "fp8" for results that travel in half the bytes, or None ("" in the variable).
    prefill_tokens: tokens of a rank that one round of a large batch moves; None: what
        --chunked-prefill-size gives a rank, at most 4096. A larger batch takes several rounds.
    timeout: seconds that a layer waits for a peer that is late. A rank may compile for minutes
        while its peers wait; one that died is noticed at once.
    """

    form: str = "block"
    decode: str = "low_latency"
    overlap: str = "auto"
    combine_dtype: str | None = None
    prefill_tokens: int | None = None
    timeout: float = 300.0

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Those of the environment. Raises InvalidArgument naming the variable."""
        said, plain = os.environ if environment is None else environment, cls()

        def variable(field: str) -> tuple[str, str]:
            name = PREFIX + field.upper()
            return name, said.get(name, "").strip()

        def choice(field: str, allowed: tuple[str, ...], default: str) -> str:
            name, text = variable(field)
            return one_of(name, text, allowed) if text else default

        tokens, limit = variable("prefill_tokens"), variable("timeout")
        most = integer(tokens[0], _number(*tokens), 1, MOST_TOKENS) if tokens[1] else None
        return cls(
            form=choice("form", FORMS, plain.form),
            decode=choice("decode", MODES, plain.decode),
            overlap=choice("overlap", OVERLAPS, plain.overlap),
            combine_dtype=choice("combine_dtype", ("fp8",), "") or None,
            prefill_tokens=most,
            timeout=seconds(limit[0], _number(*limit)) if limit[1] else plain.timeout,
        )


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} is {text!r}; it must be a number") from error
