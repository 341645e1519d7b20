# SPDX-License-Identifier: Apache-2.0
"""Equal calls skip the check; a change of anything that the check reads makes another call."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gemm.cases import Case
from weft.errors import InvalidArgument
from weft.gemm import (
    STORE,
    Gated,
    GatedQuant,
    GemmPlan,
    Push,
    WgmmaPlan,
    grouped_gemm,
    kernels,
    operator,
    triton_launch,
)
from weft.gemm.call import OUT, GemmCall, check_call
from weft.runtime import prepared


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the addresses of each launch from now on, with an empty call cache."""
    launches: list[tuple[int, ...]] = []

    class Launch:
        def __init__(
            self, call: GemmCall, plan: GemmPlan | WgmmaPlan, num_sms: int | None, early: bool
        ) -> None:
            self.count = len(call.tensors)

        def __call__(self, tensors: Sequence[torch.Tensor | None], at: Sequence[int]) -> None:
            assert [0 if t is None else t.data_ptr() for t in tensors] == list(at)
            assert len(at) == self.count
            launches.append(tuple(at))

    monkeypatch.setattr(operator, "_is_cuda", lambda _: True)
    monkeypatch.setattr(operator, "_calls", operator._ThreadCalls())
    monkeypatch.setattr(kernels, "HopperLaunch", Launch)
    monkeypatch.setattr(triton_launch, "TritonLaunch", Launch)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return launches


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[GemmCall]:
    """Return a list that records the calls that go through the check."""
    calls: list[GemmCall] = []

    def check(*args: Any, **kwargs: Any) -> GemmCall:
        calls.append(check_call(*args, **kwargs))
        return calls[-1]

    monkeypatch.setattr(operator, "check_call", check)
    return calls


def call(case: Case, **kwargs: Any) -> Any:
    made = case.make()
    return grouped_gemm(made.a, made.b, **made.given, **kwargs)


@pytest.mark.parametrize("case", [Case(), Case(masked=True), Case(torch.float16, bias=True)])
def test_an_equal_call_is_launched_without_a_check(case, checked, monkeypatch):
    launches = record_launches(monkeypatch)
    kept: list[tuple[Any, Any]] = []
    for seed in range(3):
        made = replace(case, seed=seed).make()
        kept.append((made, grouped_gemm(made.a, made.b, **made.given)))
    assert len(checked) == 1
    result = [(at[OUT], at[-2], at[-1]) for at in launches]
    assert result == [(out.data_ptr(), m.a.data_ptr(), m.b.data_ptr()) for m, out in kept]
    assert all(out.shape == kept[0][1].shape for _, out in kept)


def test_results_are_new_unless_passed(monkeypatch: pytest.MonkeyPatch):
    launches = record_launches(monkeypatch)
    case = Case(n=512)
    pairs = [call(case, epilogue=GatedQuant()) for _ in range(2)]
    for at, (numbers, scales) in zip(launches, pairs, strict=True):
        assert at[2:4] == (numbers.data_ptr(), scales.data_ptr())
        assert (numbers.shape[1], scales.shape[1]) == (256, 2)
    assert call(case, epilogue=GatedQuant(), out=pairs[0]) is pairs[0]
    assert call(case, epilogue=GatedQuant(), out=pairs[1]) is pairs[1]
    pushes = [Push(torch.zeros(case.rows, dtype=torch.int64)) for _ in range(2)]
    assert [call(case, epilogue=push) for push in pushes] == [None, None]
    assert [at[4] for at in launches[-2:]] == [push.dst_addr.data_ptr() for push in pushes]


OTHERS: dict[str, dict[str, Any]] = {
    "plan": {"plan": WgmmaPlan(64)},
    "num_sms": {"num_sms": 8},
    "programmatic_launch": {"programmatic_launch": True},
    "prefetch_weights": {"prefetch_weights": True},
    "epilogue": {"epilogue": Gated(), "plan": GemmPlan(64, 256)},
    "out": {"out": torch.empty(Case().rows, 256, dtype=torch.float16)},
    "offsets": {"offsets": torch.zeros(3, dtype=torch.int32)},
    "strides": {"a_scale": torch.ones(2, Case().rows).T},
}


@pytest.mark.parametrize("name", OTHERS)
def test_checked_properties_are_part_of_the_key(name, checked, monkeypatch):
    record_launches(monkeypatch)
    made = Case().make()
    for inputs in ({}, OTHERS[name], {}, OTHERS[name]):
        grouped_gemm(made.a, made.b, **{**made.given, **inputs})
    assert len(checked) == 2


def test_a_cached_call_still_checks_flags_and_gradients(monkeypatch: pytest.MonkeyPatch):
    launches = record_launches(monkeypatch)
    case = Case(torch.float16)
    for early in (True, False):
        call(case, programmatic_launch=early)
    with pytest.raises(InvalidArgument, match="programmatic_launch is 1"):
        call(case, programmatic_launch=1)
    made = case.make()
    weights = torch.nn.Parameter(made.b)
    with pytest.raises(InvalidArgument, match="b requires a gradient"):
        grouped_gemm(made.a, weights, **made.given)
    with torch.no_grad():
        grouped_gemm(made.a, weights, **made.given)
    assert len(launches) == 3


def test_the_oldest_calls_are_evicted(checked: list[GemmCall], monkeypatch: pytest.MonkeyPatch):
    record_launches(monkeypatch)
    monkeypatch.setattr(prepared, "MAX_CALLS", 2)
    for num_sms in (1, 2, 1, 3, 2, 1):
        call(Case(), num_sms=num_sms)
    assert len(checked) == 4
    assert len(operator._calls.prepared) == 2


def test_a_tensor_map_is_encoded_for_each_new_address(monkeypatch: pytest.MonkeyPatch):
    encoded: list[int] = []

    def tensor_map(address: int, *_: object) -> bytes:
        encoded.append(address)
        return address.to_bytes(8, "little") * kernels.MAP_WORDS

    monkeypatch.setattr(kernels, "encode_tensor_map", tensor_map)
    made = Case().make()
    checked = check_call(
        *(made.a, made.b), **{"bias": None, "out": None, "epilogue": STORE, **made.given}
    )
    arguments, at = kernels.HopperArguments(checked), checked.addresses
    for a, b, boxes in ((16, 32, 5), (16, 32, 0), (48, 32, 4), (48, 64, 1)):
        encoded.clear()
        result = arguments.fill_addresses([*at[:-2], a, b])
        assert len(encoded) == boxes
        assert list(result.weights_map) == [b] * kernels.MAP_WORDS
        assert [list(words) for words in result.rows_map] == [[a] * kernels.MAP_WORDS] * 4
        assert result.counts == made.given["counts"].data_ptr()
        assert (result.out, result.out_scales) == (at[2], 0)


def test_launches_that_may_overlap_get_counters_of_their_own(monkeypatch, caplog):
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(kernels, "call_driver", lambda _, stream: stream)
    monkeypatch.setattr(kernels, "TICKET_SLOTS", 6)
    slots = kernels.TicketSlots()
    assert [slots.assign(stream) for stream in (7, 8, 7)] == [1, 2, 1]
    capturing = True
    assert [slots.assign(7) for _ in range(4)] == [3, 4, 5, 0]  # 0: none is left
    capturing = False
    assert [slots.assign(stream) for stream in (8, 9)] == [2, 0]
    assert caplog.text.count("all 5 counters of a kernel are assigned") == 1
