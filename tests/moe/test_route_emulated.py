"""The routing kernel on a CPU chooses and weighs as torch does, for every kind of rule."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.emulator.emulate import build_library, emulated_tree
from tests.moe.routed import RULES, hold_to_torch
from tests.recorded import reads
from weft.moe import Routed, Routing
from weft.moe.kernels import ROUTE_THREADS as THREADS
from weft.moe.kernels import TOKENS
from weft.moe.router import route_args

pytestmark = reads("tests/emulator/*.hpp")

ROWS = 9  # two CTAs and a quarter


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """One function for each rule."""
    root = emulated_tree(tmp_path_factory.mktemp("route"))
    entries = "".join(
        'extern "C" __attribute__((visibility("default"))) '
        f"void route_{i}(const weft::RouteArgs* a, unsigned ctas) {{ "
        f"emulated::launch(ctas, {THREADS}, 1, [a] {{ weft::route<{rule.literal()}>(*a); }}); }}\n"
        for i, rule in enumerate(RULES.values())
    )
    text = f"#include <weft/moe/route.cuh>\n{entries}"
    return ctypes.CDLL(str(build_library(root, text)))


@pytest.mark.parametrize("name", RULES)
def test_it_chooses_and_weighs_as_torch(kernels, name):
    entry = getattr(kernels, f"route_{list(RULES).index(name)}")

    def run(
        routing: Routing,
        logits: torch.Tensor,
        correction: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
    ) -> Routed:
        ids = torch.full((len(logits), routing.top_k), -77, dtype=torch.int32)
        weights = torch.full(ids.shape, -77.0)
        args = route_args(logits, correction, num_tokens, routing.scale, ids, weights)
        entry(ctypes.byref(args), -(-len(logits) // TOKENS))
        return Routed(ids, weights)

    hold_to_torch(run, RULES[name], ROWS, "cpu")
