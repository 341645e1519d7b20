"""What a grouped product does with its sums before it writes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.arguments import adopt, flags, real


@dataclass(frozen=True, slots=True)
class Store:
    """`out[row] = round(a[row] @ b[e].T + bias[e])`, `[*rows, n]`."""


@dataclass(frozen=True, slots=True)
class Gated:
    """`gate * sigmoid(alpha * gate) * (up + offset)`, `[*rows, n / 2]`, rounded once.

    gate: columns 0..n/2 of the product, at most `limit`.   up: the others, in -limit..limit.
    limit: above 0, or None for no limit.

    alpha, offset: 1 and 0 give SwiGLU; 1.702, 1 and limit 7 GPT-OSS's. Everything is fp32 until the
    result. Raises InvalidArgument for a number that is not finite or a limit that is not positive.
    """

    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that would spoil every row."""
        limit = None if self.limit is None else real("limit", self.limit, above=0.0)
        alpha, offset = real("alpha", self.alpha), real("offset", self.offset)
        adopt(self, alpha=alpha, offset=offset, limit=limit)


@dataclass(frozen=True, slots=True)
class GatedQuant(Gated):
    """Gated, then FP8 in blocks of 128 columns: `(float8_e4m3fn [*rows, n / 2], float32 scales)`.

    The scales are `[*rows, n / 256]`. The rule and the bits of `weft.reference.quantize(x, "fp8")`,
    applied to the fp32 result of the gating. (docs/quantisation.md)
    """


@dataclass(frozen=True, slots=True)
class Push:
    """Each row of Store's result goes to its home, an address; nothing is returned.

    home: int64 `[rows]`, where the row's n numbers go, a multiple of 16; 0 for nowhere. Rows are
        flat, also where they are masked. It may lie in a peer's memory. Stores are weak: who tells
        the peer must do it in stream order behind.
    dtype: of the numbers there: bfloat16, float16 or float32; None for bfloat16 from FP8, else a's.
    tells: rows tell of themselves: stores are relaxed, at system scope, in words of 4 bytes of
        which none is all ones (a NaN never has all bits set), so an owner may poll a place that it
        has filled with ones. On GPUs with a WgmmaPlan only.
    unless: int32 `[1]` on the device; where it is not 0 when a tile begins, its rows go nowhere.
        With `tells` only.
    """

    home: torch.Tensor
    dtype: torch.dtype | None = None
    tells: bool = False
    unless: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse a word for a flag; tensors are looked at where they are used."""
        flags(tells=self.tells)


Epilogue = Store | Gated | GatedQuant | Push
STORE = Store()
