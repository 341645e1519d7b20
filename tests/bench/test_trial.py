"""The check that stands before every timing: it passes what is right and catches what is not."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
import torch

from tests.bench.test_cases import SETTINGS
from weft import AllToAll
from weft.bench import moe
from weft.bench.clock import Phases
from weft.bench.trial import Trial, make_exchange, make_inputs, rows_of
from weft.errors import BadExpertId

SIZES = replace(SETTINGS, tokens=(5, 300), router="zipf", experts=13)


def _check(group, settings, make):
    found = []
    with make(group, settings) as exchange:
        for tokens in settings.tokens:
            found.append(Trial(group, settings, exchange, tokens).check())
            exchange.check()
    return found


def _honest(group, settings):
    return make_exchange(group, settings, "onesided", max(settings.tokens) + 3)


@pytest.mark.parametrize("payload", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_real_exchange_passes(ranks, payload, dtype):
    settings = replace(SIZES, payload=payload, dtype=dtype)
    assert ranks(3, "threads")(_check, settings, _honest) == [[None, None]] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"combine_by": "push", "halves": True},
        {"combine_by": "fp8", "quantize": "fp8"},
        {"combine_by": "fp8", "payload": "fp8", "halves": True},
        {"quantize": "mxfp8", "halves": True},
        {"quantize": "fp8", "dtype": "fp16"},
        {"combine_by": "fp8", "quantize": "mxfp8", "dtype": "fp32"},
    ],
)
def test_every_way_passes(ranks, change):
    settings = replace(SIZES, **change)
    assert ranks(3, "threads")(_check, settings, _honest) == [[None, None]] * 3


def _made(group, settings):
    found = []
    for backend in ("onesided", "collective"):
        with contextlib.closing(make_exchange(group, settings, backend, 5)) as exchange:
            trial = Trial(group, settings, exchange, 5)
            found.append((trial.check(), len(trial.phases().halves), trial.settings.combine_by))
            group.barrier()
    return found


def test_the_collective_runs_without_the_options_of_the_other(ranks):
    settings = replace(SIZES, combine_by="fp8", quantize="fp8", halves=True)
    assert ranks(2, "cpu")(_made, settings) == [[(None, 4, "fp8"), (None, 0, "pull")]] * 2


class _Spoilt(AllToAll):
    """An all-to-all that goes wrong on rank 1 in one chosen way."""

    fault = ""

    def dispatch(self, *args, **kwargs):
        received = super().dispatch(*args, **kwargs)
        if self.rank != 1:
            return received
        source, token = (received.ids >= 0).any(dim=2).nonzero()[0].tolist()
        if self.fault == "payload":
            received.x[source, token, 3] += 1
        if self.fault == "ids":
            received.ids[source, token] = -1
        if self.fault == "weights":
            received.weights[source, token] += 1.0
        if self.fault == "counts":
            received.counts[0] += 1
        if self.fault == "stale":
            received.ids[0, -1, 0] = 0
        return received

    def dispatch_recv(self):
        received = super().dispatch_recv()
        if self.rank == 1 and self.fault == "scales":
            source, token = (received.ids >= 0).any(dim=2).nonzero()[0].tolist()
            received.payloads[1][source, token, 0] *= 2
        return received

    def combine(self, *args, **kwargs):
        out = super().combine(*args, **kwargs)
        if self.rank == 1 and self.fault == "combine":
            out[2, 7] = 0.125
        return out


def _spoilt(group, settings):
    return _Spoilt(
        group,
        max_tokens=max(settings.tokens) + 3,
        top_k=settings.top_k,
        num_experts=settings.experts,
        hidden=settings.hidden,
        quantize=settings.quantize,
        halves=settings.halves,
    )


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("payload", "bytes of payload 0 of token"),
        ("ids", "ids of token"),
        ("weights", "weights of token"),
        ("counts", r"counts are \[6, 5\], every rank sent 5"),
        ("stale", "slots beyond 5 tokens still hold ids"),
        ("combine", r"combined row of token 2 of 5 is \[0.125\] in columns \[7\]"),
    ],
)
def test_the_check_catches(ranks, monkeypatch, fault, text):
    monkeypatch.setattr(_Spoilt, "fault", fault)
    settings = replace(SIZES, tokens=(5,))
    ((first,), (second,)) = ranks(2, "threads")(_check, settings, _spoilt)
    assert second is not None
    assert second.startswith("rank 1: ")
    assert re.search(text, second), second
    if first is not None:  # what rank 1 spoils before combine may reach rank 0's sums
        assert "combined row" in first


def test_the_check_catches_a_scale_in_halves(ranks, monkeypatch):
    monkeypatch.setattr(_Spoilt, "fault", "scales")
    settings = replace(SIZES, tokens=(5,), quantize="fp8", halves=True)
    _, (second,) = ranks(2, "threads")(_check, settings, _spoilt)
    assert second is not None
    assert second.startswith("in halves, rank 1: bytes of payload 1 of token"), second


def test_inputs_make_every_sum_exact():
    inputs = make_inputs(replace(SETTINGS, payload="fp8"), 40, 1)
    values, scales = inputs.payloads
    assert values.dtype == torch.float8_e4m3fn
    assert bool((scales.log2() == scales.log2().round()).all()), "scales are powers of two"
    rows = rows_of(inputs.payloads, torch.float32)
    assert torch.equal(rows, rows.bfloat16().float())
    plain = rows_of(make_inputs(SETTINGS, 40, 1).payloads, torch.float32).float()
    assert float((rows - plain).abs().max()) <= 2**-4 * float(plain.abs().max())
    assert torch.equal(inputs.weights * 64, (inputs.weights * 64).round())


def _timed(group, settings):
    with _honest(group, settings) as exchange:
        return moe._measure(group, settings, exchange, settings.tokens[0], None)[1]


def test_calls_that_write_nothing_are_noticed_after_timing(ranks, monkeypatch):
    settings = replace(SIZES, tokens=(5,))
    assert ranks(2, "threads")(_timed, settings) == [None, None]
    monkeypatch.setattr(Trial, "phases", lambda trial: Phases(lambda: None, lambda: None))
    for problem in ranks(2, "threads")(_timed, settings):
        assert problem is not None
        assert problem.startswith("after timing, ")


def _refused(group, settings):
    with _honest(group, settings) as exchange:
        trial = Trial(group, settings, exchange, 5)
        bad = trial.inputs.ids.clone()
        bad[0, 0] = settings.experts
        exchange.dispatch(trial.inputs.payloads, bad, trial.inputs.weights)
        exchange.combine()
        with pytest.raises(BadExpertId):
            moe._measure(group, settings, exchange, 5, None)


def test_a_refusal_ends_a_measurement(ranks):
    ranks(2, "threads")(_refused, replace(SIZES, tokens=(5,)))
