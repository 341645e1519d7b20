# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs around every public class give the bits of eager calls."""

from typing import Any

import pytest
import torch

import weft
from tests import compiled
from tests.compiled import PATIENT, assert_same, compile_body
from tests.moe.layers import CONFIGS, Case
from tests.ranks import on_ranks
from tests.rounds import Round
from tests.sums import Sum
from weft.errors import InvalidArgument, OutOfOrder
from weft.runtime import library

pytestmark = pytest.mark.timeout(900)
DYNAMIC: dict[str, Any] = {"backend": "aot_eager", "dynamic": True}
PLAIN: dict[str, Any] = {"backend": "aot_eager"}
INDUCTOR: dict[str, Any] = {"backend": "inductor"}
ONCE = ((5, 3),)  # of the compiler that moves, fuses and reuses memory: its C++ takes long
CASE = Round((5, 3), top_k=3, experts=8, hidden=128)
SIZES = CASE.sizes(8)


# Functions of tests/compiled.py, and what they compare.
COMPARED: dict[str, list[tuple[Any, ...]]] = {
    "sums": [(compiled.compare_all_reduces, DYNAMIC, ("none", "static", "ue8m0"))],
    "exchanges": [
        (compiled.compare_all_to_all, DYNAMIC),
        (compiled.compare_low_latency, DYNAMIC, ("fp8", "reduced")),
    ],
    "layers": [
        (compiled.compare_layers, DYNAMIC, {"overlap": "none"}),
        (compiled.compare_layers, PLAIN, {"mode": "low_latency", "overlap": "shared_expert"}),
    ],
    "sums by inductor": [(compiled.compare_all_reduces, INDUCTOR, ("ue8m0",), (5,))],
    "exchanges by inductor": [
        (compiled.compare_all_to_all, INDUCTOR, ONCE),
        (compiled.compare_low_latency, INDUCTOR, ("plain",), ONCE),
        (compiled.compare_layers, INDUCTOR, {"overlap": "shared_expert"}, ONCE),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
@on_ranks(2, "cpu", timeout=850.0)
def test_compiled_calls_have_the_bits_of_eager_ones(group, name):
    for compare, options, *args in COMPARED[name]:
        compare(group, options, *args)


@pytest.mark.slow
@on_ranks(2, "cpu", timeout=850.0)
def test_inductor_moves_no_read_of_received_rows(group):
    args = CASE.inputs_of(group.rank, group.device)[:3]
    with weft.AllToAll(group, **SIZES, **PATIENT) as a2a:
        assert_same(compile_body(late_reader, INDUCTOR)(a2a, *args), late_reader(a2a, *args))


def refuse_wrong_arguments(group: weft.Group) -> None:
    """Refusals are weft's errors, or the compiler's while tracing; the group stays usable."""
    with weft.AllReduce(group, max_tokens=8, hidden=256, **PATIENT) as ar:
        x = Sum(4, 256).rows(group.rank, group.device)

        def body(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            out = ar.fused(x, **kwargs).out
            assert out is not None
            return out * 2

        traced = torch.compile(body, backend="aot_eager", fullgraph=True, dynamic=False)
        expected = body(x)
        shifted = torch.empty(4 * 256 + 1, dtype=x.dtype)[1:].view(4, 256).copy_(x)
        refused: list[tuple[type[Exception], torch.Tensor, dict[str, Any], str]] = [
            (Exception, x.float(), {}, "InvalidArgument.*x has dtype torch.float32"),
            (Exception, x[:, :128].contiguous(), {}, r"InvalidArgument.*x has shape \[4, 128\]"),
            (Exception, x.repeat(3, 1), {}, "TokenOverflow.*12 tokens in one call"),
            (Exception, x, {"residual_out": True}, "InvalidArgument.*residual_out needs residual"),
            (Exception, x, {"out": "yes"}, "InvalidArgument.*out is 'yes'"),
            # What only a run can see comes as itself.
            (InvalidArgument, shifted, {}, "x starts at address"),
            (InvalidArgument, x, {"backend": "fast"}, "backend is 'fast'"),
        ]
        for error, rows, kwargs, words in refused:
            with pytest.raises(error, match=words):
                traced(rows, **kwargs)
        assert_same((traced(x),), (expected,))
        ar.check()
    with pytest.raises(OutOfOrder, match="was closed"):
        traced(x)


@on_ranks(1, "cpu", timeout=550.0)
def test_split_phases_are_refused_inside_a_graph(group):
    x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
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


@on_ranks(1, "cpu", timeout=550.0)
def test_dispatch_and_combine_in_two_graphs(group):
    x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
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

        def adds(x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
            rows = low.dispatch(x, ids, weights)
            return low.combine(rows.x, ids, weights, rows.handle, add=bad)

        traced = compile_body(adds, PLAIN)
        shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view_as(x)
        for _ in range(3):  # more often than there are slots
            with pytest.raises(InvalidArgument, match="add starts at address"):
                traced(x, shifted)
        assert_same((traced(x, torch.zeros_like(x)),), (expected,))
        low.check()


@on_ranks(1, "cpu", timeout=550.0)
def test_calls_of_a_closed_object_are_refused_also_in_a_compiled_graph(group):
    x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
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


@on_ranks(1, "cpu")
def test_calls_stay_eager_while_another_thread_compiles(group):
    """is_compiling() is true in all threads."""
    x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
    with weft.AllToAll(group, **SIZES, **PATIENT) as a2a, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        assert torch.compiler.is_compiling()
        received = a2a.dispatch(x, ids, weights)
        assert received.x.data_ptr() == a2a.latest_received.x.data_ptr()
        a2a.combine(received.x)


def late_reader(
    a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Read received rows only after two rounds: a compiler must not move the read there."""
    received = a2a.dispatch(x, ids, weights)
    seen = torch.where(received.ids[..., :1] >= 0, received.x * 3, 0.0)
    a2a.combine(received.x)
    received = a2a.dispatch(x + 1, ids, weights)
    return seen, a2a.combine(received.x, add=x) * 2


@on_ranks(2, "cpu", timeout=550.0)
def test_calls_keep_their_order_and_their_numbers(group):
    refuse_wrong_arguments(group)
    args = CASE.inputs_of(group.rank, group.device)[:3]
    with weft.AllToAll(group, **SIZES) as a2a, weft.AllToAll(group, **SIZES) as other:
        traced = compile_body(late_reader, PLAIN)
        for owner in (a2a, other, a2a):
            assert_same(traced(owner, *args), late_reader(owner, *args))
        epoch = a2a.history()[-1].epoch
        twice = lambda: tuple(a2a.combine(a2a.dispatch(*args).x) for _ in range(2))  # noqa: E731
        one, two = compile_body(twice, PLAIN)()
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


@on_ranks(2, "threads")
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


@on_ranks(1, "threads")
def test_fake_tensors_are_refused_outside_of_a_compiler(group):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with weft.AllToAll(group, **SIZES) as a2a, FakeTensorMode():
        x, ids = torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int32)
        with pytest.raises(InvalidArgument, match="is a FakeTensor"):
            a2a.dispatch(x, ids)
        assert not a2a.history()
