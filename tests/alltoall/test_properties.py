# SPDX-License-Identifier: Apache-2.0
"""Routing, layout, placement, plans and capacity, by properties."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import weft
from tests.rounds import Round, play
from weft.alltoall import kernels
from weft.alltoall.kernels import build_cpu_program
from weft.errors import BadExpertId, CompileError, InvalidArgument, TokenOverflow
from weft.jit import compile_shared
from weft.placement import Placement
from weft.shape import Shape


def test_a_wrong_offset_does_not_compile():
    """So whatever compiles has the layout that Python computes."""
    program = build_cpu_program(Shape(1, 1, 1, 1, 8, "bf16", (16,)))
    for place, (expression, value) in enumerate(program.offsets):
        wrong = [*program.offsets]
        wrong[place] = expression, value + 1
        with pytest.raises(CompileError, match="static assertion failed") as error:
            compile_shared(replace(program, offsets=wrong).source, name="layout")
        assert str(value + 1) in str(error.value)


@given(experts=st.integers(1, 400), ranks=st.integers(1, 32))
def test_blocks_cover_every_expert_once_and_evenly(experts, ranks):
    placement = Placement.blocks(experts, ranks)
    owned = [placement.experts_of(r) for r in range(ranks)]
    assert [e for block in owned for e in block] == list(range(experts))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    for rank, block in enumerate(owned):
        assert [placement.local[e] for e in block] == list(range(len(block)))
        assert all(placement.ranks[e] == rank for e in block)


@given(owners=st.lists(st.integers(0, 7), min_size=1, max_size=64))
def test_a_map_counts_local_ids_in_global_order(owners):
    placement = Placement.mapped(owners, len(owners), 8)
    table = placement.table(torch.device("cpu")).tolist()
    for expert, owner in enumerate(owners):
        assert table[expert] >> 16 == owner
        assert placement.experts_of(owner)[table[expert] & 0xFFFF] == expert


@pytest.mark.parametrize("plan", [kernels.plan_dispatch, kernels.plan_combine])
@given(tokens=st.integers(0, 5000), vectors=st.integers(1, 4000), sms=st.integers(1, 160))
def test_a_plan_covers_every_row_and_stays_resident(plan, tokens, vectors, sms):
    p = plan(tokens, vectors, sms=sms, get_ctas_per_sm=lambda threads: 1024 // threads)
    assert p.threads % 32 == 0
    assert 64 <= p.threads <= 512
    assert p.chunks * p.threads >= vectors  # none of these rows is beyond a grid
    assert 1 <= p.workers <= max(tokens, 1)
    if p.workers > 1:
        assert p.workers * p.chunks <= sms * (1024 // p.threads)


@given(
    tokens=st.integers(0, 5000),
    slots=st.integers(1, 40000),
    blocks=st.integers(1, 200),
    sms=st.integers(1, 160),
    fit=st.integers(1, 8),
    uses_all_sms=st.booleans(),
)
def test_a_plan_of_fp8_has_room_for_all(tokens, slots, blocks, sms, fit, uses_all_sms):
    hidden = 128 * blocks
    strips = -(-hidden // kernels.STRIP_COLUMNS)
    fits = {"sms": sms, "get_ctas_per_sm": lambda _: fit}
    p = kernels.plan_combine_fp8(tokens, slots, hidden, **fits, uses_all_sms=uses_all_sms)
    receivers = p.workers - 1 - p.pushers
    assert p.pushers >= 1
    assert receivers >= 1 or tokens == 0
    assert p.workers <= max(3, sms * fit)
    assert 1 <= p.strips <= min(kernels.MAX_STRIPS, strips)
    legs = -(-strips // p.strips)
    assert legs * p.strips - strips < p.strips  # none is empty
    # As much of a row at a time as leaves each warp some, and no more.
    assert p.strips == 1 or slots * strips >= p.pushers * (p.threads // 32) * p.strips
    only = kernels.plan_sums(tokens, hidden, **fits)
    assert only.pushers == 0
    assert 1 + (tokens > 0) <= only.workers <= 1 + sms * fit


def test_capacity_follows_the_larger_of_prefill_and_decode():
    for requests, prefill, options, expected in (
        (256, 2048, {}, 2048),
        (256, 0, {"data_parallel": 8}, 32),
        (250, 0, {"data_parallel": 8}, 32),
        (64, 0, {"speculative_tokens": 3}, 256),
        (8, 0, {"graph_batch_size": 160}, 160),
        (8, 4096, {"tensor_parallel": 4}, 1024),
    ):
        passed = {"max_running_requests": requests, "prefill_tokens": prefill, **options}
        assert weft.tokens_per_rank(**passed) == expected
    with pytest.raises(InvalidArgument, match="data_parallel is 0"):
        weft.tokens_per_rank(max_running_requests=8, prefill_tokens=1, data_parallel=0)


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
