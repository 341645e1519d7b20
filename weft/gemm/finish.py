"""What becomes of a tile's sums: stored, gated, quantised, or pushed to each row's home."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.gemm.scaling import quantize


@triton.jit
def finish(
    acc, other, expert, column, row, live, bias, out, out_scale, home,
    N: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PAIR: tl.constexpr, SWAP: tl.constexpr, EPILOGUE: tl.constexpr, OUT: tl.constexpr,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Write a tile. Rows from `live` on belong to nobody and are not written; nor are columns
    beyond the result's, which only the last tile has, and only where RAGGED."""
    GATED: tl.constexpr = EPILOGUE == "gated" or EPILOGUE == "quant"
    WIDTH: tl.constexpr = N // 2 if GATED else N  # columns of a row of the result
    here = tl.arange(0, ROWS)
    alive = here < live
    at = (row + here).to(tl.int64)
    acc = widened(acc, bias, expert * N + column, N - column, COLUMNS, SWAP)
    if GATED:
        other = widened(other, bias, expert * N + WIDTH + column, WIDTH - column, COLUMNS, SWAP)
        acc = gate(acc, other, ALPHA, OFFSET, LIMIT)
    if EPILOGUE == "quant":
        acc, scale = quantize(acc)
        tl.store(out_scale + at * (WIDTH // 128) + column // 128, scale, mask=alive)
    if EPILOGUE == "push":
        address = tl.load(home + at, mask=alive, other=0)
        alive = alive & (address != 0)
        place = tl.multiple_of(address.to(tl.pointer_type(OUT)), 16)
    else:
        place = tl.multiple_of(out + at * WIDTH, 16)
    put(place, alive, column, WIDTH, acc.to(OUT), RAGGED, COLUMNS)
    if PAIR and not GATED:
        column += COLUMNS
        other = widened(other, bias, expert * N + column, N - column, COLUMNS, SWAP)
        put(place, alive, column, WIDTH, other.to(OUT), RAGGED, COLUMNS)


@triton.jit
def widened(acc, bias, first, left, COLUMNS: tl.constexpr, SWAP: tl.constexpr):
    """Sums as rows of the result, with the expert's bias if there is one."""
    if SWAP:
        acc = acc.T
    if bias is not None:
        at = tl.arange(0, COLUMNS)
        acc += tl.load(bias + first + at, mask=at < left, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def gate(gate, up, ALPHA: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr):
    """`gate * sigmoid(ALPHA * gate) * (up + OFFSET)`, held to LIMIT before; NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(ALPHA * gate) * (up + OFFSET)


@triton.jit
def put(
    place, alive, column, WIDTH: tl.constexpr, values,
    RAGGED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a block of columns at each row's place, 16 bytes at a time."""
    at = column + tl.arange(0, COLUMNS)
    mask = alive[:, None]
    if RAGGED:
        mask = mask & (at < WIDTH)[None, :]
    tl.store(place[:, None] + at[None, :], values, mask=mask)
