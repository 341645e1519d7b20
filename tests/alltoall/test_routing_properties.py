# SPDX-License-Identifier: Apache-2.0
"""Results of any routing equal the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import weft
from tests.rounds import Round, play
from weft.errors import BadExpertId, TokenOverflow

Ids = tuple[tuple[int, ...], ...]  # of one rank: [tokens][top_k]

# (ranks, experts, top_k, max_tokens, dtype, owners): every value beside every other at least once.
# Each is compiled once, and then every example is a matter of milliseconds.
SIZES: list[tuple[int, int, int, int, torch.dtype, list[int] | None]] = [
    (1, 1, 1, 1, torch.bfloat16, None),
    (1, 7, 6, 3, torch.float32, [0] * 7),
    (2, 2, 1, 5, torch.float16, [1, 1]),
    (2, 5, 3, 2, torch.bfloat16, None),
    (2, 9, 6, 4, torch.float32, [1, 0, 0, 1, 1, 0, 1, 1, 1]),
    (3, 4, 2, 3, torch.float16, [2, 2, 0, 2]),
    (3, 8, 4, 5, torch.bfloat16, None),
    (4, 3, 3, 1, torch.float32, [3, 0, 0]),
    (4, 9, 2, 5, torch.bfloat16, [0, 3, 3, 3, 1, 3, 0, 2, 3]),
    (5, 9, 5, 4, torch.float16, None),
    (5, 6, 6, 2, torch.bfloat16, [4, 4, 1, 1, 0, 4]),
]


@dataclass(frozen=True)
class Drawn(Round):
    """A round with drawn ids on every rank; `counts` limits the tokens on the device."""

    rows: tuple[Ids, ...] = ()
    counts: tuple[int | None, ...] = ()

    def _ids(self, rank: int, generator: torch.Generator) -> torch.Tensor:
        return torch.tensor(self.rows[rank], dtype=torch.int32).view(-1, self.top_k)

    def refusals(self, rank: int) -> tuple[type[Exception], ...]:
        """Return the errors of which `check` must raise one after the round."""
        rows, count = self.rows[rank], self.counts[rank]
        overflows = count is not None and not 0 <= count <= len(rows)
        used = rows if count is None else rows[: max(count, 0)]
        known = [[i for i in row if 0 <= i < self.experts] for row in used]
        bad = any(i < -1 or i >= self.experts for row in used for i in row)
        bad = bad or any(len(row) != len(set(row)) for row in known)
        return (TokenOverflow,) * overflows + (BadExpertId,) * bad


@st.composite
def drawn_rounds(draw: st.DrawFn) -> tuple[int, list[Drawn]]:
    """Draw max_tokens and one to three rounds."""
    ranks, experts, top_k, max_tokens, dtype, owners = draw(st.sampled_from(SIZES))
    # Mostly sound ids; -1 is no expert, the others name none and are dropped.
    any_id = st.sampled_from([*range(experts), *range(experts), -1, -2, experts, 2**31 - 1])
    row = st.tuples(*[any_id] * top_k)
    ids = st.lists(row, max_size=max_tokens).map(tuple)
    count = st.none() | st.integers(-1, max_tokens + 1)
    weighted, first = draw(st.booleans()), draw(st.integers(0, 99))
    rounds = []
    for turn in range(draw(st.integers(1, 3))):
        rows = draw(st.tuples(*[ids] * ranks))
        counts = draw(st.tuples(*[count] * ranks))
        options = {} if owners is None else {"expert_map": owners}
        tokens = tuple(map(len, rows))
        sizes = (tokens, top_k, experts, 8, dtype, "drawn", first + turn, weighted, True)
        rounds.append(Drawn(*sizes, options=options, rows=rows, counts=counts))
    return max_tokens, rounds


def follow(group: weft.Group, max_tokens: int, rounds: list[Drawn]) -> None:
    with rounds[0].open(group, max_tokens) as a2a:
        try:
            for case in rounds:
                play(a2a, case, poison=False, counts=case.counts)
                if wrong := case.refusals(group.rank):
                    with pytest.raises(wrong):
                        a2a.check()
                a2a.check()
        except BaseException:
            a2a.abort()  # the others need not wait for their deadline
            raise


# Each example launches its own ranks; examples are small, and not shrunk.
@settings(
    max_examples=50,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(drawn=drawn_rounds())
def test_any_routing_matches_the_reference(ranks, drawn):
    max_tokens, rounds = drawn
    ranks(len(rounds[0].tokens), "threads")(follow, max_tokens, rounds)
