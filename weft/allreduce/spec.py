"""What a fused all-reduce is asked for, and what it gives: small specs of epilogue and prologue."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.arguments import one_of, shown
from weft.errors import InvalidArgument

GROUP_SIZES, GROUP_SCALES = (128,), ("fp32", "ue8m0")


@dataclass(frozen=True, slots=True, eq=False)
class FP8Static:
    """One scale for everything, given: `q = e4m3(norm * (1 / scale))`, saturating at 448.

    scale: float32 `[1]` on the device.
    """

    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class FP8Token:
    """One scale for each row, made of it: float32 `[tokens, 1]`.

    `scale = max(amax * fl(1 / 448), 2^-9 / 448)`, `q = e4m3(norm / scale)`, as flashinfer.comm and
    torch on GPUs have it. A row that holds an Inf or a NaN has scale NaN and NaN numbers.
    """


@dataclass(frozen=True, slots=True)
class FP8Group:
    """One scale for each 128 columns, as dispatch quantises (device/quantize.cuh).

    scale: "fp32": float32 `[tokens, hidden / 128]`; "ue8m0": powers of two from 2^-33 as bytes,
        four packed into an int32 `[tokens, ceil(hidden / 512)]` with strides
        `(1, tokens rounded up to 4)`.
    """

    size: int = 128
    scale: str = "fp32"

    def __post_init__(self) -> None:
        one_of("size", self.size, GROUP_SIZES)
        one_of("scale", self.scale, GROUP_SCALES)


Quant = FP8Static | FP8Token | FP8Group


@dataclass(frozen=True, slots=True, eq=False)
class MoEFinalize:
    """This rank's row as the weighted sum of experts' rows, made on the way into the all-reduce.

    `x[t] = routed_scaling_factor * (sum over k of rows[index[t, k]] * scales[t, k]) + shared[t]`:
    fp32, in the order of k, rounded once.

    rows: `[n, hidden]`.   index: int32 `[tokens, top_k]`, -1 for none; others out of range are
        dropped and raised by `check()`.   scales: float32 or the rows' dtype `[tokens, top_k]`;
        None means 1.   shared: `[tokens, hidden]`, for example a shared expert's result.
    routed_scaling_factor: a number, as models with shared experts have it.
    """

    rows: torch.Tensor
    index: torch.Tensor
    scales: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """The outputs of one call; None where nobody wanted one.

    out: `[tokens, hidden]`, the rounded sum.   residual: sum plus residual, rounded.
    norm: RMSNorm of that.   quant: float8_e4m3fn `[tokens, hidden]` of the norm.   scale: its
    scales, in the layout of the quant spec.
    """

    out: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    quant: torch.Tensor | None = None
    scale: torch.Tensor | None = None


def coding_of(quant: Quant | None) -> str:
    """The name of a quant spec in the protocol. Raises InvalidArgument for what is none."""
    if quant is None:
        return "none"
    if isinstance(quant, FP8Static):
        return "static"
    if isinstance(quant, FP8Token):
        return "token"
    if isinstance(quant, FP8Group):
        return "group" if quant.scale == "fp32" else "group_ue8m0"
    raise InvalidArgument(
        f"quant is {shown(quant)}; pass FP8Static(scale), FP8Token(), FP8Group(128, scale=...) or "
        "None. NVFP4 needs a Blackwell GPU's conversion and is not offered"
    )


def implied_outputs(
    residual: torch.Tensor | None, weight: torch.Tensor | None, quant: Quant | None
) -> dict[str, bool]:
    """Which outputs a call has of which the caller said nothing."""
    return {
        "out": residual is None and weight is None,
        "residual": residual is not None,
        "norm": weight is not None and quant is None,
        "quant": quant is not None,
        "scale": quant is not None and not isinstance(quant, FP8Static),
    }
