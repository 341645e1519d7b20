"""Checkpoints read onto a GPU: the bits that reading onto the CPU gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.test_checkpoint import EXPERTS, in_fp8, read, same, save, separate
from weft.moe import ExpertWeights, balance

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def on_cpu(weights: ExpertWeights) -> ExpertWeights:
    kept = [name for name in ExpertWeights.__slots__ if getattr(weights, name) is not None]
    assert all(getattr(weights, name).is_cuda for name in kept)
    return replace(weights, **{name: getattr(weights, name).cpu() for name in kept})


@pytest.mark.parametrize("stored", ["bf16", "fp8"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_gpu_holds_the_same_bits(tmp_path, stored, fp8):
    folder = save(tmp_path, in_fp8(separate()) if stored == "fp8" else separate())
    everyone = range(EXPERTS)
    found = read(folder, *everyone, fp8=fp8, device=DEVICE)
    same(on_cpu(found), read(folder, *everyone, fp8=fp8))


def test_replicas_on_a_gpu():
    placed = balance([3, 1, 1, 1], 2, 2)
    here, there = placed.table(torch.device("cpu")), placed.table(DEVICE)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
