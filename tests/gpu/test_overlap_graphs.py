# SPDX-License-Identifier: Apache-2.0
"""Overlap under graph replay, delays and adverse schedules: no word may differ.

The bodies are in tests/moe/test_overlapping.py, and CPU ranks rehearse them.
"""

import functools
from typing import Any

import pytest
import torch

import weft
from tests.moe.test_overlapping import MODES, replay, run_odd_rounds

triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
globaltimer = pytest.importorskip("triton.language.extra.cuda").globaltimer
pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(150)]

BF16: dict[str, Any] = {"gemm": "grouped"}
FP8: dict[str, Any] = {"gemm": "grouped", "fp8": True, "quantize": "fp8"}
FP8_HOME: dict[str, Any] = FP8 | {"combine_dtype": "fp8"}  # which gemm_push does not have
SOUND = dict.fromkeys(MODES, 0)
LEFT_SMS = 8  # that a filler leaves to everyone else


def count() -> int:
    return min(8, torch.cuda.device_count())


def every_dtype(group: weft.Group, replays: int) -> dict[str, dict[str, int]]:
    return {
        "bf16": replay(group, replays, BF16),
        "fp8": replay(group, replays // 4, FP8),
        "fp8 home": replay(group, replays // 10, FP8_HOME, modes=("shared_expert",)),
    }


def test_a_hundred_thousand_replays_have_the_bits_of_no_overlap(ranks):
    ranks_of = count()
    reported = ranks(ranks_of, "cuda")(every_dtype, 100_000, timeout=140.0)
    sound = {"bf16": SOUND, "fp8": SOUND, "fp8 home": {"shared_expert": 0}}
    assert reported == [sound] * ranks_of


def every_odd_round(group: weft.Group) -> list[dict[str, int]]:
    return [
        run_odd_rounds(group, 500, top_k, rows, options)
        for top_k, rows, options in ((1, 8, BF16), (3, 48, BF16), (3, 8, FP8))
    ]


def test_late_ranks_and_odd_routing_change_nothing(ranks):
    ranks_of = count()
    reported = ranks(ranks_of, "cuda")(every_odd_round, timeout=140.0)
    assert reported == [[SOUND] * 3] * ranks_of


def serialised(group: weft.Group) -> list[dict[str, int]]:
    return [replay(group, 400, BF16), run_odd_rounds(group, 60, 3, 8, BF16)]


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_a_driver_that_serialises_is_no_deadlock(ranks, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    ranks_of = count()
    reported = ranks(ranks_of, "cuda")(serialised, timeout=140.0)
    assert reported == [[SOUND] * 2] * ranks_of


@triton.jit
def occupy(duration_ns):
    end = globaltimer() + duration_ns
    now = globaltimer()
    while now < end:
        now = globaltimer()


def fill(stream: torch.cuda.Stream, sms: int, done: int) -> None:
    """Occupy all threads of all but LEFT_SMS SMs for 0.2 ms before every fourth round."""
    if done % 4 == 0:
        with torch.cuda.stream(stream):
            occupy[(2 * (sms - LEFT_SMS),)](200_000, num_warps=32)


def crowded(group: weft.Group) -> list[dict[str, int]]:
    sms = torch.cuda.get_device_properties(group.device).multi_processor_count
    reported = []
    for priority in (0, -5):  # as the layer's own streams, and before them
        filler = functools.partial(fill, torch.cuda.Stream(priority=priority), sms)
        filler(0)
        for graphs in (True, False):
            reported.append(replay(group, 600, BF16, filler, graphs=graphs))
    return reported


def test_a_crowded_gpu(ranks):
    ranks_of = count()
    reported = ranks(ranks_of, "cuda")(crowded, timeout=140.0)
    assert reported == [[SOUND] * 4] * ranks_of
