# SPDX-License-Identifier: Apache-2.0
"""Every benchmark on CPU ranks: checks, timings, reports, detected faults, refused settings."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

import weft
from weft import AllToAll
from weft.bench import harness, moe
from weft.bench.allreduce import EPILOGUES, AllReduceCase, wire_bytes
from weft.bench.harness import Case, Measurement, Report, TimedCall, run
from weft.bench.layer import (
    ExpertLoad,
    LayerCase,
    LayerTrial,
    compute_load_from_ids,
    generate_local_experts,
    weight_bytes,
)
from weft.bench.limits import allreduce_floor_us
from weft.bench.lowlatency import LowLatencyCase, LowLatencyTrial
from weft.bench.moe import MoECase
from weft.bench.report import build_rows, print_report, to_json
from weft.bench.routing import (
    count_choice_rows,
    count_token_rows,
    generate_ids,
    max_remote_rows,
)
from weft.errors import InvalidArgument, RankFailed
from weft.moe import MODELS, OVERLAPS
from weft.placement import Placement

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"ranks": 2, "device": "cpu", "samples": 3, "seed": 1}
BACKENDS = ("oneshot", "twoshot", "twoshot_bulk", "auto")
REDUCE = AllReduceCase(**SMALL, tokens=(1, 5), hidden=256, backends=("oneshot", "twoshot"))
LAYER = LayerCase(**SMALL, tokens=(1, 6))
LOW = LowLatencyCase(
    **SMALL, tokens=(1, 6), hidden=128, top_k=3, experts=8, routing="uniform"
)  # fmt: skip
MOE = MoECase(**{**SMALL, "ranks": 4}, tokens=(8,), hidden=256, top_k=4, experts=16)
ODD = replace(MOE, ranks=3, tokens=(5, 300), routing="zipf", experts=13)
ON_8: dict[str, Any] = {"ranks": 8, "device": "cuda", "samples": 11}
FP8: dict[str, Any] = {"quantize": "fp8", "combine_dtype": "fp8"}
RUNS: list[Case] = [
    *(replace(REDUCE, epilogue=epilogue, backends=BACKENDS) for epilogue in EPILOGUES),
    LAYER,
    replace(LAYER, tokens=(6,), model="gpt-oss-120b", routing="zipf:1.2"),
    replace(LAYER, tokens=(6,), model="glm-4.5-air", shared=False, **FP8),
    replace(LAYER, tokens=(6,), mode="low_latency", dtype="fp8"),
    replace(LAYER, tokens=(6,), model="gpt-oss-120b", dtype="mxfp4"),
    LOW,
    replace(LOW, combine_dtype="fp8", scale="ue8m0"),
    replace(LOW, quantize=None, routing="perfect", reduce="receiver"),
    replace(ODD, dtype="fp16", payload="fp8"),
    replace(ODD, dtype="fp32"),
    replace(ODD, combine="push"),
    replace(ODD, payload="fp8", combine_dtype="fp8"),
    replace(ODD, quantize="fp8", dtype="fp16"),
    replace(ODD, combine_dtype="fp8", quantize="mxfp8", dtype="fp32"),
]


@pytest.mark.parametrize("case", RUNS, ids=lambda case: f"{case.operator}: {case.describe()}")
def test_a_run_is_checked_timed_and_reported(threads, case):
    report = run(case, quiet=True)
    assert report.error is None
    result = [(each.tokens, each.variant) for each in report.measurements]
    assert len(set(result)) == len(result)
    assert [tokens for tokens, _ in result] == sorted(tokens for tokens, _ in result)
    assert {tokens for tokens, _ in result} == set(case.tokens)
    for each in report.measurements:
        assert list(each.samples_us)[-1] == case.total_phase
        assert [len(us) for us in each.samples_us[case.total_phase]] == [3] * case.ranks
        assert all(us > 0 for samples in each.samples_us[case.total_phase] for us in samples)
    print_report(Console(file=io.StringIO(), width=300), report)
    written = json.loads(json.dumps(to_json(report)))
    assert len(written["rows"]) == sum(len(each.samples_us) for each in report.measurements)
    if isinstance(case, LayerCase):
        assert len(result) + len(report.skipped) == len(case.tokens) * len(OVERLAPS)
        assert ((6, "shared_expert") in result) == (case.config.shared > 0)
        assert all("InvalidArgument" in refusal for refusal in report.skipped)
        assert all(each.metadata["most"] >= each.metadata["mean"] for each in report.measurements)
    else:
        assert report.skipped == []
    if isinstance(case, AllReduceCase):
        assert result == [(tokens, backend) for tokens in case.tokens for backend in BACKENDS]
        for each in report.measurements:
            assert each.method == "host clock, 3 calls with a barrier before each"
            assert (each.metadata["chosen"] == each.variant) == (each.variant != "auto")
            assert each.metadata["memory_bytes"] > 0


def test_unsupported_sizes_of_a_variant_are_omitted(threads):
    few = replace(REDUCE, tokens=(1, 600), hidden=8, epilogue="none")
    report = run(few, quiet=True)
    sizes = [(m.tokens, m.variant) for m in report.measurements]
    assert sizes == [(1, "oneshot"), (1, "twoshot"), (600, "twoshot")]
    (text,) = report.skipped
    assert text.startswith("oneshot, 600 tokens: ")
    nothing = run(replace(few, tokens=(600,), backends=("oneshot",)), quiet=True)
    assert nothing.error == nothing.skipped[0], "a run of which nothing is left fails"
    with pytest.raises(RankFailed, match="without a shared expert"):
        run(replace(LAYER, shared=False, overlaps=("shared_expert",)), quiet=True)


@pytest.mark.parametrize("case", [REDUCE, LAYER, LOW, ODD], ids=lambda case: case.operator)
def test_calls_that_write_nothing_are_detected(threads, case):
    """Outputs are poisoned again between the check and the timing."""
    real = harness.measure

    def silent(group: weft.Group, calls: TimedCall, **options: Any) -> Any:
        nothing = TimedCall(dict.fromkeys(calls.steps, lambda: None), calls.total_phase)
        return real(group, nothing, **options)

    threads.setattr(harness, "measure", silent)
    report = run(replace(case, ranks=2, tokens=(5,)), quiet=True)
    assert "5 tokens: after timing, rank 0: " in (report.error or "")
    assert report.measurements == []


def test_a_wrong_sum_is_not_timed(threads):
    class Wrong(weft.AllReduce):
        def fused(self, *args, **kwargs):
            result = super().fused(*args, **kwargs)
            assert result.norm is not None
            result.norm[0, 0] += self.group.rank
            return result

    threads.setattr(weft, "AllReduce", Wrong)
    report = run(REDUCE, quiet=True)
    assert "oneshot, 1 tokens: rank 1: norm of token 0 of 1" in (report.error or "")
    assert report.measurements == []


class _Spoilt(AllToAll):
    """An all-to-all with one kind of fault on rank 1."""

    fault = ""

    def dispatch(self, *args, **kwargs):
        received = super().dispatch(*args, **kwargs)
        source, token = (received.ids >= 0).any(dim=2).nonzero()[0].tolist()
        spoil: dict[str, Callable[[], object]] = {
            "payload": lambda: received.x[source, token, 3].add_(1),
            "ids": lambda: received.ids[source, token].fill_(-1),
            "weights": lambda: received.weights[source, token].add_(1.0),
            "scales": lambda: received.payloads[1][source, token, 0].mul_(2),
            "counts": lambda: received.counts[0].add_(1),
            "stale": lambda: received.ids[0, -1, 0].fill_(0),
        }
        if self.rank == 1 and self.fault in spoil:
            spoil[self.fault]()
        return received

    def combine(self, *args, **kwargs):
        out = super().combine(*args, **kwargs)
        if self.rank == 1 and self.fault == "combine":
            out[2, 7] = 0.125
        return out


def check_all(group, case):
    with contextlib.closing(case.trials(group)) as trials:
        result = [trial.check() for trial in trials]
        group.barrier()
    return result


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("payload", r"bytes of payload 0 from rank \d of token \d of 5 is"),
        ("scales", r"bytes of payload 1 from rank \d of token"),
        ("ids", r"ids from rank \d of token"),
        ("weights", r"weights from rank \d of token"),
        ("counts", r"counts are \[6, 5\], but every rank sent 5"),
        ("stale", "slots beyond 5 tokens still hold ids"),
        ("combine", r"combined row of token 2 of 5 is \[0.125\] in columns \[7\]"),
    ],
)
def test_the_check_of_an_exchange_catches(ranks, monkeypatch, fault, text):
    monkeypatch.setattr(_Spoilt, "fault", fault)
    monkeypatch.setattr(moe, "AllToAll", _Spoilt)
    case = replace(ODD, ranks=2, tokens=(5, 8), quantize="fp8" if fault == "scales" else None)
    ((first, _), (second, _)) = ranks(2, "threads")(check_all, case)
    assert re.search(f"^rank 1: .*{text}", second or ""), second
    if first is not None:  # what rank 1 spoils before combine may reach rank 0's sums
        assert "combined row" in first


def spoiled_layer(group: weft.Group, case: LayerCase) -> tuple[str | None, ...]:
    """Return the check's messages for a correct layer and for layers with one fault."""
    result = []
    with contextlib.closing(case.trials(group)) as trials:
        trial = next(trials)
        assert isinstance(trial, LayerTrial)
        result.append(trial.check())
        trial.data.out[2, 5] += 0.125
        result.append(trial.compare())
        trial.poison()
        result.append(trial.compare())
        trial.data.logits = trial.data.logits.roll(1, dims=1)  # the reference is known
        result.append(trial.check())
        group.barrier()
    return tuple(result)


