"""The rounds that compute-sanitizer watches are right on CPU ranks, where nobody watches."""

from __future__ import annotations

from tests.gpu.sanitized import WAYS, rows_come_home


def test_rows_come_home_in_every_way(ranks):
    assert ranks(2, "threads")(rows_come_home) == [len(WAYS)] * 2
