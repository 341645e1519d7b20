"""Sizes, settings, routing and the bytes counted from it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from weft.bench.cases import CASES, Settings, parse_backends, parse_tokens
from weft.bench.routing import make_ids, token_rows, traffic_of
from weft.errors import InvalidArgument
from weft.ops.placement import Placement

SETTINGS = Settings(
    ranks=4,
    device="cpu",
    tokens=(8,),
    max_tokens=None,
    hidden=256,
    top_k=4,
    experts=16,
    router="random",
    backends=("onesided",),
    dtype="bf16",
    payload="bf16",
    graph=True,
    samples=3,
    seed=1,
)


def test_parse_tokens():
    assert parse_tokens("1, 8,64") == (1, 8, 64)
    assert parse_tokens("1..4096") == tuple(2**i for i in range(13))
    assert parse_tokens("3..20,4,6") == (3, 6, 12, 4)
    assert parse_backends("onesided,collective,onesided") == ("onesided", "collective")
    for text in ("", "x", "8..4", "0..4", "1,,2", "-1"):
        with pytest.raises(InvalidArgument, match="tokens"):
            parse_tokens(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"payload": "int4"}, "payload is 'int4'"),
        ({"dtype": "fp64"}, "dtype is 'fp64'"),
        ({"backends": ("nccl",)}, "backend is 'nccl'"),
        ({"backends": ()}, "nothing to measure"),
        ({"tokens": (0, 4)}, "0 tokens"),
        ({"max_tokens": 4}, "8 tokens do not fit max_tokens=4"),
        ({"top_k": 17}, "top_k is 17 of 16"),
        ({"samples": 0}, "0 samples"),
        ({"payload": "fp8", "hidden": 200}, "multiple of 128"),
        ({"combine_by": "fp8", "hidden": 200}, "multiple of 128"),
        ({"quantize": "mxfp8", "hidden": 96}, "multiple of 128"),
        ({"combine_by": "mail"}, "combine_by is 'mail'; choose one of pull, push, fp8"),
        ({"quantize": "int4"}, "quantize is 'int4'; choose one of fp8, mxfp8"),
        ({"quantize": "fp8", "payload": "fp8"}, "the payload is fp8 already"),
        ({"combine_by": "push", "backends": ("collective",)}, "only onesided has it"),
        ({"halves": True, "backends": ("collective",)}, "halves is True and the backends are"),
        ({"beside": "matmul"}, "on cpu ranks; the product shares a GPU"),
        ({"beside": "matmul", "device": "cuda"}, "num_sms is not given"),
        ({"beside": "matmul:100", "device": "cuda", "num_sms": 8}, "write matmul, or matmul:SIZE"),
        ({"beside": "conv", "device": "cuda", "num_sms": 8}, "beside is 'conv'; write matmul"),
        ({"beside": "matmul", "device": "cuda", "num_sms": 8, "graph": False}, "leave --eager"),
    ],
)
def test_settings_refuse(change, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(SETTINGS, **change)


def test_row_bytes():
    assert SETTINGS.sent_bytes == SETTINGS.returned_bytes == 512
    fp8 = replace(SETTINGS, payload="fp8", dtype="fp32")
    assert (fp8.sent_bytes, fp8.returned_bytes) == (256 + 2 * 4, 1024)
    both = replace(SETTINGS, quantize="mxfp8", combine_by="fp8")
    assert (both.sent_bytes, both.returned_bytes) == (256 + 8, 256 + 2 * 4)
    assert replace(SETTINGS, combine_by="push").returned_bytes == 512
    collective = both.of_backend("collective")
    assert (collective.sent_bytes, collective.returned_bytes) == (512, 512)
    assert both.of_backend("onesided") is both


def test_the_wire_in_words():
    assert SETTINGS.wire == "bf16 out, bf16 back"
    assert replace(SETTINGS, payload="fp8").wire == "fp8 + scales out, bf16 back"
    assert replace(SETTINGS, combine_by="push").wire == "bf16 out, bf16 back (pushed)"
    both = replace(SETTINGS, quantize="fp8", combine_by="fp8")
    assert both.wire == "fp8 + scales out, quantised by dispatch, fp8 + scales back (pushed)"
    on_gpus = replace(SETTINGS, device="cuda", num_sms=16)
    assert replace(on_gpus, beside="matmul").product_size == 8192
    assert replace(on_gpus, beside="matmul:4096").product_size == 4096


@pytest.mark.parametrize("router", ["random", "perfect", "zipf", "one-hot"])
@pytest.mark.parametrize("case", CASES)
def test_ids_are_distinct_and_in_range(router, case):
    sizes = CASES[case]
    settings = replace(SETTINGS, router=router, top_k=sizes.top_k, experts=sizes.experts)
    ids = make_ids(settings, 33, 2)
    assert ids.shape == (33, sizes.top_k)
    assert ids.dtype == torch.int32
    assert int(ids.min()) >= 0
    assert int(ids.max()) < sizes.experts
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert torch.equal(ids, make_ids(settings, 33, 2)), "a rank cannot make another's ids"
    if router in ("random", "zipf"):
        assert not torch.equal(ids, make_ids(settings, 33, 1))


@pytest.mark.parametrize(("ranks", "top_k", "experts"), [(4, 8, 32), (8, 4, 20), (3, 5, 11)])
def test_perfect_spreads_evenly(ranks, top_k, experts):
    settings = replace(SETTINGS, router="perfect", ranks=ranks, top_k=top_k, experts=experts)
    ids = [make_ids(settings, 4 * ranks, rank) for rank in range(ranks)]
    rows = token_rows(ids, experts)
    assert set(rows.flatten().tolist()) == {4 * ranks * min(top_k, ranks) // ranks}
    owner = torch.tensor(Placement.blocks(experts, ranks).ranks)
    loads = torch.bincount(owner[torch.cat(ids).long()].flatten(), minlength=ranks)
    assert len(set(loads.tolist())) == 1


def test_perfect_needs_enough_experts():
    settings = replace(SETTINGS, router="perfect", top_k=5, experts=5)
    with pytest.raises(InvalidArgument, match="needs 2 experts on each rank"):
        make_ids(settings, 4, 0)


def test_router_files(tmp_path):
    rows = np.array([[0, 5, 9, 15], [1, -1, -1, 2], [3, 4, 6, 7]])
    np.save(tmp_path / "ids.npy", rows)
    (tmp_path / "ids.json").write_text(json.dumps(rows.tolist()))
    for name in ("ids.npy", "ids.json"):
        settings = replace(SETTINGS, router=str(tmp_path / name))
        # Rank 1 goes on where rank 0 ended, and round again.
        assert make_ids(settings, 2, 1).tolist() == [rows[2].tolist(), rows[0].tolist()]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[0, 1, 2]]", "3 ids per row; top_k is 4"),
        ("[[0, 1, 2, 16]]", r"ids 0\.\.16; allowed"),
        ("[[0, 1, 2, 2]]", "row 0 names an expert twice"),
        ("[[0.5, 1, 2, 3]]", "float64"),
        ("[]", "it must hold integer ids"),
        ("{", "cannot be read"),
    ],
)
def test_router_files_are_checked(tmp_path, text, problem):
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=problem):
        make_ids(replace(SETTINGS, router=str(path)), 2, 0)


def test_router_files_are_not_unpickled(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.array([[object()]]), allow_pickle=True)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        make_ids(replace(SETTINGS, router=str(path)), 2, 0)
    with pytest.raises(InvalidArgument, match="choose one of random, perfect"):
        make_ids(replace(SETTINGS, router="randon"), 2, 0)


def test_traffic_is_what_a_loop_counts():
    settings = replace(SETTINGS, experts=13, router="zipf")
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
    traffic = traffic_of(ids, 13)
    assert traffic.wire == max(out + into)
    assert traffic.chosen == 9 * 4
