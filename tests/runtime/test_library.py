# SPDX-License-Identifier: Apache-2.0
"""Handles by which torch's compiled graphs name objects."""

from __future__ import annotations

from typing import Any

import weft
from tests.ranks import on_ranks
from weft.runtime import library

SIZES: dict[str, Any] = {"max_tokens": 6, "top_k": 4, "num_experts": 16, "hidden": 32}


@on_ranks(1, "threads")
def test_a_graph_of_other_sizes_is_another_graph(group: weft.Group) -> None:
    """Graphs stay on disk: another process may have other sizes under the same serial number."""
    owners = [weft.AllToAll(group, **(SIZES | {"max_tokens": most})) for most in (6, 6, 7)]
    names = [owner.library_handle >> library.SERIAL_BITS for owner in owners]
    assert len({owner.library_handle for owner in owners}) == 3
    for owner in owners:
        owner.close()
    assert names[0] == names[1] != names[2]
