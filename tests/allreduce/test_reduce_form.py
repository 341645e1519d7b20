# SPDX-License-Identifier: Apache-2.0
"""Calls with the key of a checked call skip the checks: the same bits and the same refusals."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import expert_rows, make
from tests.compat.calls import refused
from tests.ranks import on_ranks
from tests.rounds import synchronize
from tests.sums import BACKENDS, Sum, assert_same_outputs, play, quant_specs
from weft.allreduce.call import OUTPUTS, FusedCall, Key
from weft.errors import InvalidArgument, OutOfOrder, TokenOverflow
from weft.runtime.stream import current_stream

CASE = Sum(4, 256)
BF16 = torch.bfloat16


def rows(tokens: int = 4, hidden: int = 256, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros((tokens, hidden), dtype=dtype)


def other_keys() -> dict[str, list[Key | None]]:
    """Return the keys of calls that differ from one call in one argument, by its name."""
    index, scales = torch.zeros((4, 2), dtype=torch.int32), torch.ones(4, 2)

    def key(call: FusedCall, backend: str = "auto") -> Key | None:
        return call.key(call.tensors(), backend, 0)[0]

    static, token = weft.FP8Static(torch.ones(1)), weft.FP8Token()
    none = (None,) * 5
    call = FusedCall(rows(), rows(), torch.ones(256), *none, token, None, 1e-6, 0.0)
    moe = weft.MoEFinalize(rows(8), index, scales, rows())
    others: dict[str, list[Any]] = {
        "x": [rows(3), None],
        "residual": [None],
        "weight": [torch.ones(256, dtype=BF16)],
        "quant": [None, static, weft.FP8Group(128, "fp32"), weft.FP8Group(128, "ue8m0")],
        "prologue": [
            moe,
            replace(moe, rows=rows(9)),
            replace(moe, index=torch.zeros((4, 3), dtype=torch.int32)),
            replace(moe, scales=None),
            replace(moe, scales=scales.to(BF16)),
            replace(moe, shared=None),
            replace(moe, routed_scaling_factor=2.5),
        ],
        "eps": [1e-5],
        "weight_bias": [-0.0, 1.0],
        **{name: [True, False, torch.empty(4, 256, dtype=BF16)] for name in OUTPUTS},
    }
    for name in OUTPUTS:
        one: Any = {name: 1}  # equals True, but is refused
        assert key(call._replace(**one)) is None
    result = {"": [key(call)], "backend": [key(call, name) for name in BACKENDS]}
    for name, values in others.items():
        result[name] = [key(call._replace(**{name: value})) for value in values]
    return result


def test_calls_that_differ_in_any_one_argument_never_share_an_entry():
    result = other_keys()
    assert set(result) == {"", "backend", *FusedCall._fields}
    keys = [key for kind in result.values() for key in kind]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    again = [key for kind in other_keys().values() for key in kind]
    assert again == keys, "other memory is no other call"


class Watch:
    """Count the calls that go through the checks of an all-reduce."""

    def __init__(self, ar: weft.AllReduce) -> None:
        self.choose, self.seen = ar._select_backend, 0
        ar._select_backend = self.backend  # type: ignore[assignment,method-assign]

    def backend(self, *args: Any) -> str:
        self.seen += 1
        return self.choose(*args)

    def checks(self, call: Callable[[], object]) -> int:
        before = self.seen
        call()
        return self.seen - before


@on_ranks(2)
def test_a_call_of_a_checked_form_has_the_bits_of_the_reference(group):
    """Calls of one form with other values and addresses are checked once."""
    with make(group, 8, CASE) as ar:
        watch = Watch(ar)
        for seed in range(3):
            for tokens in (1, 4):
                for quant in quant_specs(group.device, CASE.hidden):
                    for backend in (*BACKENDS, "auto"):
                        play(ar, CASE.next(tokens=tokens, seed=seed), backend, quant)
            assert watch.seen == len(ar._prepared) == 2 * 5 * 4


@on_ranks(3)
def test_omitted_outputs_are_new_in_every_call(group):
    with make(group, 8, CASE) as ar:
        watch = Watch(ar)
        kept: list[tuple[weft.Reduced, weft.Reduced]] = []
        for seed in range(3):
            case = CASE.next(seed=seed, tokens=3)
            xs = [case.rows(rank, group.device) for rank in range(group.size)]
            residual, weight = case.shared(group.device)
            kwargs: dict[str, Any] = {"residual": residual, "weight": weight}
            for quant in quant_specs(group.device, case.hidden):
                got = ar.fused(xs[group.rank], quant=quant, out=True, **kwargs)
                want = weft.reference.allreduce_fused(xs, residual, weight, quant=quant)
                assert (got.norm is None) == (quant is not None)
                kept.append((got, want))
        synchronize(group.device)
        assert watch.seen == 5
        for got, want in kept:
            assert_same_outputs(got, want)
            if got.scale is not None and got.scale.dtype == torch.int32:
                assert int(got.scale.as_strided((4,), (1,))[3]) == 0, "the padding is zero"


def invalid_calls() -> list[tuple[dict[str, Any], str]]:
    x, weight = rows(), torch.ones(256)
    fp8 = torch.zeros((4, 256), dtype=torch.float8_e4m3fn)
    token, static = weft.FP8Token(), weft.FP8Static(torch.ones(1))
    index = torch.zeros((4, 2), dtype=torch.int32)
    moe = weft.MoEFinalize
    pool, half, one = rows(8), torch.ones(256, dtype=BF16), index[:, :1].clone()
    odd = torch.zeros(1032, dtype=BF16)[1:1025].view(4, 256)
    return [
        ({}, "pass exactly one of them"),
        ({"x": x, "prologue": moe(x, index)}, "pass exactly one of them"),
        ({"x": rows(dtype=torch.float16)}, "x has dtype torch.float16"),
        ({"x": rows(hidden=248)}, "x has shape [4, 248]; it must be [4, 256]"),
        ({"x": rows(8)[::2]}, "pass x.contiguous()"),
        ({"x": odd}, "x.clone()"),
        ({"x": x, "residual": rows(5)}, "residual has shape [5, 256]"),
        ({"x": x, "weight": torch.ones(128)}, "weight has shape [128]"),
        ({"x": x, "quant": token}, "weight is None, but quant"),
        ({"x": x, "weight": weight, "quant": "fp4"}, "NVFP4"),
        ({"x": x, "weight": weight, "quant": weft.FP8Static(torch.ones(2))}, "[1]"),
        ({"x": x, "residual_out": True}, "residual_out needs residual"),
        ({"x": x, "norm_out": True}, "norm_out needs weight"),
        ({"x": x, "weight": weight, "quant_out": fp8}, "quant_out needs quant"),
        ({"x": x, "weight": weight, "quant": static, "scale_out": True}, "scale_out"),
        ({"x": x, "weight": weight, "quant": token, "scale_out": False}, "or neither"),
        ({"prologue": moe(rows(hidden=8), index)}, "rows has shape"),
        ({"prologue": moe(x, index, torch.ones(4, 3))}, "scales has shape"),
        ({"prologue": moe(x, index, None, rows(3))}, "shared has shape"),
        ({"x": pool[:4], "out": pool[2:6]}, "overlaps"),
        ({"x": x, "residual": pool[:4], "weight": half, "norm_out": pool[1:5]}, "overlaps"),
        ({"x": x, "weight": half, "out": pool[:4], "norm_out": pool[:4]}, "overlaps"),
        ({"prologue": moe(pool, one), "out": pool[:4]}, "overlaps"),
        ({"x": x[:1], "weight": half, "out": half.view(1, 256)}, "overlaps"),
    ]


def refuse_all(ar: weft.AllReduce) -> None:
    for kwargs, text in invalid_calls():
        refused(InvalidArgument, lambda own=kwargs: ar.fused(**own), text)  # type: ignore[misc]
    refused(TokenOverflow, lambda: ar.fused(rows(9)), "9 tokens in one call")


def make_similar_calls(ar: weft.AllReduce) -> None:
    """Make valid calls whose forms invalid_calls resemble."""
    x, weight, token = rows(), torch.ones(256), weft.FP8Token()
    index = torch.zeros((4, 2), dtype=torch.int32)
    one = torch.zeros((4, 1), dtype=torch.int32)
    moe = weft.MoEFinalize
    for _ in range(2):
        ar.fused(x)
        ar.fused(x, out=rows())
        ar.fused(x, residual=rows())
        for other in (weight, weight.bfloat16()):
            ar.fused(x, weight=other)
            ar.fused(x, weight=other, norm_out=rows(), residual=rows())
            ar.fused(x, weight=other, norm_out=rows(), out=rows())
            ar.fused(x[:1].clone(), weight=other, out=rows(1))
        ar.fused(x, weight=weight, quant=token)
        ar.fused(x, weight=weight, quant=weft.FP8Static(torch.ones(1)))
        ar.fused(prologue=moe(rows(), index))
        ar.fused(prologue=moe(rows(), index, torch.ones(4, 2), rows()))
        ar.fused(prologue=moe(rows(8), one), out=rows())


@on_ranks(2, "threads")
def test_invalid_calls_are_refused_without_effect(group):
    """Also where they resemble calls that were checked before."""
    with weft.AllReduce(group, max_tokens=8, hidden=256, first_timeout=600.0) as ar:
        refuse_all(ar)
        play(ar, CASE, "oneshot")  # nothing was sent, nothing is broken
        make_similar_calls(ar)
        watch, forms = Watch(ar), len(ar._prepared)
        for _ in range(2):
            refuse_all(ar)
        assert len(ar._prepared) == forms, "what was refused is not remembered"
        assert watch.checks(lambda: make_similar_calls(ar)) == 0, "what was checked still is"
    for late in (lambda: ar.fused(rows()), ar.check, ar.abort, ar.history):
        refused(OutOfOrder, late, "closed")
    ar.close()
    wide = rows(hidden=264)
    with weft.AllReduce(group, max_tokens=8, hidden=264, first_timeout=600.0) as ar:
        call = lambda: ar.fused(wide, weight=torch.ones(264), quant=weft.FP8Group())  # noqa: E731
        refused(InvalidArgument, call, "pad hidden to 384")


@on_ranks(2, "threads")
def test_overlaps_are_checked_in_every_call(group):
    """Outputs of one form move over the inputs: only exact aliases of x and residual are valid."""
    with make(group, 8, CASE) as ar:
        watch, weight = Watch(ar), torch.ones(256, dtype=BF16)
        pool = torch.zeros((40, 256), dtype=BF16)

        def call(*begins: int, x: torch.Tensor | None = None) -> object:
            names = "x", "residual", "residual_out", "norm_out"
            own = {name: pool[at : at + 4] for name, at in zip(names, begins, strict=True)}
            own |= {} if x is None else {"x": x}
            return ar.fused(**own, weight=weight, backend="twoshot")  # type: ignore[arg-type]

        assert watch.checks(lambda: call(0, 4, 8, 12)) == 1
        for good in ((0, 4, 8, 12), (20, 30, 8, 12), (4, 8, 0, 12), (0, 0, 4, 8)):
            assert watch.checks(partial(call, *good)) == 0
        # Exactly on x and residual is of the same form, and needs no check either.
        assert watch.checks(lambda: call(0, 4, 4, 0)) == 0
        for bad in ((0, 4, 8, 8), (0, 4, 8, 9), (0, 4, 1, 12), (0, 4, 5, 12), (0, 4, 8, 7)):
            for _ in range(2):
                with pytest.raises(InvalidArgument, match="overlaps"):
                    call(*bad)
        assert len(ar._prepared) == 1
        odd = torch.zeros(5 * 256 + 8, dtype=BF16)[1 : 1 + 4 * 256].view(4, 256)
        with pytest.raises(InvalidArgument, match="multiple of 16 bytes"):
            call(0, 4, 8, 12, x=odd)


@on_ranks(2, "threads")
def test_no_tensor_is_held(group):
    with make(group, 8, CASE) as ar:
        for _ in range(2):
            moe = expert_rows(CASE, 0, group.device)
            residual, weight = CASE.shared(group.device)
            static = weft.FP8Static(torch.ones(1))
            given = [moe.rows, moe.index, moe.scales, moe.shared, residual, weight, static.scale]
            outputs = [torch.empty_like(residual), torch.empty((4, 256), dtype=torch.float8_e4m3fn)]
            got = ar.fused(
                prologue=moe, residual=residual, weight=weight, quant=static, out=True,
                residual_out=outputs[0], quant_out=outputs[1],
            )  # fmt: skip
            alive = [weakref.ref(t) for t in (*given, *outputs, got.out) if t is not None]
            del moe, residual, weight, static, given, outputs, got
            assert [ref() for ref in alive] == [None] * 10
        assert len(ar._prepared) == 1


@pytest.mark.gpu
def test_the_current_stream_is_that_of_torch():
    device = torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert current_stream(device) == torch.cuda.current_stream().cuda_stream != 0
    assert current_stream(device) == torch.cuda.current_stream().cuda_stream
