# SPDX-License-Identifier: Apache-2.0
"""The routing kernel on a CPU chooses and weighs as torch does, for every kind of rule."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from tests.moe.routed import RULES, hold_to_torch
from weft.moe import Routed, Routing
from weft.moe.kernels import ROUTE_THREADS as THREADS
from weft.moe.kernels import TOKENS
from weft.moe.router import route_args

pytestmark = pytest.mark.slow

ROWS = 9  # two CTAs and a quarter


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """One function for each rule."""
    root = emulated_tree(tmp_path_factory.mktemp("route"))
    entries = "".join(
        entry(f"route_{i}", "RouteArgs", f"route<{rule.literal()}>", ranks=None)
        for i, rule in enumerate(RULES.values())
    )
    text = f"#include <weft/moe/route.cuh>\n{entries}"
    return Emulated(build_library(root, text))


@pytest.mark.parametrize("name", RULES)
def test_it_chooses_and_weighs_as_torch(kernels, name):
    kernel = f"route_{list(RULES).index(name)}"

    def run(
        routing: Routing,
        logits: torch.Tensor,
        correction: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
    ) -> Routed:
        ids = torch.full((len(logits), routing.top_k), -77, dtype=torch.int32)
        weights = torch.full(ids.shape, -77.0)
        args = route_args(logits, correction, num_tokens, routing.scale, ids, weights)
        kernels.launch(kernel, args, -(-len(logits) // TOKENS), THREADS)
        return Routed(ids, weights)

    hold_to_torch(run, RULES[name], ROWS, "cpu")
