# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: the persistent grouped GEMM, and the quantisation of rows to FP8.

`weft_grouped_gemm` loops over tiles: `locate` finds a tile, the inner loop is the mainloop, and
`epilogue` stores the results. With `flatten` the compiler fuses the loops over tiles and over k, so
that loads of the next tile overlap the epilogue of the current one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def weft_grouped_gemm(
    a, b, a_scale, b_scale, bias, out, out_scale, dst_addr, counts, starts,
    max_rows, rows, row_scale_stride, k_scale_stride,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr, DUAL_N: tl.constexpr, SWAP: tl.constexpr, FLATTEN: tl.constexpr,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, OUT_DTYPE: tl.constexpr,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """Compute `out[row] = epilogue(a[row] @ b[expert].T + bias[expert])`; see `grouped_gemm`.

    A tile is a block of one expert's rows times one or (DUAL_N) two blocks of its weights: gate and
    up if GATED, else adjacent blocks. STEP: columns from one tile to the next. OTHER: weight rows
    from the first block to the second. WIDTH: columns of the result.
    """
    GATED: tl.constexpr = EPILOGUE == "gated" or EPILOGUE == "gated_quant"
    STEP: tl.constexpr = BLOCK_N if GATED or not DUAL_N else 2 * BLOCK_N
    OTHER: tl.constexpr = N // 2 if GATED else BLOCK_N
    WIDTH: tl.constexpr = N // 2 if GATED else N
    N_BLOCKS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    if PROGRAMMATIC:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    ends = m_block_ends(counts, max_rows, EXPERTS, PADDED, BLOCK_M)
    tiles = tl.max(ends) * N_BLOCKS
    m_offsets = tl.arange(0, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        expert, n_block, row, valid = locate(
            tile, ends, counts, starts, max_rows, rows, N_BLOCKS, BLOCK_M
        )
        column = n_block * STEP
        first = expert * N + column
        row_scale = a_scale
        block_scale = b_scale
        if SCALED:
            row_scale += (row + m_offsets).to(tl.int64) * row_scale_stride
            block_scale += (first // 128) * (K // 128)
        zeros = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc, other = zeros, zeros
        for k in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
            x = a.load([row, k * BLOCK_K])
            w = b.load([first, k * BLOCK_K])
            if SCALED:
                s = tl.load(row_scale + k * k_scale_stride, mask=m_offsets < valid, other=0.0)
                t = tl.load(block_scale + k)
                acc = promote(dot(x, w, zeros, SWAP), s * t, acc, SWAP)
            else:
                acc = dot(x, w, acc, SWAP)
            if DUAL_N:
                v = b.load([first + OTHER, k * BLOCK_K])
                if SCALED:
                    t = tl.load(block_scale + OTHER // 128 * (K // 128) + k)
                    other = promote(dot(x, v, zeros, SWAP), s * t, other, SWAP)
                else:
                    other = dot(x, v, other, SWAP)
        epilogue(
            acc, other, expert, column, row, valid, bias, out, out_scale, dst_addr,
            N, WIDTH % STEP != 0, BLOCK_M, BLOCK_N, DUAL_N, SWAP, EPILOGUE, ACTIVATION, OUT_DTYPE,
            ALPHA, OFFSET, LIMIT, BETA, LINEAR_BETA,
        )  # fmt: skip


@triton.jit
def m_block_ends(
    counts, max_rows, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return the inclusive prefix sum of the experts' M-blocks, int32 `[PADDED]`.

    Every CTA computes these sums and looks up its tiles in them, so no table of tiles is needed.
    Counts are clamped to 0..max_rows. PADDED is a power of two.
    """
    expert = tl.arange(0, PADDED)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    return tl.cumsum(tl.cdiv(tl.minimum(tl.maximum(count, 0), max_rows), BLOCK_M), 0)


@triton.jit
def locate(
    tile, ends, counts, starts, max_rows, rows, N_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return expert, N-block, first row and number of valid rows of a tile.

    Tiles are ordered by (expert, N-block, M-block), so M-blocks that share weights run together.
    """
    passed = ends * N_BLOCKS <= tile
    expert = tl.sum(passed.to(tl.int32))
    before = tl.max(tl.where(passed, ends, 0))
    count = tl.minimum(tl.load(counts + expert), max_rows)
    m_blocks = tl.cdiv(count, BLOCK_M)
    offset = tile - before * N_BLOCKS
    n_block = offset // m_blocks
    m_block = offset % m_blocks
    if starts is None:
        first = expert * max_rows
    else:
        first = tl.load(starts + expert)
    row = first + m_block * BLOCK_M
    valid = tl.minimum(count, rows - first) - m_block * BLOCK_M
    return expert, n_block, row, valid


@triton.jit
def dot(x, w, acc, SWAP: tl.constexpr):
    """Return `acc + x @ w.T`; with SWAP its transpose."""
    if SWAP:
        return tl.dot(w, x.T, acc)
    else:
        return tl.dot(x, w.T, acc)


@triton.jit
def promote(part, scale, acc, SWAP: tl.constexpr):
    """Return `acc + part * scale`, rounded once. Scales are per row, with SWAP per column."""
    scale = scale[None, :] if SWAP else scale[:, None]
    return tl.fma(part, tl.broadcast_to(scale, part.shape), acc)


@triton.jit
def epilogue(
    acc, other, expert, column, row, valid, bias, out, out_scale, dst_addr,
    N: tl.constexpr, RAGGED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DUAL_N: tl.constexpr, SWAP: tl.constexpr, EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr, OUT_DTYPE: tl.constexpr,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to the first `valid` rows of a tile and store them.

    If RAGGED, the last tile has columns beyond the result, which are not stored.
    """
    GATED: tl.constexpr = EPILOGUE == "gated" or EPILOGUE == "gated_quant"
    QUANT: tl.constexpr = EPILOGUE == "gated_quant" or EPILOGUE == "store_quant"
    WIDTH: tl.constexpr = N // 2 if GATED else N
    m_offsets = tl.arange(0, BLOCK_M)
    mask = m_offsets < valid
    rows = (row + m_offsets).to(tl.int64)
    acc = with_bias(acc, bias, expert * N + column, N - column, BLOCK_N, SWAP)
    if GATED:
        other = with_bias(other, bias, expert * N + WIDTH + column, WIDTH - column, BLOCK_N, SWAP)
        acc = gate(acc, other, ALPHA, OFFSET, LIMIT, BETA, LINEAR_BETA)
    else:
        acc = activate(acc, ACTIVATION)
    if QUANT:
        acc, scale = quantize(acc)
        tl.store(out_scale + rows * (WIDTH // 128) + column // 128, scale, mask=mask)
    if EPILOGUE == "push":
        address = tl.load(dst_addr + rows, mask=mask, other=0)
        mask = mask & (address != 0)
        row_ptrs = tl.multiple_of(address.to(tl.pointer_type(OUT_DTYPE)), 16)
    else:
        row_ptrs = tl.multiple_of(out + rows * WIDTH, 16)
    store(row_ptrs, mask, column, WIDTH, acc.to(OUT_DTYPE), RAGGED, BLOCK_N)
    if DUAL_N and not GATED:
        column += BLOCK_N
        other = with_bias(other, bias, expert * N + column, N - column, BLOCK_N, SWAP)
        other = activate(other, ACTIVATION)
        if QUANT:
            other, scale = quantize(other)
            tl.store(out_scale + rows * (WIDTH // 128) + column // 128, scale, mask=mask)
        store(row_ptrs, mask, column, WIDTH, other.to(OUT_DTYPE), RAGGED, BLOCK_N)


@triton.jit
def with_bias(acc, bias, first, left, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """Return the row-major sums plus the bias of `left` columns from `first` on."""
    if SWAP:
        acc = acc.T
    if bias is not None:
        n = tl.arange(0, BLOCK_N)
        acc += tl.load(bias + first + n, mask=n < left, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of `Store`; NaN is propagated."""
    if ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = x * x
    return x


@triton.jit
def gate(
    gate, up, ALPHA: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
):  # fmt: skip
    """Return the gating of `GatingParams`; NaN is propagated."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    sigmoid = tl.sigmoid(ALPHA * gate)
    if BETA is not None:
        gate = BETA * tanh(gate * (1.0 / BETA))
        up = LINEAR_BETA * tanh(up * (1.0 / LINEAR_BETA))
    return gate * sigmoid * (up + OFFSET)


@triton.jit
def tanh(x):
    """Return tanh(x) from exp(-2 |x|), near 0 from a series, as gemm/epilogue_gated.cuh does."""
    square = x * x
    t = tl.exp2(tl.abs(x) * -2.88539008)
    series = (((square * (-17.0 / 315.0) + 2.0 / 15.0) * square - 1.0 / 3.0) * square + 1.0) * x
    magnitude = (1.0 - t) / (1.0 + t)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -magnitude, magnitude))


@triton.jit
def store(
    row_ptrs, mask, column, WIDTH: tl.constexpr, values, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a block of columns of each row in vectors of 16 bytes."""
    columns = column + tl.arange(0, BLOCK_N)
    mask = mask[:, None]
    if RAGGED:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(row_ptrs[:, None] + columns[None, :], values, mask=mask)


@triton.jit
def quantize(x):
    """Return the scaled values of 128 columns before their rounding to e4m3, and the row scales.

    Bitwise equal to weft.reference.quantize (docs/user/quantisation.md).
    """
    amax = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)
    broken = amax == float("inf")
    small = amax < 6.018531076210112e-36  # 2^-117
    top = tl.full(amax.shape, 448.0, tl.float32)
    scale = tl.where(small, 0.0, tl.div_rn(amax, top))
    inverse = tl.where(small, 0.0, tl.div_rn(top, amax))
    scale = tl.where(broken, float("nan"), scale)
    return tl.where(broken[:, None], float("nan"), x * inverse[:, None]), scale


@triton.jit
def weft_quantize_rows(
    x, out, out_scale, rows,
    K: tl.constexpr, BLOCK_M: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """Quantise a block of BLOCK_M rows and 128 columns to FP8."""
    if PROGRAMMATIC:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = row < rows
    offsets = row.to(tl.int64)[:, None] * K + column[None, :]
    values = tl.load(x + offsets, mask=mask[:, None], other=0.0).to(tl.float32)
    values, scale = quantize(values)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask[:, None])
    tl.store(out_scale + row.to(tl.int64) * (K // 128) + tl.program_id(1), scale, mask=mask)
