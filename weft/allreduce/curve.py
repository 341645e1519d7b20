"""Measured times of all-reduce backends for one kind of row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.errors import InvalidArgument
from weft.shape import DTYPE_NAMES
from weft.tuning.thresholds import Bands, Times, bands_of, check_times, time_at

EPILOGUES = ("none", "norm", "fp8-static", "fp8-token", "fp8-group")

_BYTES = {number: dtype.itemsize for dtype, number in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Curve:
    """Times of every backend for one hidden size, dtype and epilogue.

    hidden: elements of a row.  dtype: "bf16", "fp16" or "fp32".  epilogue: one of EPILOGUES.
    tokens: sizes, rising.  us: backend -> us for each size, None where it does not serve the size.
    """

    hidden: int
    dtype: str
    epilogue: str
    tokens: tuple[int, ...]
    us: Mapping[str, Times]

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.dtype not in _BYTES or self.epilogue not in EPILOGUES:
            raise InvalidArgument(
                f"hidden {self.hidden}, dtype {self.dtype!r}, epilogue {self.epilogue!r}: dtype is "
                f"one of {', '.join(_BYTES)}, epilogue one of {', '.join(EPILOGUES)}"
            )
        check_times(self.tokens, self.us)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of one rank's rows at each number of tokens."""
        return tuple(tokens * self.hidden * _BYTES[self.dtype] for tokens in self.tokens)

    def at(self, backend: str, payload: int) -> float | None:
        """us of a backend for `payload` bytes a rank, on the lines between sizes; None unknown."""
        return time_at(self.sizes, self.us[backend], payload)

    def bands(self, row_bytes: int, backends: Sequence[str]) -> Bands:
        """Which of `backends` serves how many rows of `row_bytes`; sizes are compared by bytes."""
        return bands_of(self.sizes, self.us, backends, unit=row_bytes)
