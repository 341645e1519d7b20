# SPDX-License-Identifier: Apache-2.0
"""Epilogues and plans (tile sizes) of the grouped GEMM, and the selection of a plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass, replace

import torch

from weft.arguments import (
    check_bools,
    check_choice,
    check_float,
    check_instance,
    check_int,
    set_fields,
)
from weft.errors import InvalidArgument

FP8 = torch.float8_e4m3fn
DTYPES = (FP8, torch.bfloat16, torch.float16)
MXFP4 = torch.uint8  # dtype of weights packed by `pack_mxfp4`; their rows are FP8
WEIGHT_DTYPES = (*DTYPES, MXFP4)
DTYPES_16BIT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_SIZE = 2**31 - 1
ACTIVATIONS = ("relu2",)
BLOCK_N = 128  # weight rows per accumulator and per block of scales
BLOCK_K = 128  # columns of k per block of scales

# For WgmmaPlan; gemm/shape.cuh has the same constants.
BLOCK_MS = (32, 64, 96, 128, 160, 192, 256)
FP8_BLOCK_MS = (32, 64, 96, 128, 160, 256)
MXFP4_BLOCK_MS = (32, 64, 96, 128, 160)
NORMAL_M = 128
SPLIT_M = 2 * NORMAL_M  # FP8: rows of a tile that is split between the two CTAs of a cluster
CLUSTER_N = 2 * BLOCK_N
MAX_EXPERTS = 1024
MAX_FUSED_EXPERTS = 512  # of a kernel of two GEMMs: more may not fit into shared memory
MAX_STAGES = 10
MXFP4_MAX_STAGES = 16  # its stages are smaller
MXFP4_CTAS = {32: 3, 96: 2}  # CTAs per SM by the largest block_m that allows them
UNIT_PAIR_BYTES = 9 * 1024
SHARED_BYTES = (227 * 1024, 113 * 1024, 75 * 1024)  # per CTA, with one, two and three per SM

# With one expert, tiles of 128 rows are faster than 160, and 64 or 128 faster than 96, at any
# number of rows; tiles of 256 take 1 % less time from 4096 rows on (one H200, 2026-11-21).
ONE_EXPERT_BLOCK_MS = (128, 64, 32)
# Maximum mean for which a block_m is fastest in FP8 with random numbers of rows; the second table
# is for sizes whose wide tiles fill their rounds. Other values of block_m are limited by the number
# of rows that nearly no expert exceeds. (At 48, wide tiles of 128 take 1 to 9 % less time than 64
# or 96, and at 112 5 to 11 % less than 160. At 124, 160 takes up to 5 % less than 128, and at 144
# 6 to 10 % less than 256. Where wide tiles do not fill their rounds, 96 takes 4 to 10 % less than
# 128 at 64. One H200, 2026-11-28.)
FP8_MAX_MEAN = {128: 104, 160: 144}
FP8_WIDE_MAX_MEAN = {64: 32, 96: 32, 128: 120, 160: 144}
COARSE_ROWS = 768  # from this mean on, a plan changes only at multiples of 64 rows
ONE_EXPERT_M_BLOCKS = 4  # target of GemmPlan, so that one expert fills many SMs
CLUSTERS = 66  # of a GPU of 132 SMs
FULL_CLUSTERS = 60  # clusters that nearly fill it


@dataclass(frozen=True, slots=True)
class Store:
    """Epilogue that stores `activation(a[row] @ b[e].T + bias[e])` as `[*rows, n]`.

    All arithmetic is in fp32, and the result is rounded once.

    Attributes:
        activation: "relu2", which is `max(x, 0) ** 2`, or None.

    Raises:
        InvalidArgument: the activation is not supported.
    """

    activation: str | None = None

    def __post_init__(self) -> None:
        """Check the activation."""
        check_choice("activation", self.activation, (None, *ACTIVATIONS))


@dataclass(frozen=True, slots=True)
class StoreQuant(Store):
    """Epilogue that quantises the result of `Store` to FP8 with one scale per 128 columns.

    The scales are `[*rows, n / 128]`. The result is bitwise equal to
    `weft.reference.quantize(x, "fp8")`, where x is the result of the activation in fp32.
    """


@dataclass(frozen=True, slots=True)
class GatingParams:
    """Parameters of the gating `g * sigmoid(alpha * gate) * (u + offset)`; see `Gated`.

    Raises:
        InvalidArgument: as `Gated`.
    """

    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None
    beta: float | None = None
    linear_beta: float | None = None

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        limit = None if self.limit is None else check_float("limit", self.limit, above=0.0)
        alpha, offset = check_float("alpha", self.alpha), check_float("offset", self.offset)
        set_fields(self, alpha=alpha, offset=offset, limit=limit)
        if (self.beta is None) != (self.linear_beta is None):
            raise InvalidArgument(
                f"beta is {self.beta} and linear_beta is {self.linear_beta}; pass both for "
                "SiTU, or neither"
            )
        if self.beta is not None:
            set_fields(self, beta=check_float("beta", self.beta, above=0.0))
            set_fields(self, linear_beta=check_float("linear_beta", self.linear_beta, above=0.0))

    @property
    def situ(self) -> bool:
        """Whether the gating is SiTU."""
        return self.beta is not None


@dataclass(frozen=True, slots=True)
class Gated(GatingParams):
    """Epilogue that stores `g * sigmoid(alpha * gate) * (u + offset)` as `[*rows, n / 2]`.

    Gate is the first n / 2 columns of `a @ b.T`, and up the others. All arithmetic is in fp32, and
    the result is rounded once.

    The defaults give SwiGLU. GPT-OSS has alpha 1.702, offset 1 and limit 7. Kimi-K3 has SiTU with
    beta 4 and linear_beta 25.

    Attributes:
        alpha: Factor inside the sigmoid.
        offset: Added to u.
        limit: Clamps gate to at most limit and up to -limit..limit first. None: no limit.
        beta: With SiTU, g is `beta * tanh(gate / beta)`. None: g is gate.
        linear_beta: With SiTU, u is `linear_beta * tanh(up / linear_beta)`. None: u is up.

    Raises:
        InvalidArgument: a number is not finite, a limit or beta is not positive, or only one beta
            is set.
    """


@dataclass(frozen=True, slots=True)
class GatedQuant(Gated):
    """Epilogue that quantises the result of `Gated` to FP8 with one scale per 128 columns.

    The scales are `[*rows, n / 256]`. The result is bitwise equal to
    `weft.reference.quantize(x, "fp8")`, where x is the result of the gating in fp32.
    """


@dataclass(frozen=True, slots=True)
class Push:
    """Epilogue that stores each row of `Store` at its own address, such as in a peer's memory.

    Attributes:
        dst_addr: int64, one address per row of a (flattened if a is masked), a multiple of 16; 0
            skips the row. The stores are weak: signal the peer after this call in stream order.
        dtype: Dtype of the stored values: bfloat16, float16 or float32. Default: bfloat16 for FP8,
            else a's dtype.
        flag_in_data: Make the rows pollable. Rows are stored as 4-byte words with relaxed
            system-scope stores, and no word is all ones (a NaN never has all bits set). An owner
            that filled a row with ones can therefore poll its words. GPUs need a WgmmaPlan.
        abort_flag: int32 `[1]` on the device. If it is not 0 when a tile begins, the tile's rows
            are not stored. Needs flag_in_data.
    """

    dst_addr: torch.Tensor
    dtype: torch.dtype | None = None
    _: KW_ONLY
    flag_in_data: bool = False
    abort_flag: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check the flag and the dtype; `grouped_gemm` checks the tensors."""
        check_bools(flag_in_data=self.flag_in_data)
        if self.dtype is not None:
            check_instance("dtype", self.dtype, torch.dtype)


