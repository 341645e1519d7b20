"""What one all-reduce benchmark measures: the settings every rank gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.bench.cases import DTYPES
from weft.errors import InvalidArgument
from weft.ops.allreduce_curve import EPILOGUES
from weft.ops.allreduce_table import BACKENDS as SAME_BITS

AUTO, COLLECTIVE = "auto", "collective"
BACKENDS = (*SAME_BITS, COLLECTIVE, AUTO)
GROUP = 128  # columns that share a scale in fp8-group


@dataclass(frozen=True, slots=True)
class ReduceSettings:
    """Everything a rank needs to know. Equal on all ranks.

    tokens: sizes to measure; every rank brings as many.  max_tokens: capacity, or None for the
    largest size.  epilogue: "none" sums; "norm" adds a residual and takes RMSNorm; the others
    quantise what that gives, and write no norm.
    table: a file of `weft tune allreduce` that "auto" reads, or None for what came with weft.
    programmatic_launch: as in AllReduce.  samples: timed samples per size.
    """

    ranks: int
    device: str
    tokens: tuple[int, ...]
    hidden: int
    dtype: str
    epilogue: str
    backends: tuple[str, ...]
    graph: bool
    samples: int
    seed: int
    max_tokens: int | None = None
    table: str | None = None
    programmatic_launch: bool = True

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, tuple(DTYPES)),
            ("epilogue", self.epilogue, EPILOGUES),
            *(("backend", backend, BACKENDS) for backend in self.backends),
        ):
            if value not in allowed:
                raise InvalidArgument(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        if not self.backends or not self.tokens:
            raise InvalidArgument("nothing to measure: pass at least one backend and token count")
        if min(self.tokens) < 1:
            raise InvalidArgument(f"{min(self.tokens)} tokens; a timed size is at least 1")
        if self.max_tokens is not None and max(self.tokens) > self.max_tokens:
            raise InvalidArgument(
                f"{max(self.tokens)} tokens do not fit max_tokens={self.max_tokens}; raise it"
            )
        if not 2 <= self.ranks <= 8:
            raise InvalidArgument(f"{self.ranks} ranks; an all-reduce has 2 to 8")
        if self.hidden < 8 or self.hidden % 8:
            raise InvalidArgument(f"hidden is {self.hidden}; it must be a multiple of 8")
        if self.epilogue == "fp8-group" and self.hidden % GROUP:
            raise InvalidArgument(
                f"hidden is {self.hidden} and fp8-group has a scale for each {GROUP} columns: "
                f"choose a multiple of {GROUP}"
            )
        if not 1 <= self.samples <= 5000:
            raise InvalidArgument(f"{self.samples} samples; choose 1..5000")

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of the rows."""
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * self.out_dtype.itemsize

    @property
    def capacity(self) -> int:
        """Tokens that the workspace is made for."""
        return self.max_tokens or max(self.tokens)

    @property
    def what(self) -> str:
        """What a call does, in words."""
        return {
            "none": "sum",
            "norm": "sum + residual + RMSNorm",
            "fp8-static": "sum + residual + RMSNorm + fp8, one scale",
            "fp8-token": "sum + residual + RMSNorm + fp8, a scale for each token",
            "fp8-group": f"sum + residual + RMSNorm + fp8, a scale for each {GROUP} columns",
        }[self.epilogue]


def wire_bytes(backend: str, payload: int, ranks: int) -> float:
    """Bytes that a rank sends to reduce `payload` bytes, spread evenly over the owners."""
    return (ranks - 1) * payload if backend == "oneshot" else 2 * (ranks - 1) / ranks * payload
