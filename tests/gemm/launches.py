# SPDX-License-Identifier: Apache-2.0
"""Calls on CPU tensors that take the GPU path up to their launches."""

import contextlib
from collections.abc import Sequence

import pytest
import torch

from weft.gemm import GemmPlan, WgmmaPlan, kernels, operator, triton_launch
from weft.gemm.call import GemmCall


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