Epilogue = Store | StoreQuant | Gated | GatedQuant | Push
STORE = Store()


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """Tiles and threads of the Triton kernel. No field changes the results.

    Attributes:
        block_m: Rows of a tile: 16, 32, 64 or 128.
        block_n: Rows of the weights per tile: 128 or 256; with gating 256, half gate and half up.
        block_k: Columns of k per pipeline stage: 64 or 128; 128 for FP8.
        swap: Swap A and B, so that the weights are the first operand and few rows waste no work.
            Needs at most 64 rows.
        stages: Number of pipeline stages.
        warps: Warps per CTA: 4, 8 or 16.
        ctas_per_sm: CTAs per SM of the persistent grid.
        flatten: Start loading the next tile before the current one is stored.

    Raises:
        InvalidArgument: a number is out of range.
    """

    block_m: int
    block_n: int = BLOCK_N
    block_k: int = 128
    swap: bool = False
    stages: int = 4
    warps: int = 4
    ctas_per_sm: int = 1
    flatten: bool = True

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        choices: dict[str, Collection[object]] = {
            "block_m": (16, 32, 64, 128),
            "block_n": (BLOCK_N, 2 * BLOCK_N),
            "block_k": (64, 128),
            "warps": (4, 8, 16),
        }
        for name, allowed in choices.items():
            set_fields(self, **{name: check_choice(name, getattr(self, name), allowed)})
        for name, high in (("stages", 16), ("ctas_per_sm", 8)):
            set_fields(self, **{name: check_int(name, getattr(self, name), 1, high)})
        check_bools(swap=self.swap, flatten=self.flatten)
        if self.block_m < 64 and not self.swap:
            raise InvalidArgument(f"block_m is {self.block_m}: tiles below 64 rows need swap=True")

    def n_blocks(self, n: int, gated: bool = False) -> int:
        """Return the number of tiles over n weight rows."""
        step = BLOCK_N if gated else self.block_n
        return -(-(n // 2 if gated else n) // step)

    def max_m_blocks(self, rows: int, experts: int) -> int:
        """Return the largest number of row blocks for `rows` rows of `experts` experts."""
        return rows // self.block_m + min(rows, experts)


@dataclass(frozen=True, slots=True)
class WgmmaPlan:
    """Tiles of the CUDA kernel for Hopper. The plan does not change the results.

    The kernel reads the weights of an expert once per tile. An expert with at most block_m rows is
    one tile, padded to a multiple of 16; above 160 rows, to a multiple of 32. In FP8, tiles of more
    than 128 rows are padded to 256 if block_m is 256, and an expert with more rows than block_m is
    split into tiles of block_m rows (128 if block_m is 160) and one with the rest. In other dtypes
    it is split into tiles of equal height.

    Attributes:
        block_m: Maximum rows of a tile: 32, 64, 96, 128, 160 or 256; also 192 for bfloat16 and
            float16; at most 160 for MXFP4 weights.

    Raises:
        InvalidArgument: a number is out of range.
    """

    block_m: int

    def __post_init__(self) -> None:
        """Check and normalise the field."""
        set_fields(self, block_m=check_choice("block_m", self.block_m, BLOCK_MS))

    def ctas_per_sm(self, operand: str = "fp8") -> int:
        """Return the number of CTAs that fit on an SM.

        Args:
            operand: "fp8", "bf16", "fp16" or "mxfp4".
        """
        if operand != "mxfp4":
            return 1
        return next((n for m, n in MXFP4_CTAS.items() if self.block_m <= m), 1)

    def has_wide_n(self, experts: int, operand: str = "fp8") -> bool:
        """Return whether tiles of up to 128 rows have 512 weight rows instead of 256."""
        if operand != "fp8":
            return False
        return self.block_m == SPLIT_M or (self.block_m == NORMAL_M and experts > 1)

    def stages(self, experts: int, operand: str = "fp8") -> int:
        """Return the number of pipeline stages that fit next to the epilogue's buffers.

        Args:
            operand: "fp8", "bf16", "fp16" or "mxfp4".
        """
        m = NORMAL_M if operand == "fp8" and self.block_m == SPLIT_M else self.block_m
        reserved = 10 * 1024 + 512 + 16 * experts + 28 * m  # GemmShared
        scales = 8 * m if operand in ("fp8", "mxfp4") else 0
        weights, max_stages = 128 * BLOCK_N, MAX_STAGES
        if self.has_wide_n(experts, operand):
            weights *= 2
        if operand == "mxfp4":
            weights, max_stages = UNIT_PAIR_BYTES, MXFP4_MAX_STAGES
        shared = SHARED_BYTES[self.ctas_per_sm(operand) - 1]
        return min(max_stages, (shared - reserved) // (weights + 128 * m + scales + 32))

    def max_m_blocks(self, rows: int, experts: int) -> int:
        """Return the largest number of row blocks for `rows` rows of `experts` experts."""
        return rows // min(self.block_m, NORMAL_M) + min(rows, experts)


def can_fuse(plan: WgmmaPlan, experts: int, ks: Iterable[int]) -> bool:
    """Return whether one kernel can compute two GEMMs of FP8 experts by a plan.

    Args:
        plan: Plan of both GEMMs.
        experts: Number of experts.
        ks: k of the GEMMs.
    """
    ring = plan.stages(experts) * BLOCK_K
    whole_rings = all(k % ring == 0 for k in ks)
    return plan.has_wide_n(experts) and experts <= MAX_FUSED_EXPERTS and whole_rings


def plan(
    experts: int,
    rows_per_expert: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> GemmPlan:
    """Return the Triton plan for a mean of `rows_per_expert` rows.

    Every plan works for any number of rows.

    Args:
        experts: Number of experts.
        rows_per_expert: Mean number of rows of an expert.
        n: Rows of the weights `[experts, n, k]`.
        k: Columns of the weights.
        dtype: Dtype of a and b.
        gated: Whether the epilogue gates.

    Raises:
        InvalidArgument: a size or the dtype is not supported.
    """
    check_choice("dtype", dtype, DTYPES)
    _, rows, n, k = _check_sizes(experts, rows_per_expert, n, k)
    check_bools(gated=gated)
    block_k = 128 if dtype == FP8 else 64
    few_k_blocks = k <= 32 * block_k  # tiles are short, so overlapping their epilogues pays off
    tile = _select_gated_tile(rows) if gated else _select_tile(rows, few_k_blocks)
    if not gated and n % tile.block_n:  # half of the last tile would be beyond n
        tile = replace(tile, block_n=BLOCK_N, stages=6)
    return replace(tile, block_k=block_k)


def fastest_plan(
    experts: int,
    rows_per_expert: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    biased: bool = False,
    out: torch.dtype = torch.bfloat16,
    flag_in_data: bool = False,
    device: torch.device | None = None,
) -> GemmPlan | WgmmaPlan:
    """Return the fastest plan for a mean of `rows_per_expert` rows.

    On Hopper this is a WgmmaPlan if the kernel supports the call; for a single expert only in FP8
    or with flag_in_data. Otherwise it is the plan of `weft.gemm.plan`. With a single expert, tiles
    have few enough rows to fill the GPU. Both kernels compute bitwise equal results.

    Args:
        experts: Number of experts.
        rows_per_expert: Mean number of rows of an expert.
        n: Rows of the weights `[experts, n, k]`.
        k: Columns of the weights.
        dtype: Dtype of the weights; uint8 for MXFP4, which only WgmmaPlans support.
        gated: Whether the epilogue gates.
        biased: Whether a bias is added.
        out: Dtype of the result. With gated, it has no effect for FP8 and MXFP4.
        flag_in_data: As in Push.
        device: Device of the call. Default: a CPU.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    check_choice("dtype", dtype, WEIGHT_DTYPES)
    check_bools(gated=gated, biased=biased, flag_in_data=flag_in_data)
    check_instance("out", out, torch.dtype)
    if device is not None:
        check_instance("device", device, torch.device)
    experts, rows, n, k = _check_sizes(experts, rows_per_expert, n, k)
    if dtype == MXFP4:
        _check_mxfp4(device)
    else:
        supported = not wgmma_unsupported_reason(
            experts, n, dtype, gated=gated, biased=biased, out=out
        )
        measured = dtype == FP8 or experts > 1  # a single expert was measured only in FP8
        if not is_hopper(device) or not supported or not (measured or flag_in_data):
            mean = -(-rows // ONE_EXPERT_M_BLOCKS) if experts == 1 else rows
            return plan(experts, mean, n, k, dtype, gated=gated)
    if experts == 1:
        return WgmmaPlan(_select_one_expert_block_m(rows, -(-n // CLUSTER_N)))
    # Nearly all experts have fewer rows than this (three deviations above the mean).
    max_rows = rows + 3 * math.sqrt(rows)
    max_mean = {}
    if dtype == FP8:
        max_mean = FP8_WIDE_MAX_MEAN if _wide_tiles_fill_rounds(experts, n) else FP8_MAX_MEAN
    heights = {FP8: FP8_BLOCK_MS, MXFP4: MXFP4_BLOCK_MS}.get(dtype, BLOCK_MS)
    for block_m in heights:
        if rows <= max_mean[block_m] if block_m in max_mean else max_rows <= block_m:
            return WgmmaPlan(block_m)
    return WgmmaPlan(heights[-1])


def _check_sizes(experts: int, rows: int, n: int, k: int) -> tuple[int, int, int, int]:
    return (
        check_int("experts", experts, 0, MAX_SIZE),
        check_int("rows_per_expert", rows, 0, MAX_SIZE),
        check_int("n", n, 1, MAX_SIZE),
        check_int("k", k, 1, MAX_SIZE),
    )


def _check_mxfp4(device: torch.device | None) -> None:
    """Raise InvalidArgument if the GPU has no kernel for MXFP4 weights."""
    if device is not None and device.type == "cuda" and not is_hopper(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise InvalidArgument(
            f"MXFP4 weights need compute capability 9.0, but {device} has {major}.{minor}: use FP8 "
            "weights"
        )


def wgmma_unsupported_reason(
    experts: int, n: int, dtype: torch.dtype, *, gated: bool, biased: bool, out: torch.dtype
) -> str:
    """Return why the Hopper kernel does not support the call, or an empty string."""
    if dtype == FP8 and n % CLUSTER_N:
        return f"needs n to be a multiple of {CLUSTER_N} for FP8; it is {n}"
    if experts > MAX_EXPERTS:
        return f"supports at most {MAX_EXPERTS} experts; b has {experts}"
    if dtype == FP8 and biased:
        return "does not support a bias for FP8"
    quantised = dtype in (FP8, MXFP4) and (gated or out == FP8)
    if out not in DTYPES_16BIT and not quantised:
        return f"stores bfloat16 or float16; out is {out}"
    return ""


@functools.cache
def is_hopper(device: torch.device | None) -> bool:
    """Whether the device is a Hopper GPU, which WgmmaPlan needs."""
    if device is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _wide_tiles_fill_rounds(experts: int, n: int) -> bool:
    """Whether clusters are as busy with tiles of 512 weight rows as with twice as many of 256.

    Rounds of tiles that are not full cost more than wide tiles gain. (16 experts of 3072 x 4096,
    1.5 rounds of 96 tiles: 13 % more time at 32 rows. One H200, 2026-11-28.)
    """
    tiles = experts * -(-n // (2 * CLUSTER_N))
    narrow_tiles = experts * -(-n // CLUSTER_N)
    return 2 * -(-tiles // CLUSTERS) <= 1.1 * -(-narrow_tiles // CLUSTERS)


def _select_one_expert_block_m(rows: int, n_blocks: int) -> int:
    """Return the largest block_m with enough tiles to fill the GPU, or the smallest block_m."""
    return next(
        (m for m in ONE_EXPERT_BLOCK_MS if -(-rows // m) * n_blocks >= FULL_CLUSTERS),
        ONE_EXPERT_BLOCK_MS[-1],
    )


# Close to the fastest for FP8 and 32 experts of DeepSeek-V3 with random numbers of rows around the
# mean (six samples per plan, one H200, 2026-11-21). A tile has more rows than the mean, so that
# most experts are one M-block. The resulting 16 x 32 tiles nearly fill a whole number of waves, and
# a few second M-blocks would add a wave: at a mean of 32, a layer took 282 us with tiles of 32
# rows, and 247 us with these. BF16 uses the same tile sizes in bytes and was not measured.
def _select_tile(rows: int, few_k_blocks: bool) -> GemmPlan:
    if rows <= 8:
        return GemmPlan(16, swap=True, stages=3, ctas_per_sm=3, flatten=False)
    if rows <= 20:
        return GemmPlan(32, swap=True, stages=5, ctas_per_sm=2, flatten=few_k_blocks)
    if rows <= 80:
        return GemmPlan(64, stages=4, ctas_per_sm=2, flatten=few_k_blocks)
    if rows <= 192:
        return GemmPlan(64, stages=3, ctas_per_sm=3, flatten=False)
    return GemmPlan(128, 2 * BLOCK_N, stages=4, warps=8, flatten=False)


def _select_gated_tile(rows: int) -> GemmPlan:
    if rows <= 8:
        return GemmPlan(16, 2 * BLOCK_N, swap=True, stages=5)
    if rows <= 20:
        return GemmPlan(32, 2 * BLOCK_N, swap=True, stages=3, ctas_per_sm=2, flatten=False)
    if rows <= 72:
        return GemmPlan(64, 2 * BLOCK_N, stages=5, flatten=False)
    return GemmPlan(128, 2 * BLOCK_N, stages=4, warps=8, flatten=False)
