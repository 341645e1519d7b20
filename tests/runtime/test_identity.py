# SPDX-License-Identifier: Apache-2.0
"""Ranks with different calls all detect it in that call, and none returns a wrong result."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch

import weft
from tests.ranks import on_ranks
from tests.runtime.calls import HIDDEN, SIZES, TOKENS, call, open_kind
from weft.errors import GeometryMismatch, GroupError, InvalidArgument
from weft.runtime import library
from weft.runtime.identity import FLAG_MASK, MAX_ROUNDS, make_allreduce_record, make_dispatch_record

LIMITS: dict[str, Any] = {"timeout": 20.0, "first_timeout": 60.0}
RANKS, IDS = 3, torch.tensor([[0, 3], [2, 5]])
OPERATORS = ("AllToAll", "LowLatencyAllToAll", "AllReduce")
Call = tuple[int, int]  # the lease that calls, and its argument


def draw_program(chance: random.Random, kind: str) -> list[Call]:
    """Draw eight calls, with no two neighbours equal."""
    same = kind in ("LowLatencyAllToAll", "operators")  # the former takes no argument
    program: list[Call] = []
    while len(program) < 8:
        call = chance.randrange(3), 2 if same else chance.randrange(2, 13)
        if kind == "AllToAll":
            call = call[0], min(call[1], TOKENS)
        if not program or call != program[-1]:
            program.append(call)
    return program


def disturb(chance: random.Random, program: list[Call], how: str) -> tuple[int, list[Call]]:
    """Return the first differing call, and the program of the rank that is out of step."""
    at, other = chance.randrange(1, 6), list(program)
    if how == "skip":
        del other[at]
    elif how == "swap":
        other[at : at + 2] = other[at + 1 : at - 1 : -1]
    elif how == "repeat":
        other.insert(at, other[at - 1])
    else:
        lease, argument = other[at]
        other[at] = lease, argument - 1 if argument > 2 else argument + 1
    return at, other


def run_program(
    group: weft.Group, kind: str, program: list[Call], other: list[Call] | None, odd: int
) -> tuple[list[torch.Tensor], str, str]:
    """Return a program's results until it raises, and the error's type and text.

    It calls three leases of one workspace, or three operators, each with its own memory.
    """
    results: list[torch.Tensor] = []
    x = torch.full((2, HIDDEN), 1.0 + group.rank, device=group.device).bfloat16()
    with contextlib.suppress(GroupError), contextlib.ExitStack() as stack:
        if kind == "operators":
            limits: dict[str, Any] = {"timeout": 2.0, "first_timeout": 4.0}
            opened = [open_kind(group, name, **limits) for name in OPERATORS]
        else:
            opened = [open_kind(group, kind, lease=True, seed=10 * i, **LIMITS) for i in range(3)]
        ops = [stack.enter_context(each) for each in opened]
        try:
            for at, n in other if other is not None and group.rank == odd else program:
                out = call(ops[at], x, IDS.to(x.device), factor=at + 1, rows=n, eps=n * 1e-6)
                results.append(out.to("cpu", copy=True))
                ops[at].check()
        except GroupError as error:
            return results, type(error).__name__, str(error)
    return results, "", ""


@pytest.mark.parametrize("device", ["threads", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["skip", "swap", "repeat", "change"])
@pytest.mark.parametrize("kind", [*OPERATORS, "MoE, throughput", "MoE, low_latency", "operators"])
def test_a_rank_out_of_step_is_detected_by_all_in_that_call(ranks, kind, how, device):
    if kind in ("LowLatencyAllToAll", "operators") and how == "change":
        pytest.skip("no argument that ranks must agree on")
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    program, odd = draw_program(chance, kind), chance.randrange(RANKS)
    at, other = disturb(chance, program, how)
    right = ranks(RANKS, device)(run_program, kind, program, None, odd)
    assert [(len(results), error) for results, error, _ in right] == [(8, "")] * RANKS
    result = ranks(RANKS, device)(run_program, kind, program, other, odd)
    for (results, error, text), (expected, _, _) in zip(result, right, strict=True):
        assert error == GeometryMismatch.__name__, (error, text)
        assert len(results) == at, text
        assert "called with" in text or (kind == "operators" and f"rank {odd}" in text)
        assert all(map(torch.equal, results, expected[:at]))


@on_ranks(2, "threads")
def test_an_error_names_both_values(group: weft.Group) -> None:
    with open_kind(group, "AllReduce", **LIMITS) as op:
        values = (1e-5, 1e-6)
        theirs, own = values[1 - group.rank], values[group.rank]
        text = f"rank {1 - group.rank} called with .*eps {theirs}.*eps {own}"
        with pytest.raises(GeometryMismatch, match=text):
            call(op, torch.ones(2, HIDDEN).bfloat16(), IDS, eps=own)


@on_ranks(2, "threads")
def test_rows_have_a_bound(group: weft.Group) -> None:
    x = torch.ones(2, HIDDEN).bfloat16()
    with open_kind(group, "MoE", **LIMITS) as layer:
        with pytest.raises(InvalidArgument, match=rf"rows is .*\.{TOKENS * MAX_ROUNDS}"):
            call(layer, x, IDS, rows=TOKENS * MAX_ROUNDS + 1)
        assert torch.isfinite(call(layer, x, IDS, rows=2)).all()


@on_ranks(1, "threads")
def test_a_compiled_graph_of_other_sizes_is_another_graph(group: weft.Group) -> None:
    """Graphs stay on disk: another process may have other sizes under the same serial number."""
    owners = [weft.AllToAll(group, **(SIZES | {"max_tokens": most})) for most in (6, 6, 7)]
    names = [owner.library_handle >> library.SERIAL_BITS for owner in owners]
    assert len({owner.library_handle for owner in owners}) == 3
    for owner in owners:
        owner.close()
    assert names[0] == names[1] != names[2]


def test_hashes_of_calls_differ():
    """With 24 bits, the chance of a collision among 3,000 calls is one in four."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed).randrange
    calls = {(draw(1 << 24), draw(1 << 16), draw(1 << 20)) for _ in range(3000)}
    hashes = [make_dispatch_record(*each, 0).hash & FLAG_MASK for each in calls]
    assert len(set(hashes)) >= len(calls) - 4
    parts: dict[str, Any] = {"parts": (True, False, True), "coding": 0, "weight_bias": 0.0}
    words = {
        make_allreduce_record(7, 0, 5, "oneshot", eps=i * 1e-7, **parts).hash for i in range(3000)
    }
    assert len(words) == 3000
