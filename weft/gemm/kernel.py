"""The grouped product on a GPU: one persistent Triton kernel, a table of contents.

A CTA takes every so-manieth tile: a block of one expert's rows times one block of rows of its
weights, or two (PAIR): neighbours, or a gate and its up. The loop over tiles and the loop over k
are one to the compiler (`flatten`), so loads of the next tile run while this one is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from weft.gemm.finish import finish
from weft.gemm.tiles import block_ends, locate


@triton.jit
def dot(x, w, acc, SWAP: tl.constexpr):
    """`acc + x @ w.T`, swapped: transposed."""
    if SWAP:
        return tl.dot(w, x.T, acc)
    else:
        return tl.dot(x, w.T, acc)


@triton.jit
def scaled(part, scale, acc, SWAP: tl.constexpr):
    """`acc + part * scale`, rounded once; the scale is a row's, so a column's where swapped."""
    scale = scale[None, :] if SWAP else scale[:, None]
    return tl.fma(part, tl.broadcast_to(scale, part.shape), acc)


@triton.jit
def grouped_kernel(
    a, b, a_scale, b_scale, bias, out, out_scale, home, counts, starts,
    most, rows, scale_row, scale_step,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr, PAIR: tl.constexpr, SWAP: tl.constexpr, FLATTEN: tl.constexpr,
    EPILOGUE: tl.constexpr, OUT: tl.constexpr,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """`out[row] = epilogue(a[row] @ b[expert of row].T)`; see call.py for what each pointer is."""
    GATED: tl.constexpr = EPILOGUE == "gated" or EPILOGUE == "quant"
    STEP: tl.constexpr = COLUMNS if GATED or not PAIR else 2 * COLUMNS  # from tile to tile
    OTHER: tl.constexpr = N // 2 if GATED else COLUMNS  # from one block of a pair to the other
    WIDTH: tl.constexpr = N // 2 if GATED else N  # columns of the result
    BLOCKS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    if PROGRAMMATIC:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    ends = block_ends(counts, most, EXPERTS, PADDED, ROWS)
    tiles = tl.max(ends) * BLOCKS
    here = tl.arange(0, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        expert, column, row, live = locate(tile, ends, counts, starts, most, rows, BLOCKS, ROWS)
        column *= STEP
        first = expert * N + column
        row_scale = a_scale
        block_scale = b_scale
        if SCALED:
            row_scale += (row + here).to(tl.int64) * scale_row
            block_scale += (first // 128) * (K // 128)
        zeros = tl.zeros((COLUMNS, ROWS) if SWAP else (ROWS, COLUMNS), dtype=tl.float32)
        acc, other = zeros, zeros
        for k in tl.range(0, (K + DEPTH - 1) // DEPTH, num_stages=STAGES):
            x = a.load([row, k * DEPTH])
            w = b.load([first, k * DEPTH])
            if SCALED:
                s = tl.load(row_scale + k * scale_step, mask=here < live, other=0.0)
                t = tl.load(block_scale + k)
                acc = scaled(dot(x, w, zeros, SWAP), s * t, acc, SWAP)
            else:
                acc = dot(x, w, acc, SWAP)
            if PAIR:
                v = b.load([first + OTHER, k * DEPTH])
                if SCALED:
                    t = tl.load(block_scale + OTHER // 128 * (K // 128) + k)
                    other = scaled(dot(x, v, zeros, SWAP), s * t, other, SWAP)
                else:
                    other = dot(x, v, other, SWAP)
        finish(
            acc, other, expert, column, row, live, bias, out, out_scale, home,
            N, WIDTH % STEP != 0, ROWS, COLUMNS, PAIR, SWAP, EPILOGUE, OUT, ALPHA, OFFSET, LIMIT,
        )  # fmt: skip
