# SPDX-License-Identifier: Apache-2.0
"""`weft bench moe`: sizes, routing, the bytes counted from it, and the check before timing."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
import torch

from weft import AllToAll
from weft.bench import moe
from weft.bench.harness import Calls, rank_body
from weft.bench.moe import MoECase, MoETrial, make_inputs, rows_of
from weft.bench.routing import busiest, choice_rows, make_ids, parse_routing, token_rows
from weft.errors import BadExpertId, InvalidArgument
from weft.moe import MODELS
from weft.placement import Placement

SETTINGS = MoECase(
    ranks=4, device="cpu", tokens=(8,), hidden=256, top_k=4, experts=16, samples=3, seed=1
)
ON_GPUS = replace(SETTINGS, device="cuda", samples=11)
SIZES = replace(SETTINGS, tokens=(5, 300), routing="zipf", experts=13)


def test_parse_routing():
    assert parse_routing("zipf") == ("zipf", 1.0)
    assert parse_routing("zipf:0.5") == ("zipf", 0.5)
    for text in ("zipf:", "zipf:much", "zipf:-1", "zipf:nan", "zipf:100"):
        with pytest.raises(InvalidArgument, match=f"routing is '{text}'"):
            parse_routing(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": 99}, "ranks is 99"),
        ({"hidden": 250}, "pad hidden to 256"),
        ({"routing": "best"}, "choose one of uniform, perfect"),
        ({"top_k": 17}, "top_k is 17"),
        ({"payload": "fp8", "hidden": 200}, "multiple of 128"),
        ({"combine_dtype": "fp8", "hidden": 200}, "hidden is 200"),
        ({"quantize": "mxfp8", "hidden": 80}, "hidden is 80"),
        ({"combine": "mail"}, "combine is 'mail'"),
        ({"quantize": "int4"}, "quantize is 'int4'"),
        ({"quantize": "fp8", "payload": "fp8"}, "the payload is fp8 already"),
    ],
)
def test_settings_refuse(change, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(SETTINGS, **{"samples": 11, **change})


def test_row_bytes():
    assert SETTINGS.sent_bytes == SETTINGS.returned_bytes == 512
    fp8 = replace(SETTINGS, payload="fp8", dtype="fp32")
    assert (fp8.sent_bytes, fp8.returned_bytes) == (256 + 2 * 4, 1024)
    both = replace(SETTINGS, quantize="mxfp8", combine_dtype="fp8")
    assert (both.sent_bytes, both.returned_bytes) == (256 + 8, 256 + 2 * 4)
    assert replace(SETTINGS, combine="push").returned_bytes == 512


def test_the_wire_in_words():
    assert SETTINGS.wire == "bf16 out, bf16 back"
    assert replace(SETTINGS, payload="fp8").wire == "fp8 + scales out, bf16 back"
    assert replace(SETTINGS, combine="push").wire == "bf16 out, bf16 back (pushed)"
    both = replace(SETTINGS, quantize="fp8", combine_dtype="fp8")
    assert both.wire == "fp8 + scales out, quantised by dispatch, fp8 + scales back (pushed)"


@pytest.mark.parametrize("routing", ["uniform", "perfect", "zipf", "one-hot"])
@pytest.mark.parametrize("model", MODELS)
def test_ids_are_distinct_and_in_range(routing, model):
    sizes = MODELS[model]
    top_k, experts = sizes.routing.top_k, sizes.routing.num_experts
    settings = replace(SETTINGS, routing=routing, top_k=top_k, experts=experts)
    ids = make_ids(settings, 33, 2)
    assert ids.shape == (33, top_k)
    assert ids.dtype == torch.int32
    assert int(ids.min()) >= 0
    assert int(ids.max()) < experts
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert torch.equal(ids, make_ids(settings, 33, 2)), "a rank cannot make another's ids"
    if routing in ("uniform", "zipf"):
        assert not torch.equal(ids, make_ids(settings, 33, 1))


@pytest.mark.parametrize(("ranks", "top_k", "experts"), [(4, 8, 32), (8, 4, 20), (3, 5, 11)])
def test_perfect_spreads_evenly(ranks, top_k, experts):
    settings = replace(SETTINGS, routing="perfect", ranks=ranks, top_k=top_k, experts=experts)
    ids = [make_ids(settings, 4 * ranks, rank) for rank in range(ranks)]
    rows = token_rows(ids, experts)
    assert set(rows.flatten().tolist()) == {4 * ranks * min(top_k, ranks) // ranks}
    owner = torch.tensor(Placement.blocks(experts, ranks).ranks)
    loads = torch.bincount(owner[torch.cat(ids).long()].flatten(), minlength=ranks)
    assert len(set(loads.tolist())) == 1


def test_perfect_needs_enough_experts():
    with pytest.raises(InvalidArgument, match="needs 2 experts on each"):
        replace(SETTINGS, routing="perfect", top_k=5, experts=5)


def test_traffic_is_what_a_loop_counts():
    settings = replace(SETTINGS, experts=13, routing="zipf")
    ids = [make_ids(settings, 9, rank) for rank in range(4)]
    ids[2][4, 1:] = -1
    owner = Placement.blocks(13, 4).ranks
    rows = [[0] * 4 for _ in range(4)]
    for source in range(4):
        for row in ids[source].tolist():
            for target in {owner[e] for e in row if e >= 0}:
                rows[source][target] += 1
    assert token_rows(ids, 13).tolist() == rows
    out = [sum(rows[r]) - rows[r][r] for r in range(4)]
    into = [sum(rows[s][r] for s in range(4)) - rows[r][r] for r in range(4)]
    assert busiest(token_rows(ids, 13)) == max(out + into)
    assert settings.traffic(ids)["chosen"] == 9 * 4
    choices = [[0] * 4 for _ in range(4)]
    for source in range(4):
        for expert in ids[source].flatten().tolist():
            if expert >= 0:
                choices[source][owner[expert]] += 1
    assert choice_rows(ids, 13).tolist() == choices


def _check(group, settings):
    with contextlib.closing(settings.trials(group)) as trials:
        found = [(trial.check(), trial.facts())[0] for trial in trials]
        group.barrier()
    return found


@pytest.mark.parametrize(
    "change",
    [
        *({"payload": p, "dtype": d} for p in ("bf16", "fp8") for d in ("bf16", "fp16", "fp32")),
        {"combine": "push"},
        {"combine_dtype": "fp8", "quantize": "fp8"},
        {"combine_dtype": "fp8", "payload": "fp8"},
        {"quantize": "mxfp8"},
        {"quantize": "fp8", "dtype": "fp16"},
        {"combine_dtype": "fp8", "quantize": "mxfp8", "dtype": "fp32"},
    ],
)
def test_every_way_passes(ranks, change):
    settings = replace(SIZES, **change)
    assert ranks(3, "threads")(_check, settings) == [[None, None]] * 3


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
        if self.fault == "scales":
            received.payloads[1][source, token, 0] *= 2
        if self.fault == "counts":
            received.counts[0] += 1
        if self.fault == "stale":
            received.ids[0, -1, 0] = 0
        return received

    def combine(self, *args, **kwargs):
        out = super().combine(*args, **kwargs)
        if self.rank == 1 and self.fault == "combine":
            out[2, 7] = 0.125
        return out


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("payload", r"bytes of payload 0 from rank \d of token \d of 5 is"),
        ("scales", r"bytes of payload 1 from rank \d of token"),
        ("ids", r"ids from rank \d of token"),
        ("weights", r"weights from rank \d of token"),
        ("counts", r"counts are \[6, 5\], every rank sent 5"),
        ("stale", "slots beyond 5 tokens still hold ids"),
        ("combine", r"combined row of token 2 of 5 is \[0.125\] in columns \[7\]"),
    ],
)
def test_the_check_catches(ranks, monkeypatch, fault, text):
    monkeypatch.setattr(_Spoilt, "fault", fault)
    monkeypatch.setattr(moe, "AllToAll", _Spoilt)
    quantize = "fp8" if fault == "scales" else None
    settings = replace(SIZES, tokens=(5, 8), quantize=quantize)
    ((first, _), (second, _)) = ranks(2, "threads")(_check, settings)
    assert second is not None
    assert second.startswith("rank 1: ")
    assert re.search(text, second), second
    if first is not None:  # what rank 1 spoils before combine may reach rank 0's sums
        assert "combined row" in first


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


def test_calls_that_write_nothing_are_noticed_after_timing(ranks, monkeypatch):
    settings = replace(SIZES, tokens=(5,))
    found, _ = ranks(2, "threads")(rank_body, settings, True)
    assert sorted(found["measured"][0].samples_us) == ["combine", "dispatch", "pair"]
    nothing = Calls({"dispatch": lambda: None, "combine": lambda: None}, "pair")
    monkeypatch.setattr(MoETrial, "calls", lambda trial: nothing)
    for each in ranks(2, "threads")(rank_body, settings, True):
        text = "onesided, 5 tokens: after timing, rank 0: combined row of token 0 of 5 is [nan"
        assert each["problem"].startswith(text)


def _refused(group, settings):
    with contextlib.closing(settings.trials(group)) as trials:
        trial = next(trials)
        bad = trial.inputs.ids.clone()
        bad[0, 0] = settings.experts
        trial.exchange.dispatch(trial.inputs.payloads, bad, trial.inputs.weights)
        trial.exchange.combine()
        with pytest.raises(BadExpertId):
            trial.facts()


def test_a_refusal_ends_a_measurement(ranks):
    ranks(2, "threads")(_refused, replace(SIZES, tokens=(5,)))
