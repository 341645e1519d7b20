# SPDX-License-Identifier: Apache-2.0
"""Several hosts on GPUs: ranks of one machine that WEFT_HOST separates, with NCCL between them."""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch

import weft
from tests.hosts.spanning import on_hosts, play
from tests.hosts.test_layer import LAYERS
from tests.hosts.test_lowlatency import rounds as low_latency_rounds
from tests.moe.layers import CONFIGS, Case, tolerance_of
from tests.rounds import Round, bits
from weft import reference
from weft.bench.harness import capture, synchronize_ranks
from weft.errors import GroupError, RankFailed

pytestmark = pytest.mark.gpu(2)  # NCCL needs a GPU for each rank
GPUS = 4 if torch.cuda.device_count() >= 4 else 2
TOKENS = (5, 0, 8, 2)[-GPUS:]
OPTIONS: dict[str, dict[str, Any]] = {
    "pull": {},
    "push": {"combine": "push"},
    "fp8 back": {"combine_dtype": "fp8"},
    "fp8": {"quantize": "fp8"},
    "mxfp8": {"quantize": "mxfp8"},
    "halves": {"split_phase": True},
}


def made(group: weft.Group, case: Round, **options: Any) -> weft.AllToAll:
    return weft.AllToAll(group, dtype=case.dtype, **case.sizes(8) | options)


def rounds(group: weft.Group) -> None:
    case = Round(tokens=TOKENS, hidden=256, add=True)
    for name, options in OPTIONS.items():
        with made(group, case, **options) as a2a:
            for seed in range(3):
                play(a2a, case.next(seed=seed), halves=name == "halves")
            torch.cuda.synchronize()
            a2a.check()
    low_latency_rounds(group, TOKENS)


def test_hosts_match_the_reference(ranks):
    ranks(GPUS, "cuda")(on_hosts, 2, rounds)


def replayed(group: weft.Group) -> None:
    case = Round(tokens=(8,) * group.size, hidden=256)
    with made(group, case) as a2a:
        x, ids, weights, _ = case.inputs_of(group.rank, group.device)
        out = torch.empty_like(x)

        def call() -> None:
            received = a2a.dispatch(x, ids, weights)
            y = (received.x.float() * 2).to(x.dtype)
            a2a.combine(y, out=out)

        call()
        synchronize_ranks(group)
        graph = capture(call)
        for seed in range(20):
            drawn = case.next(seed=seed).inputs_of(group.rank, x.device)
            for own, new in zip((x, ids, weights), drawn, strict=False):  # without what is added
                own.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            replay = out.clone()
            call()
            torch.cuda.synchronize()
            assert torch.equal(bits(replay), bits(out))
        a2a.check()


def test_rounds_are_replayed_from_graphs(ranks):
    ranks(GPUS, "cuda")(on_hosts, 2, replayed)


def layers(group: weft.Group) -> None:
    for name, (config, options) in LAYERS.items():
        case = Case(CONFIGS[config], tokens=TOKENS)
        x, logits = case.inputs_of(group.rank, group.device)
        with case.open(group, **options) as layer:
            out = layer(x, logits)
            expected = case.expected(layer, x, logits, quantize=options.get("quantize"))
            torch.cuda.synchronize()
            layer.check()
        if len(x):
            coarse = 2.0**-3 if options.get("combine_dtype") else 0.0
            most = 1.5 * tolerance_of(case.config, expected) + coarse * float(expected.abs().max())
            assert float((out.float() - expected).abs().max()) <= most, name


def test_layers_match_the_reference(ranks):
    ranks(GPUS, "cuda")(on_hosts, 2, layers)


def lose_host(group: weft.Group, kill: bool) -> tuple[str, float]:
    """Rank 0's host dies, or makes no call; every other rank raises in time."""
    case = Round(tokens=(8,) * group.size, hidden=256)
    with made(group, case, timeout=2.0) as a2a:
        for seed in range(3):
            play(a2a, case.next(seed=seed))
        group.barrier()
        if group.host == 0:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(15.0)
            return "slept", 0.0
        began = time.monotonic()
        try:
            while time.monotonic() - began < 60.0:
                x, ids, weights, _ = case.inputs_of(group.rank, group.device)
                received = a2a.dispatch(x, ids, weights)
                a2a.combine(reference.identity_experts(received, x.dtype))
                torch.cuda.synchronize()
                a2a.check()
        except GroupError as error:
            return type(error).__name__, time.monotonic() - began
    return "no error", 60.0


def test_a_host_that_makes_no_call_is_an_error_in_time(ranks):
    for kind, after in ranks(GPUS, "cuda")(on_hosts, 2, lose_host, False):
        assert kind in ("slept", "RailFailed", "PeerLeft")
        assert after < 8.0


def test_a_host_that_dies_ends_the_others(ranks):
    """Only the ranks of that host died; the others returned their errors."""
    with pytest.raises(RankFailed, match=rf"^rank \d of {GPUS} died: .*SIGKILL") as failed:
        ranks(GPUS, "cuda")(on_hosts, 2, lose_host, True, timeout=120.0)
    named = set(re.findall(r"rank (\d)", str(failed.value)))
    assert named == {str(rank) for rank in range(GPUS // 2)}
