# SPDX-License-Identifier: Apache-2.0
"""Clock offsets from causality: known skews are recovered within the promised error."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InvalidArgument
from weft.runtime.skew import estimate_skew
from weft.runtime.timeline import Span


def rounds_of(
    skews: list[int], *, seed: int = 0, rounds: int = 32, least: int = 800, tick: int = 1
) -> list[list[Span]]:
    """Return spans of ranks whose clocks show true time plus `skews`, in steps of `tick` ns.

    Flags take `least` ns, and sometimes much more.
    """
    chance = random.Random(seed)
    ranks: list[list[Span]] = [[] for _ in skews]
    now = 10_000_000_000

    def shown(rank: int, true: int) -> int:
        return (true + skews[rank]) // tick * tick

    for epoch in range(1, rounds + 1):
        for phase in ("dispatch", "combine"):
            sent = [now + chance.randrange(4000) for _ in skews]
            published = [left + 300 for left in sent]
            for me in range(len(skews)):
                arrived = [
                    max(published[me], left + least + int(chance.expovariate(1 / 500)))
                    for left in sent
                ]
                ranks[me].append(
                    Span(
                        *(me, phase, epoch, 4),
                        start_ns=shown(me, now - 5000),
                        sent_ns=shown(me, sent[me]),
                        published_ns=shown(me, published[me]),
                        end_ns=shown(me, max(arrived) + 2000),
                        arrived_ns=tuple(shown(me, at) for at in arrived),
                    )
                )
            now += 30_000
    return ranks


@settings(deadline=None)
@given(
    skews=st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=5),
    seed=st.integers(0, 1 << 20),
    tick=st.sampled_from([1, 32, 1000]),
)
def test_known_skews_are_found_within_the_stated_uncertainty(skews, seed, tick):
    result = estimate_skew(rounds_of(skews, seed=seed, tick=tick))
    assert result.offsets_ns[0] == 0
    for p, offset in enumerate(result.offsets_ns):
        for q, other in enumerate(result.offsets_ns):
            error = (offset - other) - (skews[q] - skews[p])
            assert abs(error) <= result.uncertainty_ns, (p, q)


def test_no_flag_is_seen_before_it_was_sent():
    ranks = rounds_of([0, 10**9, -(10**6), 5])
    offsets = estimate_skew(ranks).offsets_ns
    sent = {(s.rank, s.phase, s.epoch): s.sent_ns for spans in ranks for s in spans}
    for q, spans in enumerate(ranks):
        for span in spans:
            for p, seen in enumerate(span.arrived_ns):
                left = sent[p, span.phase, span.epoch] + offsets[p]
                assert left <= seen + offsets[q] + 1


def test_clocks_that_no_skew_explains_are_refused():
    ranks = rounds_of([0, 0])
    late = [
        replace(s, sent_ns=s.sent_ns + 9000, arrived_ns=tuple(t + 9000 for t in s.arrived_ns))
        for s in ranks[1][32:]
    ]
    apart, none = "clocks of ranks 0 and 1 drifted apart by", "no finished round in common"
    for first, second, text in (
        (ranks[0], [*ranks[1][:32], *late], apart),
        (ranks[0][:10], ranks[1][10:], f"ranks 0 and 1 have {none}"),
        (ranks[0], [replace(span, end_ns=0) for span in ranks[1]], none),
    ):
        with pytest.raises(InvalidArgument, match=text):
            estimate_skew([first, second])
