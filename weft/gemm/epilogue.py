"""What a grouped GEMM does with its fp32 sums before it stores them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from weft.arguments import adopt, flags, real


@dataclass(frozen=True, slots=True)
class Store:
    """`out[row] = round(a[row] @ b[e].T + bias[e])`, `[*rows, n]`."""


@dataclass(frozen=True, slots=True)
class GateNumbers:
    """The numbers of `gate * sigmoid(alpha * gate) * (up + offset)`; limit of gate and up, or None.

    Raises InvalidArgument for a number that is not finite or a limit that is not positive.
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
class Gated(GateNumbers):
    """`gate * sigmoid(alpha * gate) * (up + offset)`, `[*rows, n / 2]`, rounded once.

    gate: columns 0..n/2 of `a @ b.T`, clamped to at most `limit`.   up: the others, clamped to
        -limit..limit.
    limit: above 0, or None for no limit.

    alpha 1 and offset 0 give SwiGLU; 1.702, 1 and limit 7 that of GPT-OSS. Everything is fp32 until
    the result. Raises InvalidArgument for a number that is not finite or a limit that is not
    positive.
    """


@dataclass(frozen=True, slots=True)
class GatedQuant(Gated):
    """Gated, then FP8 in blocks of 128 columns: `(float8_e4m3fn [*rows, n / 2], float32 scales)`.

    The scales are `[*rows, n / 256]`. Rule and bits are those of
    `weft.reference.quantize(x, "fp8")`, applied to the fp32 result of the gating.
    (docs/quantisation.md)
    """


@dataclass(frozen=True, slots=True)
class Push:
    """Stores each row of Store's result at an address of its own; nothing is returned.

    dst_addr: int64 `[rows]`, where the row's n numbers go, a multiple of 16; 0 for nowhere. Rows
        are flat, also where they are masked. The address may lie in a peer's memory. The stores
        are weak: whoever signals the peer must do it behind this call in stream order.
    dtype: of the numbers there: bfloat16, float16 or float32; None for bfloat16 from FP8, else a's.
    flag_in_data: the data is its own flag. Stores are relaxed, at system scope, in words of 4 bytes
        of which none is all ones (a NaN never has all bits set), so an owner that has filled a row
        with ones may poll it. On GPUs this needs a WgmmaPlan.
    abort_flag: int32 `[1]` on the device; where it is not 0 when a tile begins, the tile's rows are
        not stored. With `flag_in_data` only.
    """

    dst_addr: torch.Tensor
    dtype: torch.dtype | None = None
    _: KW_ONLY
    flag_in_data: bool = False
    abort_flag: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse a word for a flag; tensors are checked by the call that gets them."""
        flags(flag_in_data=self.flag_in_data)


Epilogue = Store | Gated | GatedQuant | Push
STORE = Store()
