"""What a call of the fused all-reduce is, in 40 bits that peers compare, and in words."""

from __future__ import annotations

BACKENDS = {"oneshot": 1, "twoshot": 2, "twoshot_bulk": 3}
CODINGS = {"none": 0, "static": 1, "token": 2, "group": 3, "group_ue8m0": 4}
SLOTS = {
    1: "row",
    2: "row to be summed",
    3: "summed row",
    4: "statistics of the summed row",
    5: "call word",
}


def signature(tokens: int, backend: int, *, parts: tuple[bool, ...], coding: int, salt: int) -> int:
    """What a call is, in 40 bits: tokens 20, backend 4, inputs and outputs 4, coding 4, salt 8."""
    flags = sum(1 << i for i, present in enumerate(parts) if present)
    return tokens << 20 | backend << 16 | flags << 12 | coding << 8 | (salt & 0xFF)


def signature_text(word: int) -> str:
    """A call word in words."""
    tokens, backend = word >> 20 & 0xFFFFF, word >> 16 & 15
    flags, coding = word >> 12 & 15, word >> 8 & 15
    names = [name for name, number in BACKENDS.items() if number == backend]
    codings = [name for name, number in CODINGS.items() if number == coding]
    parts = [
        name for i, name in enumerate(("residual", "weight", "the sum wanted")) if flags >> i & 1
    ]
    return (
        f"{tokens} tokens by {names[0] if names else f'backend {backend}'}, "
        f"with {' and '.join(parts) or 'no residual, no weight'}, "
        f"quant {codings[0] if codings else coding}, constants {word & 0xFF:#04x}"
    )