def test_the_check_of_a_layer_catches(ranks):
    case = replace(LAYER, tokens=(6,))
    for good, total, silence, experts in ranks(2, "threads")(spoiled_layer, case):
        assert good is None
        assert "error against the reference is 0.1" in total
        assert "not finite" in silence
        assert "error against the reference" in experts


def spoiled_rows(group: weft.Group) -> tuple[str | None, str | None, str | None]:
    """The check must find a wrong sum and a wrong row, also on one rank only."""
    with contextlib.closing(replace(LOW, tokens=(6,)).trials(group)) as trials:
        trial = next(trials)
        assert isinstance(trial, LowLatencyTrial)
        assert trial.check() is None
        trial.out[2, 5] += 1
        wrong_sum = trial.compare()
        sent = trial.rows_by_rank[0].clone()
        trial.rows_by_rank[0][:] += group.rank
        one_rank = trial.check()
        trial.rows_by_rank[0].copy_(sent)
        trial.rows_by_rank[0][:] += 1  # what rank 0 is believed to send; rank 0 sends it, too
        trial.x = trial.x.clone() if group.rank else trial.x - 1
        wrong_row = trial.check()
        group.barrier()
    return wrong_sum, one_rank, wrong_row


def test_the_check_of_low_latency_catches(ranks):
    rows = "rows of experts differ from the reference"
    for rank, (wrong_sum, one_rank, wrong_row) in enumerate(ranks(2, "threads")(spoiled_rows)):
        assert re.match(rf"rank {rank}: sum of token 2 of 6 is .*\[5\]", wrong_sum or "")
        assert one_rank == (f"rank 1: {rows}" if rank else None)
        assert wrong_row == f"rank {rank}: {rows}"


