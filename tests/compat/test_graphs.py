# SPDX-License-Identifier: Apache-2.0
"""Calls of the compat classes in CUDA graphs, as engines capture them, and under torch.compile.

A layer runs once, is captured, and its graph is replayed with other tokens, ids and weights in the
same tensors. On CPU ranks, which have no graphs, the same calls are made again instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import Mapping, buffered, identity, layer_of, returned, settle
from tests.compat.test_allreduce_fusion import TOKENS, WIDE, compare, expected, make, outputs, specs
from tests.compat.test_normal_mode import EXPERTS, Batch, summed, with_topk
from tests.operators import capture_body
from tests.public import MODES
from tests.ranks import on_ranks
from tests.rounds import Round
from tests.sums import Sum
from tests.test_defaults import differ
from weft import reference
from weft.compat.deep_ep import Buffer
from weft.compat.flashinfer import MoeAlltoAll, allreduce_fusion
from weft.compat.flashinfer import moe_a2a_get_workspace_size_per_rank as size_per_rank

MOST, HIDDEN, TOP_K = 8, 512, 4
BF16 = torch.bfloat16
Tensors = tuple[torch.Tensor, ...]


class Captured:
    """A call of (x, ids, weights) that is captured, with its tensors."""

    def __init__(self, group: weft.Group, tokens: int, call: Any, dtype: torch.dtype) -> None:
        sizes = (tokens,) * group.size, TOP_K, EXPERTS, HIDDEN
        self.group, self.case = group, Round(*sizes, router="holes", ids_dtype=dtype)
        self.inputs = self.case.inputs_of(group.rank, group.device)[:3]
        self.out = torch.empty_like(self.inputs[0])

        def run() -> None:
            self.out.copy_(call(*self.inputs))

        self.replay = capture_body(group, run)

    def check(self, seed: int, want: Callable[..., torch.Tensor]) -> None:
        """Replay with other values and compare the result with `want` on the CPU."""
        values = self.case.next(seed=seed).inputs_of(self.group.rank, self.group.device)[:3]
        copy_all(self.inputs, values)
        self.replay()
        assert torch.equal(self.out.cpu(), want(*(t.cpu() for t in values)))


def copy_all(places: Tensors, values: Tensors) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def widened(numbers: Any) -> torch.Tensor:
    """Return the result of identity experts, without a copy to the host."""
    if isinstance(numbers, torch.Tensor):
        return numbers
    x, scales = numbers
    blocks = x.float().view(*x.shape[:-1], -1, 128)
    rows: torch.Tensor = (scales[..., None] * blocks).reshape(x.shape).to(BF16)
    return rows


@buffered(num_rdma_bytes=1 << 20, low_latency_mode=True)
def deep_ep_layers(group: weft.Group, buffer: Buffer, use_fp8: bool, hooks: bool) -> None:
    """Capture three layers: an odd number, so that a replay does not end on its first slot."""
    mode: dict[str, Any] = {"async_finish": not hooks, "return_recv_hook": hooks}

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            numbers, _, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, MOST, EXPERTS, use_fp8=use_fp8, **mode
            )
            settle(event, hook)
            x, event, hook = buffer.low_latency_combine(
                widened(numbers), ids, weights, handle, **mode
            )
            settle(event, hook)
        return x

    def want(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = returned((x, ids, weights), EXPERTS, group.size, "fp8" if use_fp8 else None)
        return x

    layers = Captured(group, MOST - group.rank, call, torch.int64)
    for seed in range(1, 4):
        layers.check(seed, want)


@buffered()
def normal_layer(group: weft.Group, buffer: Buffer) -> None:
    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        args = with_topk(buffer, Batch(x, ids, weights))
        most = group.size * MOST
        rows, _, _, counts, handle, _ = buffer.dispatch(x, **args, num_worst_tokens=most)
        assert counts == []
        return buffer.combine(rows, handle)[0]  # type: ignore[arg-type]

    layer = Captured(group, MOST, call, torch.int64)
    for seed in range(1, 4):
        layer.check(seed, lambda *inputs: summed(Batch(*inputs), group.size))


def triton_dist_layer(group: weft.Group) -> None:
    layer = layer_of(group, max_m=MOST, hidden=HIDDEN, topk=TOP_K, num_experts=EXPERTS)

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        token, scale, _, meta = layer.dispatch(x, None, ids)
        return layer.combine(widened((token, scale)), ids, weights, meta)

    captured = Captured(group, MOST, call, torch.int32)
    for seed in range(1, 4):
        captured.check(
            seed, lambda *x: returned(x, EXPERTS, group.size, "fp8", recipe="triton_dist")
        )
    layer.check()
    group.barrier()
    layer.finalize()


def flashinfer_sizes(group: weft.Group, in_workspace: bool) -> None:
    """Capture a graph for each batch size over one workspace, largest first, as engines do."""
    size = size_per_rank(group.size, MOST, HIDDEN * 2 + TOP_K * 8, HIDDEN * 2)
    sizes: dict[str, Any] = {"workspace_size_per_rank": size, "group": group}
    placement = weft.Placement.blocks(EXPERTS, group.size)
    own = torch.tensor(placement.experts_of(group.rank), device=group.device)
    with MoeAlltoAll(Mapping(group.rank, group.size), MOST, TOP_K, EXPERTS, **sizes) as a2a:

        def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            y = identity(a2a.dispatch(ids, [x, ids, weights], len(x), EXPERTS, 1), own)
            if in_workspace:
                place = a2a.get_combine_payload_tensor_in_workspace(len(x), HIDDEN, BF16)
                y = place.copy_(y)
            return a2a.combine(y, len(x), payload_in_workspace=in_workspace)

        graphs = [Captured(group, tokens, call, torch.int32) for tokens in (MOST, 3, 1)]
        want = partial(reference.identity_round_trip, placement=placement, ranks=group.size)
        for seed, graph in enumerate(3 * (*graphs, *graphs[::-1]), 1):
            graph.check(seed, want)
        a2a.check()


def fused_patterns(group: weft.Group, use_oneshot: bool | None) -> None:
    device, rank = group.device, group.rank

    def drawn(seed: int) -> tuple[Sum, list[torch.Tensor], Tensors]:
        case = Sum(TOKENS, WIDE, seed=seed)
        xs = [case.rows(each, device) for each in range(group.size)]
        return case, xs, (xs[rank], *case.shared(device))

    index = torch.arange(TOKENS, dtype=torch.int32, device=device)[:, None]
    patterns = [*specs(device, rank), (7, None, {"expanded_idx_to_permuted_idx": index})]
    places = [drawn(0)[2] for _ in patterns]
    outs = [outputs(device, pattern, TOKENS) for pattern, *_ in patterns]
    mode: dict[str, Any] = {"use_oneshot": use_oneshot, "launch_with_pdl": True}
    with make(group, hidden_dim=WIDE) as workspace:

        def step() -> None:
            for (pattern, _, kwargs), (x, residual, weight), out in zip(
                patterns, places, outs, strict=True
            ):
                own = {"residual_in": residual, "rms_gamma": weight, "rms_eps": Sum.eps, **kwargs}
                allreduce_fusion(x, workspace, pattern, **own, **mode, **out)

        replay = capture_body(group, step)
        for turn in range(1, 4):
            fresh = [drawn(10 * turn + i) for i in range(len(patterns))]
            for place, (*_, values) in zip(places, fresh, strict=True):
                copy_all(place, values)
            replay()
            for (pattern, quant, _), (case, xs, _), out in zip(patterns, fresh, outs, strict=True):
                compare(out, expected(case, 0, xs, pattern, quant))
        workspace.check()


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (2, "threads"),
        pytest.param(2, "cuda", marks=pytest.mark.gpu),
        pytest.param(4, "cuda", marks=pytest.mark.gpu(4)),
    ],
)
@pytest.mark.parametrize(
    ("body", "args"),
    [
        *((deep_ep_layers, way) for way in ((False, False), (False, True), (True, True))),
        *((normal_layer, ()), (triton_dist_layer, ())),
        *((flashinfer_sizes, (in_workspace,)) for in_workspace in (False, True)),
        *((fused_patterns, (use_oneshot,)) for use_oneshot in (None, True, False)),
    ],
)
def test_replays_are_right(ranks, count, kind, body, args):
    ranks(count, kind)(body, *args)


COMPILED = ["MoeAlltoAll", "allreduce_fusion", "EPLowLatencyAllToAllLayer"]
COMPILED += [name for name in MODES if name.split()[0] == "Buffer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@on_ranks(2, "cpu", "cuda", timeout=900.0)
def test_a_compiled_caller_gets_the_same_bits(group, name):
    made = MODES[name](group)
    want = made.call()
    traced = torch.compile(made.call, backend="eager")
    assert [differ(call(), want) for call in (traced, traced, made.call)] == [[], [], []]
    made.give_back()
