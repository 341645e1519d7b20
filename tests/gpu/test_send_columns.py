"""Layers whose down projection makes its columns in chunks, sent meanwhile; ranks share a GPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.gemm.cases import Case as Gemm
from tests.moe.layers import CONFIGS, EXPERTS, Case
from tests.moe.overlapping import WIDE, Plan, replay
from tests.moe.test_layer import poison, settle
from tests.patience import hurry
from tests.rounds import bits
from weft.errors import InvalidArgument, PeerDied, PeerTimeout, RankFailed, TokenOverflow
from weft.gemm import STORE, WgmmaPlan
from weft.gemm.config import MXFP4, StoreColumns, is_hopper
from weft.gemm.kernels import OPERANDS, GemmShape, preload
from weft.moe import Replicas, balance

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not is_hopper(torch.device("cuda")):
        pytest.skip("only the Hopper GEMM makes chunks of columns")


DEEP = replace(CONFIGS["deepseek"], hidden=1024, intermediate=256, shared=128)
FP8: dict[str, Any] = {"fp8": True}
VARIANTS: dict[str, tuple[weft.moe.MoEConfig, dict[str, Any]]] = {
    "fp8": (DEEP, FP8),
    "fp8 home": (DEEP, {**FP8, "combine_dtype": "fp8"}),
    "bf16": (DEEP, {}),
    "bf16, fp8 home": (DEEP, {"combine_dtype": "fp8"}),
    "fp16": (replace(DEEP, dtype=torch.float16), {}),
    "biased": (replace(CONFIGS["gpt-oss"], hidden=1024, intermediate=256), {}),
    "shared expert beside": (DEEP, {**FP8, "overlap": "shared_expert"}),
    "few rows": (DEEP, {**FP8, "max_rows": 40}),
    "one rank has all experts": (DEEP, {**FP8, "expert_map": [1] * EXPERTS}),
}
# From no token at all to experts of several of the highest tiles.
BATCHES = ((40, 9), (0, 7), (13, 0), (0, 0), (1, 1), (700, 650), (300, 3))
PAIRS = ((4, 4), (2, None), (None, 4))  # chunks of each rank


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, MXFP4, torch.bfloat16])
def test_a_gemm_in_chunks_has_the_bits_of_one(dtype):
    case = Gemm(dtype, counts=(5, 0, 130, 1, 700, 257), n=1024, k=512)
    made, plans = case.make("cuda"), [WgmmaPlan(64), WgmmaPlan(160 if dtype == MXFP4 else 256)]
    sizes = len(case.counts), case.n, case.k
    ones = [GemmShape(*sizes, plan, "store", operand=OPERANDS[dtype]) for plan in plans]
    preload([replace(one, column_chunks=chunks) for one in ones for chunks in (1, 4)])
    for plan in plans:
        wanted = made.call(STORE, plan).numbers
        for ctas in (2, 64, 124, 132):
            progress = torch.zeros(3, dtype=torch.int32, device="cuda")
            got = made.call(StoreColumns(4, progress.data_ptr(), ctas), plan).numbers
            assert torch.equal(bits(got), bits(wanted))
            assert progress.tolist() == [ctas] * 3


def opened(group: weft.Group, case: Case, options: dict[str, Any], chunks: object) -> weft.MoE:
    given = {"mode": "throughput", "gemm": "grouped", "overlap": "none", "max_tokens": 700}
    given |= {"timeout": 60.0, **options, "_send_columns": chunks}
    layer = case.open(group, **given)
    has_chunks = chunks is not None and layer.exchange.num_local_experts > 0
    assert (layer._workspace._columns is not None) == has_chunks
    return layer


def called(layer: weft.MoE, case: Case) -> torch.Tensor:
    x, logits = case.of(layer.exchange.rank, layer.exchange.group.device)
    poison(layer)
    out = layer(x, logits, out=torch.full_like(x, float("nan")))
    settle(layer.exchange.group)
    return out


def same_bits(group: weft.Group, name: str, mxfp4: bool) -> None:
    config, options = VARIANTS[name]
    case = Case(config, tokens=BATCHES[0], mxfp4=mxfp4)
    with opened(group, case, options, None) as plain:
        for pair in PAIRS:
            with opened(group, case, options, pair[group.rank]) as layer:
                for seed, tokens in enumerate(BATCHES):
                    now = case.next(seed=seed, tokens=tokens)
                    assert torch.equal(bits(called(layer, now)), bits(called(plain, now)))
                    if "max_rows" not in options:
                        layer.check()
                if "max_rows" in options:
                    with pytest.raises(TokenOverflow):
                        layer.check()
            settle(group)


@pytest.mark.parametrize("name", VARIANTS)
def test_bits_are_those_of_no_overlap(ranks, name):
    ranks(2, "cuda")(same_bits, name, False, timeout=300.0)


def test_mxfp4_weights_too(ranks):
    ranks(2, "cuda")(same_bits, "fp8", True, timeout=300.0)


def relocated(group: weft.Group) -> None:
    def placed(loads: list[float]) -> Replicas:
        return balance(loads, group.size, replicas=2)

    first, then = placed([9.0, 1, 1, 7, 1, 1, 2, 3]), placed([1.0, 1, 8, 1, 1, 6, 1, 9])
    case, options = Case(DEEP, tokens=(30, 17)), {**FP8, "replicas": first}

    with opened(group, case, options, None) as plain, opened(group, case, options, 4) as layer:
        for seed, placement in enumerate((None, then, first)):
            if placement is not None:
                plain.relocate(placement)
                layer.relocate(placement)
            now = case.next(seed=seed)
            assert torch.equal(bits(called(layer, now)), bits(called(plain, now)))
            layer.check()


def test_experts_that_moved(ranks):
    ranks(2, "cuda")(relocated, timeout=300.0)


def refused(group: weft.Group) -> str:
    with pytest.raises(InvalidArgument) as caught:
        Case(DEEP, tokens=(4, 4)).open(group, **FP8, _send_columns=3)
    return str(caught.value)


def test_chunks_of_part_of_a_tile_are_refused(ranks):
    words = "_send_columns is 3: chunks are multiples of 256 columns, and hidden is 1024"
    assert all(words in text for text in ranks(2, "cuda")(refused))


def replayed(group: weft.Group) -> list[dict[str, int]]:
    """Graphs whose sizes and counts change; every fourth round all want the same experts."""
    plan = Plan(2000, ("columns",), config=WIDE)
    given = ({"gemm": "grouped"}, {"fp8": True, "quantize": "fp8"}, {"combine_dtype": "fp8"})
    return [replay(group, plan, {"mode": "throughput", **options}) for options in given]


def test_replays_have_the_bits_of_no_overlap(ranks):
    assert ranks(2, "cuda")(replayed, timeout=300.0) == [[{"columns": 0}] * 3] * 2


def stuck(group: weft.Group, folder: str, dies: bool) -> None:
    """Rank 1's down projection never begins, so its senders wait; it is killed, or runs out."""
    case = Case(DEEP, tokens=(30, 17))
    with opened(group, case, FP8, 4) as layer:
        for seed in range(3):
            called(layer, case.next(seed=seed))
        layer.check()
        x, logits = case.of(group.rank, group.device)
        settle(group)
        if not dies:
            hurry(layer.exchange, 2.0)
        if dies or group.rank == 1:  # then every rank's senders wait
            y = layer._workspace._experts._y  # type: ignore[attr-defined]
            vars(layer._workspace._experts)["down"] = lambda weights: y
        moment = Path(folder, "moment")
        if dies and group.rank == 1:

            def end() -> None:
                moment.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Timer(1.0, end).start()
        layer(x, logits)
        torch.cuda.synchronize()
        if dies:
            waited = time.monotonic() - float(moment.read_text())
            with pytest.raises(PeerDied, match="rank 1 died"):
                layer.check()
            assert waited < 5.0, "the deadline is a minute"
            Path(folder, "0").write_text(f"{waited}")
            return
        words = "rank 1 gave up, waiting for its own part"
        if group.rank == 1:
            words = "send_columns, epoch 4: 0 of [0-9]+ CTAs of this rank's down projection"
        with pytest.raises(PeerTimeout, match=words):
            layer.check()
        group.barrier()


def test_a_rank_killed_while_senders_wait_is_named(ranks, tmp_path):
    with pytest.raises(RankFailed, match="rank 1 of 2 died"):
        ranks(2, "cuda")(stuck, str(tmp_path), True)
    assert (tmp_path / "0").exists()


def test_a_gemm_that_never_begins_is_named_by_the_deadline(ranks, tmp_path):
    ranks(2, "cuda")(stuck, str(tmp_path), False)
