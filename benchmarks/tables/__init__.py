"""Where the figures of every result table of the docs come from, row by row.

A table stands in a document behind `<!-- table: NAME -->`. Here is, for each of its rows, the label
in its first cell and what its other cells say: a series over the numbers of the header, a list of
one entry a cell, or None for a row of words. Each module has what one operator's pages and the
notebook say of it. `benchmarks/publish.py` writes the cells anew; tests/docs/test_tables.py
compares them.
"""

from __future__ import annotations

from benchmarks.tables import (
    allreduce,
    alltoall,
    gemm,
    layer,
    limits,
    lowlatency,
    other_libraries,
    sglang,
)
from benchmarks.tables.sources import Tables

TABLES: Tables = {
    name: rows
    for page in (limits, other_libraries, alltoall, allreduce, lowlatency, layer, gemm, sglang)
    for name, rows in page.TABLES.items()
}
