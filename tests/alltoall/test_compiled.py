# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs around every public class give the bits of eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compiled import (
    PATIENT,
    assert_same,
    compare_all_reduces,
    compare_all_to_all,
    compare_layers,
    compare_low_latency,
    compile_body,
)
from tests.kinds import CPU, THREADS, on_ranks
from tests.moe.layers import CONFIGS, Case
from tests.rounds import Round
from tests.sums import Sum
from weft.errors import InvalidArgument, OutOfOrder
from weft.runtime import library

DYNAMIC: dict[str, Any] = {"backend": "aot_eager", "dynamic": True}
PLAIN: dict[str, Any] = {"backend": "aot_eager"}
INDUCTOR: dict[str, Any] = {"backend": "inductor"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_reduces(ranks):
    ranks(2, "cpu")(compare_all_reduces, DYNAMIC, ("none", "static", "ue8m0"), timeout=550.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_to_alls(ranks):
    ranks(2, "cpu")(exchanges, DYNAMIC, timeout=550.0)


def exchanges(group: weft.Group, options: dict[str, Any]) -> None:
    compare_all_to_all(group, options)
    compare_low_latency(group, options, ("fp8", "reduced"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@on_ranks(2, [CPU], timeout=550.0)
def test_layers(group):
    compare_layers(group, DYNAMIC, {"overlap": "none"})
    compare_layers(group, PLAIN, {"mode": "low_latency", "overlap": "shared_expert"})


# Of the compiler that moves, fuses and reuses memory one graph of each: its C++ takes long.
ONCE = ((5, 3),)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("body", ["reduces_by_inductor", "exchanges_by_inductor"])
def test_inductor(ranks, body):
    ranks(2, "cpu")(globals()[body], timeout=850.0)


def reduces_by_inductor(group: weft.Group) -> None:
    compare_all_reduces(group, INDUCTOR, ("ue8m0",), sizes=(5,))


def exchanges_by_inductor(group: weft.Group) -> None:
    compare_all_to_all(group, INDUCTOR, ONCE)
    compare_low_latency(group, INDUCTOR, ("plain",), ONCE)
    compare_layers(group, INDUCTOR, {"overlap": "shared_expert"}, ONCE)
    args = Round((5, 3), top_k=3, experts=8, hidden=128).inputs_of(group.rank, group.device)[:3]
    with weft.AllToAll(group, **SIZES, **PATIENT) as a2a:
        assert_same(compile_body(late_reader, INDUCTOR)(a2a, *args), late_reader(a2a, *args))


SIZES: dict[str, Any] = {"max_tokens": 8, "top_k": 3, "num_experts": 8, "hidden": 128}


def wrong(group: weft.Group) -> None:
    """Refusals are weft's errors, or the compiler's while tracing; the group stays usable."""
    case = Sum(4, 256)
    with weft.AllReduce(group, max_tokens=8, hidden=256, **PATIENT) as ar:
        x = case.rows(group.rank, group.device)

        def body(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            out = ar.fused(x, **kwargs).out
            assert out is not None
            return out * 2

        traced = torch.compile(body, backend="aot_eager", fullgraph=True, dynamic=False)
        expected = body(x)
        refused: list[tuple[torch.Tensor, dict[str, Any], str]] = [
            (x.float(), {}, "InvalidArgument.*x has dtype torch.float32"),
            (x[:, :128].contiguous(), {}, r"InvalidArgument.*x has shape \[4, 128\]"),
            (x.repeat(3, 1), {}, "TokenOverflow.*12 tokens in one call"),
            (x, {"residual_out": True}, "InvalidArgument.*residual_out needs residual"),
            (x, {"out": "yes"}, "InvalidArgument.*out is 'yes'"),
        ]
        for kwargs, more, words in refused:
            with pytest.raises(Exception, match=words):
                traced(kwargs, **more)
        assert_same((traced(x),), (expected,))
        # What only a run can see comes as itself.
        shifted = torch.empty(4 * 256 + 1, dtype=x.dtype)[1:].view(4, 256).copy_(x)
        with pytest.raises(InvalidArgument, match="x starts at address"):
            traced(shifted)
        with pytest.raises(InvalidArgument, match="backend is 'fast'"):
            traced(x, backend="fast")
        assert_same((traced(x),), (expected,))
        ar.check()
    with pytest.raises(OutOfOrder, match="was closed"):
        traced(x)


def split_phase(group: weft.Group) -> None:
    """Split calls are refused inside a graph, and work at a graph break."""
    case = Round((5, 3), top_k=3, experts=8, hidden=128)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with weft.AllToAll(group, **SIZES, split_phase=True, **PATIENT) as a2a:

        def body(x: torch.Tensor) -> torch.Tensor:
            a2a.dispatch_send(x * 2, ids, weights)
            received = a2a.dispatch_recv()
            return a2a.combine(received.x) + 1

        expected = body(x)
        with pytest.raises(Exception, match="InvalidArgument.*dispatch_send under torch.compile"):
            compile_body(body, PLAIN)(x)
        torch._dynamo.reset()
        assert_same((torch.compile(body, backend="aot_eager")(x),), (expected,))
        a2a.check()
    with weft.LowLatencyAllToAll(group, split_phase=True, **SIZES, **PATIENT) as low:
        for name in ("dispatch_recv", "combine_recv"):
            with pytest.raises(Exception, match=f"InvalidArgument.*{name} under torch.compile"):
                compile_body(lambda: getattr(low, name)(), PLAIN)()  # noqa: B023
    stored: dict[str, Any] = {"slots": 1, "combine": "gemm_push"}
    with weft.LowLatencyAllToAll(group, **SIZES, **stored, **PATIENT) as low:
        with pytest.raises(Exception, match="InvalidArgument.*with combine='gemm_push'"):
            compile_body(lambda x: low.dispatch(x, ids, weights).counts, PLAIN)(x)
        assert not low.history()


def handed_over(group: weft.Group) -> None:
    """Dispatch and combine in two graphs, or one of them in eager code."""
    case = Round((5, 3), top_k=3, experts=8, hidden=128)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with weft.LowLatencyAllToAll(group, **SIZES, quantize=None, **PATIENT) as low:

        def dispatch(x: torch.Tensor) -> Any:
            return low.dispatch(x, ids, weights)

        def combine(y: torch.Tensor, handle: Any) -> Any:
            return low.combine(y, ids, weights, handle)

        rows = dispatch(x)
        expected = combine(rows.x, rows.handle)
        for one in (dispatch, compile_body(dispatch, PLAIN)):
            for other in (combine, torch.compile(combine, backend="aot_eager", fullgraph=True)):
                rows = one(x)
                assert_same((other(rows.x.clone(), rows.handle),), (expected,))
                with pytest.raises(OutOfOrder, match="not alive"):
                    other(rows.x.clone(), rows.handle)

        def fails(x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
            rows = low.dispatch(x, ids, weights)
            return low.combine(rows.x, ids, weights, rows.handle, add=bad)

        traced = compile_body(fails, PLAIN)
        good = torch.zeros_like(x)
        shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view_as(x)
        for _ in range(3):  # more often than there are slots
            with pytest.raises(InvalidArgument, match="add starts at address"):
                traced(x, shifted)
        assert_same((traced(x, good),), (expected,))
        low.check()


def closed(group: weft.Group) -> None:
    """Calls of a closed object say so, also from a graph that was compiled before."""
    case = Round((5, 3), top_k=3, experts=8, hidden=128)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    deepseek = Case(CONFIGS["deepseek"], tokens=(5, 3))
    logits = deepseek.inputs_of(group.rank, group.device)[1]

    def by_rank(a2a: Any) -> Any:
        return a2a.combine(a2a.dispatch(x, ids, weights).x)

    def by_expert(low: Any) -> Any:
        rows = low.dispatch(x, ids, weights)
        return low.combine(rows.x, ids, weights, rows.handle)

    def layer(moe: Any) -> Any:
        return moe(x, logits)

    for body, owner in (
        (by_rank, weft.AllToAll(group, **SIZES, **PATIENT)),
        (by_expert, weft.LowLatencyAllToAll(group, **SIZES, quantize=None, **PATIENT)),
        (layer, deepseek.open(group, overlap="none", **PATIENT)),
    ):
        traced = compile_body(body, PLAIN)
        assert_same((traced(owner),), (body(owner),))
        group.barrier()
        owner.close()
        with pytest.raises(OutOfOrder, match="was closed"):
            traced(owner)
        with pytest.raises(Exception, match="OutOfOrder.*was closed"):
            compile_body(body, PLAIN)(owner)


def while_others_compile(group: weft.Group) -> None:
    """Calls stay eager while another thread compiles (is_compiling() is true in all threads)."""
    case = Round((5, 3), top_k=3, experts=8, hidden=128)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with weft.AllToAll(group, **SIZES, **PATIENT) as a2a:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "_is_compiling_flag", True)
            assert torch.compiler.is_compiling()
            received = a2a.dispatch(x, ids, weights)
            assert received.x.data_ptr() == a2a.latest_received.x.data_ptr()
            a2a.combine(received.x)
        a2a.check()


@pytest.mark.timeout(600)
@on_ranks(1, [CPU], timeout=550.0)
def test_refusals_and_mixtures(group):
    """A group of one rank suffices, because refusals do not depend on peers."""
    split_phase(group)
    handed_over(group)
    closed(group)
    while_others_compile(group)


def late_reader(
    a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Read received rows only after two rounds: a compiler must not move the read there."""
    received = a2a.dispatch(x, ids, weights)
    seen = torch.where(received.ids[..., :1] >= 0, received.x * 3, 0.0)
    a2a.combine(received.x)
    received = a2a.dispatch(x + 1, ids, weights)
    return seen, a2a.combine(received.x, add=x) * 2


@pytest.mark.timeout(600)
@on_ranks(2, [CPU], timeout=550.0)
def test_calls_keep_their_order_and_their_numbers(group):
    wrong(group)
    case = Round((5, 3), top_k=3, experts=8, hidden=128)
    args = case.inputs_of(group.rank, group.device)[:3]
    with weft.AllToAll(group, **SIZES) as a2a, weft.AllToAll(group, **SIZES) as other:
        traced = compile_body(late_reader, PLAIN)
        for owner in (a2a, other, a2a):
            assert_same(traced(owner, *args), late_reader(owner, *args))
        epoch = a2a.history()[-1].epoch
        twice = compile_body(
            lambda: tuple(a2a.combine(a2a.dispatch(*args).x) for _ in range(2)), PLAIN
        )
        one, two = twice()
        assert_same((one,), (two,))
        assert a2a.history()[-1].epoch == epoch + 2, "two equal calls stay two calls"
    with weft.AllToAll(group, stats=9, **SIZES) as a2a:

        def exchange_stats(stats: torch.Tensor) -> torch.Tensor:
            received = a2a.dispatch(*args, stats=stats)
            assert received.stats is not None
            seen = received.stats * 1
            a2a.combine(received.x)
            return seen

        traced = compile_body(exchange_stats, PLAIN)
        counts = [torch.arange(9, dtype=torch.int32) + rank for rank in range(group.size)]
        for number in range(3):
            got = traced(counts[group.rank] + number)
            assert torch.equal(got, torch.stack(counts) + number)
        with pytest.raises(Exception, match="stats is None in an all-to-all built with stats=9"):
            compile_body(lambda x: a2a.dispatch(x, *args[1:]).ids + 0, PLAIN)(args[0])


@on_ranks(2, [THREADS])
def test_objects_share_an_order_and_die_alone(group):
    """Calls of different objects share one order, and a handle keeps no object alive."""
    with weft.AllReduce(group, max_tokens=8, hidden=256) as ar:
        a2a = weft.AllToAll(group, **SIZES)
        low = weft.LowLatencyAllToAll(group, **SIZES)
        assert ar.order_tensor is a2a.order_tensor is low.order_tensor
        handles = [owner.library_handle for owner in (ar, a2a, low)]
        assert all(handle in library._owners for handle in handles)
        a2a.close()
        assert handles[1] not in library._owners
        del low  # not closed, only dropped
        assert handles[2] not in library._owners
    assert not any(handle in library._owners for handle in handles)


@on_ranks(1, [THREADS])
def test_fake_tensors_are_refused_outside_of_a_compiler(group):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with weft.AllToAll(group, **SIZES) as a2a, FakeTensorMode():
        with pytest.raises(InvalidArgument, match="is a FakeTensor"):
            a2a.dispatch(
                torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int32)
            )
        assert not a2a.history()
