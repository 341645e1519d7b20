# SPDX-License-Identifier: Apache-2.0
"""A late rank, or one with another call: the same bits, or a typed error."""

from __future__ import annotations

import pytest

import weft
from tests.faults import (
    AFTER_ROWS,
    BEFORE_MOMENTS,
    BEFORE_ROWS,
    FAULTS,
    JITTER,
    REDUCE_ENTER,
    plan_fault,
)
from tests.kinds import ANY, CPU
from tests.rounds import synchronize
from tests.sums import BACKENDS, Sum, play
from weft.errors import GeometryMismatch, GroupError

CASE = Sum(5, 128)


def make(group: weft.Group, epilogue_at: str = "owner") -> weft.AllReduce:
    return weft.AllReduce(
        group, max_tokens=8, hidden=CASE.hidden, epilogue_at=epilogue_at, _defines=FAULTS
    )


def one_call(ar: weft.AllReduce, tokens: int = 5, backend: str = "twoshot", **more: object) -> None:
    x = CASE.next(tokens=tokens).rows(ar.group.rank, ar.group.device)
    ar.fused(x, backend=backend, **more)  # type: ignore[arg-type]
    synchronize(ar.group.device)
    ar.check()


def disturbed(group: weft.Group, calls: int, longest_ns: int, epilogue_at: str) -> None:
    case = CASE.next(differ=epilogue_at == "receiver")
    with make(group, epilogue_at=epilogue_at) as ar:
        for point in (REDUCE_ENTER, AFTER_ROWS, BEFORE_ROWS, BEFORE_MOMENTS):
            if group.rank == point % group.size:
                plan_fault(ar, point, JITTER, argument=longest_ns)
            for seed in range(calls):
                play(ar, case.next(seed=seed, tokens=1 + seed % 8), BACKENDS[seed % 3])


@pytest.mark.parametrize("epilogue_at", ["owner", "receiver"])
@pytest.mark.parametrize("kind", [CPU, *ANY])
def test_delays_change_no_bit(ranks, kind, epilogue_at):
    ranks(3, kind)(disturbed, 18, 300_000, epilogue_at)


def differing(group: weft.Group, how: str) -> str:
    odd = group.rank == 1
    residual, weight = CASE.shared(group.device)
    with make(group) as ar:
        one_call(ar)
        try:
            match how:
                case "tokens":
                    one_call(ar, tokens=4 if odd else 5)
                case "many tokens":
                    one_call(ar, tokens=8 if odd else 5, backend="oneshot")
                case "backend":
                    one_call(ar, backend="oneshot" if odd else "twoshot")
                case "residual":
                    one_call(ar, residual=residual if odd else None, out=True)
                case "constants":
                    one_call(ar, weight=weight, eps=1e-5 if odd else 1e-6)
        except GeometryMismatch as error:
            return str(error)
        except GroupError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("how", ["tokens", "many tokens", "backend", "residual", "constants"])
def test_a_different_call_is_detected_and_both_are_named(ranks, kind, how):
    texts = ranks(2, kind)(differing, how)
    # A rank that comes late may first hear that its peer has noticed, and left.
    named = [text for text in texts if "; this rank with " in text]
    reported = [text for text in texts if "made another call" in text]
    assert named, texts
    assert len(named) + len(reported) == 2, texts
    for word in {
        "tokens": ("4 tokens", "5 tokens"),
        "many tokens": ("8 tokens", "5 tokens"),
        "backend": ("oneshot", "twoshot"),
        "residual": ("with out", "residual and out"),
    }.get(how, ("eps 1e-05", "eps 1e-06")):
        assert all(word in text for text in named)


def sum_one_token(group: weft.Group, backends: tuple[str, str, str]) -> str:
    """Sum one token, owned by rank 0: a rank that waits for the sum gets nothing from rank 2."""
    with make(group) as ar:
        one_call(ar)
        try:
            one_call(ar, tokens=1, backend=backends[group.rank])
        except GroupError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


@pytest.mark.parametrize("kind", [CPU, *ANY])
@pytest.mark.parametrize("backend", ["twoshot", "twoshot_bulk"])
def test_a_third_rank_names_both_calls_too(ranks, kind, backend):
    for rank, text in enumerate(ranks(3, kind)(sum_one_token, (backend, backend, "oneshot"))):
        assert text.startswith(f"GeometryMismatch: rank {rank}, all-reduce: rank "), text
        assert "1 tokens by oneshot" in text
        assert f"1 tokens by {backend}" in text


def different_sizes(group: weft.Group) -> str:
    try:
        weft.AllReduce(group, max_tokens=8 + group.rank, hidden=128)
    except GeometryMismatch as error:
        return str(error)
    return ""


def test_different_sizes_are_refused_at_creation(ranks):
    for text in ranks(2, "threads")(different_sizes):
        assert "all-reduce geometry differs" in text
        assert "tokens=8" in text
        assert "tokens=9" in text
