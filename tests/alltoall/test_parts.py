# SPDX-License-Identifier: Apache-2.0
"""Layout, placement, plan and capacity, by properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.alltoall.kernels import (
    MAX_STRIPS,
    STRIP_COLUMNS,
    build_cpu_program,
    plan_combine,
    plan_combine_fp8,
    plan_dispatch,
    plan_sums,
)
from weft.errors import CompileError, InvalidArgument
from weft.jit import compile_shared
from weft.placement import Placement
from weft.shape import Shape


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 1, 1, 8, "bf16", (16,)),
        Shape(4, 33, 6, 18, 264, "fp16", (528, 20, 7)),
        Shape(8, 5, 32, 61, 4, "fp32", (1, 2, 3, 4, 5, 6, 7, 8), mapped=True),
        Shape(32, 3, 9, 32, 16, "bf16", (32,)),
        Shape(32, 32, 9, 32, 16, "bf16", (32,), stats=7),
        Shape(3, 5, 2, 9, 256, "bf16", (512, 4), combine="push_fp8", stats=64),
        Shape(2, 5, 2, 9, 256, "bf16", (512,), combine="push", stats=1),
        Shape(2, 32, 2, 9, 256, "bf16", (512,), combine="gemm_push"),
        Shape(3, 33, 9, 18, 264, "fp16", (528, 20, 7), combine="gemm_push", stats=3),
    ],
)
def test_python_and_cpp_agree_on_the_layout(shape):
    assert compile_shared(build_cpu_program(shape).source, name="layout")


def test_a_wrong_offset_does_not_compile():
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


@pytest.mark.parametrize("plan", [plan_dispatch, plan_combine])
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
    strips = -(-hidden // STRIP_COLUMNS)
    fits = {"sms": sms, "get_ctas_per_sm": lambda _: fit}
    p = plan_combine_fp8(tokens, slots, hidden, **fits, uses_all_sms=uses_all_sms)
    receivers = p.workers - 1 - p.pushers
    assert p.pushers >= 1
    assert receivers >= 1 or tokens == 0
    assert p.workers <= max(3, sms * fit)
    assert 1 <= p.strips <= min(MAX_STRIPS, strips)
    legs = -(-strips // p.strips)
    assert legs * p.strips - strips < p.strips  # none is empty
    # As much of a row at a time as leaves each warp some, and no more.
    assert p.strips == 1 or slots * strips >= p.pushers * (p.threads // 32) * p.strips
    only = plan_sums(tokens, hidden, **fits)
    assert only.pushers == 0
    assert 1 + (tokens > 0) <= only.workers <= 1 + sms * fit


def test_capacity_follows_the_larger_of_prefill_and_decode():
    size = weft.tokens_per_rank
    assert size(max_running_requests=256, prefill_tokens=2048) == 2048
    assert size(max_running_requests=256, prefill_tokens=0, data_parallel=8) == 32
    assert size(max_running_requests=250, prefill_tokens=0, data_parallel=8) == 32
    assert size(max_running_requests=64, prefill_tokens=0, speculative_tokens=3) == 256
    assert size(max_running_requests=8, prefill_tokens=0, graph_batch_size=160) == 160
    assert size(max_running_requests=8, prefill_tokens=4096, tensor_parallel=4) == 1024
    with pytest.raises(InvalidArgument, match="data_parallel is 0"):
        size(max_running_requests=8, prefill_tokens=1, data_parallel=0)
