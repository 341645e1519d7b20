# SPDX-License-Identifier: Apache-2.0
"""A layer's experts load at construction all kernels that calls may need."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.gemm import GemmPlan, WgmmaPlan, reference
from weft.gemm import config as gemm_config
from weft.gemm.call import GemmCall, check_call
from weft.gemm.config import FP8, MXFP4
from weft.gemm.kernels import GemmShape, MlpShape, Shape
from weft.gemm.operator import ExpertGemm
from weft.heap.local import TensorSpec
from weft.moe import MODELS, ExpertWeights, MoEConfig
from weft.moe.experts import grouped_experts
from weft.moe.experts.torch_experts import RowsByExpert

NAMES = ("gpt-oss-120b", "qwen3-30b-a3b", "kimi-k3", "nemotron-3-nano")
BIASED, PLAIN, SITU, UNGATED = (MODELS[name] for name in NAMES)
HALVES = (torch.bfloat16, torch.float16)
# Of the layer and of its weights, if they have scales: tiled products take no other float32.
DTYPES = [(dtype, stored) for dtype in HALVES for stored in (None, FP8, MXFP4)]
DTYPES.append((torch.float32, FP8))
SIZES = ((256, 256), (384, 128), (264, 72), (512, 512))  # hidden, intermediate
HINTS = (0, 1, 8, 20, 32, 64, 80, 100, 128, 150, 200, 300, 800, 1000, 2500, 5000)
MOST = (0, 8, 64, 5000)


def allocate_host(specs: Iterable[TensorSpec]) -> list[torch.Tensor]:
    return [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in specs]


def rows_of(config: MoEConfig, rows: tuple[int, ...], experts: int, *, fp8: bool) -> RowsByExpert:
    x = torch.zeros(*rows, config.hidden).to(FP8 if fp8 else config.dtype)
    scales = (torch.zeros(*rows, config.hidden // 128),) if fp8 else ()
    ends = torch.zeros(experts + 1, dtype=torch.int32)
    addresses = torch.zeros(rows, dtype=torch.int64).flatten()
    broken = torch.zeros(1, dtype=torch.int32) if len(rows) == 2 else None
    return RowsByExpert((x, *scales), ends, ends[1:].clone(), addresses, broken)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> set[Shape]:
    """Return the kernels that are loaded on a CPU that poses as a Hopper GPU."""
    kinds: set[Shape] = set()

    def preload_kernels(wanted: Iterable[Shape]) -> None:
        kinds.update(wanted)

    for module in (grouped_experts, gemm_config):
        monkeypatch.setattr(module, "is_hopper", lambda device: device is not None)
    monkeypatch.setattr(grouped_experts, "preload_kernels", preload_kernels)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return kinds


def heights(shapes: set[Shape]) -> set[tuple[bool, int]]:
    """Return the heights of tiles, with one GEMM and with both."""
    fused = {(True, kind.up.plan.block_m) for kind in shapes if isinstance(kind, MlpShape)}
    return fused | {(False, kind.plan.block_m) for kind in shapes if isinstance(kind, GemmShape)}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[Shape]:
    kinds: set[Shape] = set()

    def compute(call: GemmCall, plan: GemmPlan | WgmmaPlan) -> None:
        if isinstance(plan, WgmmaPlan):
            kinds.add(GemmShape.from_call(call, plan))

    def fuse(*gemms: ExpertGemm, plan: WgmmaPlan, **options: Any) -> None:
        groups = {name: options[name] for name in ("counts", "offsets")}
        shapes = []
        for gemm in gemms:
            scales = {"a_scale": gemm.a_scale, "b_scale": gemm.b_scale, "bias": None}
            kwargs = groups | scales | {"out": gemm.out, "epilogue": gemm.epilogue}
            call = check_call(gemm.a, gemm.b, **kwargs)
            shapes.append(GemmShape.from_call(call, plan))
        kinds.add(MlpShape.from_shapes(*shapes))

    monkeypatch.setattr(reference, "run_reference", compute)
    monkeypatch.setattr(grouped_experts, "grouped_mlp", fuse)
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masked", "pushes"), [(False, False), (False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize("experts", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "stored"), DTYPES)
@pytest.mark.parametrize(
    "model", [BIASED, PLAIN, SITU, UNGATED], ids=["biased", "plain", "situ", "ungated"]
)
def test_no_call_needs_a_kernel_that_was_not_loaded(
    loaded, used, model, dtype, stored, experts, masked, pushes
):
    fp8 = stored is not None
    for hidden, inner in SIZES:
        if fp8 and (hidden % 128 or inner % 128):
            continue
        routing = replace(model.routing, top_k=1)  # and so a row of each expert for each token
        config = replace(model, routing=routing, dtype=dtype, hidden=hidden, intermediate=inner)
        rows = (experts, 8) if masked else (24,)
        options: dict[str, Any] = {"fp8": fp8, "use_pdl": True, "allocate": allocate_host}
        options |= {"gemm_push": pushes, "num_ranks": config.routing.num_experts}
        weights = ExpertWeights._allocate(config, experts, torch.device("cpu"), stored or dtype)
        grouped = rows_of(config, rows, experts, fp8=fp8)
        for most in MOST:
            loaded.clear()
            used.clear()
            layer = grouped_experts.GroupedExperts(
                config, rows, experts, max_tokens=most, **options
            )
            layer.load_kernels(weights)
            for hint in (hint for hint in HINTS if hint <= most):
                run = layer.run_push if pushes else layer.run
                run(weights, grouped, tokens=hint)
            assert used <= loaded
            assert heights(loaded) == heights(used), "none is loaded in vain"
        if stored == FP8:
            tiled = config.gate_up_rows % 256 == 0 or hidden % 256 == 0
            assert bool(used) == (tiled and not config.biased)
        else:
            assert bool(used) == (experts > 1 or (masked and pushes) or stored == MXFP4)
