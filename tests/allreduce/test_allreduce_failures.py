# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments, late ranks, and ranks with another call: the same bits, or a typed error."""

from typing import Any

import pytest
import torch

import weft
from tests import faults
from tests.compat.calls import refused
from tests.ranks import ANY, CPU, on_ranks
from tests.rounds import synchronize
from tests.sums import BACKENDS, Sum, play
from weft.errors import GeometryMismatch, GroupError, InvalidArgument


@on_ranks(2, "threads")
def test_twoshot_does_not_continue_without_a_rank(group):
    sizes: dict[str, Any] = {"max_tokens": 8, "hidden": 256}
    with pytest.raises(InvalidArgument, match="'twoshot'.* with missing='drop'.*Omit backends"):
        weft.AllReduce(group, missing="drop", backends=("twoshot",), **sizes)
    with weft.AllReduce(group, missing="drop", **sizes) as ar:
        assert ar.backends == ("oneshot",)


@on_ranks(2, "threads")
def test_packed_scales_are_column_major(group):
    with weft.AllReduce(group, max_tokens=8, hidden=640, first_timeout=600.0) as ar:
        x = torch.zeros((4, 640), dtype=torch.bfloat16)
        weight, quant = torch.ones(640), weft.FP8Group(128, "ue8m0")
        for wrong in (torch.zeros((4, 2), dtype=torch.int32), torch.zeros((2, 4)).t()):
            call = lambda own=wrong: ar.fused(x, weight=weight, quant=quant, scale_out=own)  # noqa: E731
            refused(InvalidArgument, call, "with strides")
        right = torch.full((2, 8), -1, dtype=torch.int32)
        ar.fused(x + 1, weight=weight, quant=quant, scale_out=right.t()[:4])
        assert bool((right[:, :4] != -1).all())
        assert bool((right[:, 4:] == -1).all()), "padding is the caller's"


CASE = Sum(5, 128)


def make(group: weft.Group, epilogue_at: str = "owner") -> weft.AllReduce:
    options = {"epilogue_at": epilogue_at, "_defines": faults.FAULTS}
    return weft.AllReduce(group, max_tokens=8, hidden=CASE.hidden, **options)  # type: ignore[arg-type]


def one_call(ar: weft.AllReduce, tokens: int = 5, backend: str = "twoshot", **more: object) -> None:
    x = CASE.next(tokens=tokens).rows(ar.group.rank, ar.group.device)
    ar.fused(x, backend=backend, **more)  # type: ignore[arg-type]
    synchronize(ar.group.device)
    ar.check()


@pytest.mark.parametrize("epilogue_at", ["owner", "receiver"])
@on_ranks(3, "cpu", "threads", "cuda")
def test_delays_change_no_bit(group, epilogue_at):
    case = CASE.next(differ=epilogue_at == "receiver")
    points = faults.REDUCE_ENTER, faults.AFTER_ROWS, faults.BEFORE_ROWS, faults.BEFORE_MOMENTS
    with make(group, epilogue_at=epilogue_at) as ar:
        for point in points:
            if group.rank == point % group.size:
                faults.plan_fault(ar, point, faults.JITTER, argument=300_000)
            for seed in range(18):
                play(ar, case.next(seed=seed, tokens=1 + seed % 8), BACKENDS[seed % 3])


def error_of(group: weft.Group, calls: list[dict[str, Any]]) -> str:
    """Return the error of an all-reduce that each rank calls in its own way."""
    own = dict(calls[group.rank])
    residual, weight = CASE.shared(group.device)
    if "residual" in own:
        own["residual"] = residual
    if "eps" in own:
        own["weight"] = weight
    with make(group) as ar:
        one_call(ar)
        try:
            one_call(ar, **own)
        except GroupError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


# The calls of rank 0 and rank 1, and how errors name them.
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"tokens": 4}, "5 tokens", "4 tokens"),
    ({"backend": "oneshot"}, {"backend": "oneshot", "tokens": 8}, "5 tokens", "8 tokens"),
    ({"backend": "twoshot"}, {"backend": "oneshot"}, "twoshot", "oneshot"),
    ({"out": True}, {"out": True, "residual": True}, "with out", "residual and out"),
    ({"eps": 1e-6}, {"eps": 1e-5}, "eps 1e-06", "eps 1e-05"),
]


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize(("first", "second", "one", "other"), DIFFERENT)
def test_a_different_call_is_detected_and_both_are_named(ranks, kind, first, second, one, other):
    texts = ranks(2, kind)(error_of, [first, second])
    # A rank that comes late may first hear that its peer has noticed, and left.
    named = [text for text in texts if "; this rank with " in text]
    reported = [text for text in texts if "made another call" in text]
    assert named, texts
    assert len(named) + len(reported) == 2, texts
    assert all(text.startswith("GeometryMismatch: ") for text in named)
    assert all(one in text and other in text for text in named)


@pytest.mark.parametrize("kind", [CPU, *ANY])
@pytest.mark.parametrize("backend", ["twoshot", "twoshot_bulk"])
def test_a_third_rank_names_both_calls_too(ranks, kind, backend):
    """Of one token, owned by rank 0: a rank that waits for the sum gets nothing from rank 2."""
    calls = [{"tokens": 1, "backend": name} for name in (backend, backend, "oneshot")]
    for rank, text in enumerate(ranks(3, kind)(error_of, calls)):
        assert text.startswith(f"GeometryMismatch: rank {rank}, all-reduce: rank "), text
        assert "1 tokens by oneshot" in text
        assert f"1 tokens by {backend}" in text


@on_ranks(2, "threads")
def test_different_sizes_are_refused_at_creation(group):
    for options, *words in (
        ({"max_tokens": 8 + group.rank}, "all-reduce geometry differs", "tokens=8", "tokens=9"),
        ({"epilogue_at": ("owner", "receiver")[group.rank]}, "epilogue_at", "owner", "receiver"),
    ):
        sizes: dict[str, Any] = {"max_tokens": 8, "hidden": 128, **options}
        refused(GeometryMismatch, lambda own=sizes: weft.AllReduce(group, **own), *words)  # type: ignore[misc]
