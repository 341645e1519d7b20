# SPDX-License-Identifier: Apache-2.0
"""A rank that cannot compile stops all ranks."""

from __future__ import annotations

import pytest

import weft
from tests.kinds import CPU, on_ranks
from tests.rounds import Round
from weft.errors import CreationFailed

CASE = Round(tokens=(8, 3, 8))


@on_ranks(2, [CPU])
def test_a_rank_that_cannot_compile_stops_all(group):
    defines = ("weft=,",) if group.rank == 1 else ()
    with pytest.raises(CreationFailed, match="rank 1(.|\n)*CompileError") as caught:
        weft.AllToAll(group, **CASE.sizes(8), _defines=defines)
    assert len(set(group.all_gather(str(caught.value)))) == 1
