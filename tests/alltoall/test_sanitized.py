"""The rounds that compute-sanitizer watches are right on CPU ranks, where nobody watches."""

from __future__ import annotations

from tests.gpu.sanitized import WAYS, rows_return


def test_rows_return_in_every_way(ranks):
    assert ranks(2, "threads")(rows_return) == [len(WAYS)] * 2