SAMPLED = {"samples": 11}


@pytest.mark.parametrize(
    ("case", "change", "text"),
    [
        (REDUCE, {"tokens": ()}, "nothing to measure"),
        (REDUCE, {"samples": 0}, "samples is 0"),
        (REDUCE, {"num_sms": 8}, "num_sms is 8 on cpu ranks"),
        (REDUCE, {"device": "cuda", "samples": 10}, "needs at least 11"),
        (REDUCE, {"ranks": 73}, "all-reduce of 73 ranks; it supports 1 to 72"),
        (REDUCE, {"hidden": 100}, "multiple of 8"),
        (REDUCE, {"hidden": 200, "epilogue": "fp8-group"}, "multiple of 128"),
        (LAYER, {"experts": 1}, "experts is 1; it must be at least the number of ranks, 2"),
        (LAYER, {"experts": 30}, "must divide them evenly"),
        (LAYER, {"routing": "perfect"}, "routing is 'perfect'"),
        *(
            (MOE, {"routing": f"zipf:{bad}"}, f"routing is 'zipf:{bad}'")
            for bad in ("", "a", "nan")
        ),
        (LAYER, {"device": "cuda", "model": "gpt-oss-120b", "dtype": "fp8"}, "multiples of 128"),
        (MOE, {"ranks": 99}, "ranks is 99"),
        (MOE, {"hidden": 250}, "pad hidden to 256"),
        (MOE, {"routing": "perfect", "top_k": 5, "experts": 5}, "needs 2 experts per rank"),
        (MOE, {"quantize": "fp8", "payload": "fp8"}, "the payload is fp8 already"),
    ],
)
def test_invalid_settings_are_refused(case, change, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(case, **SAMPLED | change)


@pytest.mark.parametrize("routing", ["uniform", "perfect", "zipf", "zipf:0.5", "one-hot"])
@pytest.mark.parametrize("model", ["deepseek-v3", "gpt-oss-120b", "llama-4-scout"])
def test_ids_are_distinct_and_in_range(routing, model):
    sizes = MODELS[model].routing
    case = replace(MOE, routing=routing, top_k=sizes.top_k, experts=sizes.num_experts)
    ids = generate_ids(case, 33, 2)
    assert ids.shape == (33, sizes.top_k)
    assert ids.dtype == torch.int32
    assert 0 <= int(ids.min()) <= int(ids.max()) < sizes.num_experts
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert torch.equal(ids, generate_ids(case, 33, 2)), "a rank cannot make another's ids"
    if routing not in ("perfect", "one-hot"):
        assert not torch.equal(ids, generate_ids(case, 33, 1))


def test_traffic_is_what_a_loop_counts():
    case = replace(MOE, experts=13, routing="zipf")
    ids = [generate_ids(case, 9, rank) for rank in range(4)]
    ids[2][4, 1:] = -1
    owner = Placement.blocks(13, 4).ranks
    rows, choices = ([[0] * 4 for _ in range(4)] for _ in range(2))
    for source in range(4):
        for row in ids[source].tolist():
            owners = [owner[expert] for expert in row if expert >= 0]
            for target in owners:
                choices[source][target] += 1
            for target in set(owners):
                rows[source][target] += 1
    assert count_token_rows(ids, 13).tolist() == rows
    assert count_choice_rows(ids, 13).tolist() == choices
    out = [sum(rows[r]) - rows[r][r] for r in range(4)]
    into = [sum(rows[s][r] for s in range(4)) - rows[r][r] for r in range(4)]
    assert max_remote_rows(count_token_rows(ids, 13)) == max(out + into)
    assert case.count_traffic(ids)["chosen"] == 9 * 4


def test_low_latency_rows_go_out_by_rank_and_back_by_choice():
    case = replace(LOW, experts=4, reduce="receiver")
    ids = [torch.tensor([[0, 2, 3], [2, 3, -1]]), torch.tensor([[0, 1, 2], [3, -1, -1]])]
    # Rank 0 sends both tokens to rank 1, for two choices each; rank 1 one token for two.
    result, shape = case.count_traffic(ids), case.config.shape
    assert (result["chosen"], result["rows_out"], result["rows_back"]) == (5, 2, 4)
    assert result["out_bytes"] == 2 * shape.sent_bytes
    assert result["back_bytes"] == 4 * shape.back_bytes
    assert replace(case, reduce="sender").count_traffic(ids)["rows_back"] == 2


def test_a_load_matches_a_count_by_hand():
    case = replace(LAYER, model="qwen3-30b-a3b", experts=8, shared=False)
    ids = [torch.tensor([[0, 1], [0, 4]]), torch.tensor([[0, 1]])]
    weights = 3 * 256 * 128 * 2
    assert weight_bytes(case.config, "bf16", 128) == weights
    row, fp8 = 256 * 2, 256 + 2 * 4  # with a float32 scale for 128 columns
    # Rank 0 has experts 0 and 1, which three tokens reach; two are its own to read and write.
    memory = 2 * weights + 3 * 2 * row + 2 * 2 * row
    # One row goes from rank 0 to rank 1, one from rank 1 to rank 0; both come back.
    assert compute_load_from_ids(case, ids) == ExpertLoad(3, 6 / 8, 3, memory, 2 * row)
    out = compute_load_from_ids(replace(case, quantize="fp8"), ids)
    assert (out.wire_bytes, out.hbm_bytes) == (fp8 + row, memory - 3 * (row - fp8))
    assert compute_load_from_ids(replace(case, combine_dtype="fp8"), ids).wire_bytes == row + fp8
    assert compute_load_from_ids(replace(case, **FP8), ids).wire_bytes == 2 * fp8
    biased = replace(LAYER, model="gpt-oss-120b").config
    assert weight_bytes(biased, "bf16", 128, biased=True) == weights + 2 * (2 * 128 + 256)
    stacked = generate_local_experts(replace(LAYER, model="gpt-oss-120b", dtype="mxfp4"), (3,), CPU)
    held = sum(tensor.numel() * tensor.itemsize for tensor in stacked.tensors)
    assert weight_bytes(biased, "mxfp4", 128, biased=True) == held


def test_rows_of_all_reduces_have_bytes_and_floors():
    payload, gpus = 128 * 7168 * 2, ["NVIDIA H200"] * 8
    assert wire_bytes("oneshot", payload, 8) == 7 * payload
    assert wire_bytes("twoshot", payload, 8) == 2 * 7 / 8 * payload
    result = Measurement("auto", 128, "by hand", {"call": [[40.0]] * 8}, {"chosen": "twoshot"})
    case = replace(REDUCE, **ON_8, tokens=(128,), hidden=7168, backends=("auto",))
    (row,) = build_rows(Report(case, {"gpus": gpus}, [result]))
    assert (row.moved, row.more) == (wire_bytes("twoshot", payload, 8), {"chosen": "twoshot"})
    assert row.logical == pytest.approx(payload / 40 / 1e3)
    assert row.floor == allreduce_floor_us(payload, 8, gpus)
