# SPDX-License-Identifier: Apache-2.0
"""The routing kernel against torch: compiled, emulated on a CPU, and on GPUs."""

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple, get_args

import pytest
import torch

from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from tests.emulator.machine_code import frames
from weft.errors import OutOfOrder
from weft.jit.nvrtc import CUDA_OPTIONS, compile_cubin
from weft.moe import MODELS, Routed, Routing, route
from weft.moe.routing.kernels import NORMALIZE, ROUTE, ROUTE_THREADS, TOKENS_PER_CTA
from weft.moe.routing.router import Score, build_route_args, route_in_torch

RULES = {name: config.routing for name, config in MODELS.items()} | {
    "odd sizes": Routing(61, 9, renormalise=False, scale=2.5),
    "everyone": Routing(5, 5, score="softmax-chosen", scale=0.5),
    "one expert": Routing(1, 1),
    "the most": Routing(1024, 32, score="softmax", groups=64, top_groups=8),
    "softmax, corrected": Routing(96, 6, correction=True, groups=6, top_groups=3, scale=1.5),
    "best of a group": Routing(40, 4, score="sigmoid", groups=5, top_groups=2, group_best=1),
    "many groups": Routing(120, 7, score="sigmoid", correction=True, groups=40, top_groups=9),
    "groups of one": Routing(
        36, 5, score="sigmoid", groups=36, top_groups=7, group_best=1, renormalise=False
    ),
}
# Few different numbers, so that ties are common. None is another's negative: sigmoid(x) +
# sigmoid(-x) would hang on a last bit.
NUMBERS = [-3.0, -1.5, -0.0, 0.0, 0.25, 0.5, 1.0, 4.0]
ODD = [*NUMBERS, math.nan, -math.nan, -math.inf, math.inf, 100.0, -200.0]
ULPS = 16  # weights: two exponentials of a last bit each, and the order of a sum of up to 1024


class Batch(NamedTuple):
    """Logits of one kind. exact: no choice depends on a last bit, so ids must be equal."""

    kind: str
    logits: torch.Tensor
    correction: torch.Tensor | None
    exact: bool


def batches(routing: Routing, tokens: int, seed: int = 0) -> Iterator[Batch]:
    """Yield ties; NaN and infinities; equal numbers; random ones; narrow types; strides."""
    generator = torch.Generator().manual_seed(seed * 101 + routing.num_experts)
    shape = (tokens, routing.num_experts)

    def among(numbers: list[float], size: tuple[int, ...]) -> torch.Tensor:
        picks = torch.randint(len(numbers), size, generator=generator)
        return torch.tensor(numbers)[picks]

    def bias(numbers: list[float]) -> torch.Tensor | None:
        return among(numbers, shape[1:]) if routing.correction else None

    by_logits = not (routing.correction or routing.groups > 1)
    normal = torch.randn(shape, generator=generator) * 2
    small = torch.randn(shape[1:], generator=generator) * 0.1 if routing.correction else None
    yield Batch("ties", among(NUMBERS, shape), bias([0.0, 0.25, -0.0]), True)
    rare = among(ODD, shape).where(torch.rand(shape, generator=generator) < 0.05, normal)
    yield Batch("some odd", rare, small, by_logits)
    yield Batch("odd", among(ODD, shape), bias([0.0, 0.25, -8.0]), True)
    worst = bias([0.0, -math.inf, -8.0, math.nan])
    yield Batch("odd corrections", among(NUMBERS, shape), worst, True)
    if routing.correction:  # the lowest scores must not be replaced by other experts
        for number in (-8.0, -math.inf):
            lowered = torch.full(shape[1:], number)
            yield Batch(f"corrections of {number}", among(NUMBERS, shape), lowered, True)
    for number in (0.0, -math.inf, math.inf, math.nan, -200.0):
        yield Batch(f"all {number}", torch.full(shape, number), bias([0.0]), True)
    yield Batch("random", normal, small, by_logits)
    for dtype in (torch.bfloat16, torch.float16):
        yield Batch(str(dtype), normal.to(dtype), small, by_logits)
    wide = torch.full((tokens, 2 * shape[1]), math.nan)
    wide[:, 1::2] = normal
    yield Batch("strided", wide[:, 1::2], small, by_logits)
    yield Batch("transposed", normal.T.contiguous().T, small, by_logits)


def compare(got: Routed, wanted: Routed, *, exact: bool, what: str) -> None:
    """Compare ids bit for bit and weights within ULPS; if not `exact`, 1 row in 1000 may differ."""
    assert got.ids.dtype == torch.int32
    assert got.weights.dtype == torch.float32
    same = (got.ids == wanted.ids).all(dim=1)
    allowed = 0 if exact else len(same) // 1000
    assert int((~same).sum()) <= allowed, f"{what}: {got.ids[~same][:2]} {wanted.ids[~same][:2]}"
    bound = ULPS * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        got.weights[same],
        wanted.weights[same],
        rtol=bound,
        atol=torch.finfo(torch.float32).tiny,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def hold_to_torch(
    run: Callable[..., Routed], routing: Routing, tokens: int, device: str, seed: int = 0
) -> None:
    """Compare every batch with torch on the same device, whole and with padding."""
    for kind, there, bias, exact in batches(routing, tokens, seed):
        # A copy to a device need not keep strides.
        logits = torch.empty_strided(
            there.shape, there.stride(), dtype=there.dtype, device=device
        ).copy_(there)
        correction = None if bias is None else bias.to(device)
        expected = route_in_torch(routing, logits, correction)
        compare(
            run(routing, logits, correction, None), expected, exact=exact, what=f"{routing}: {kind}"
        )
    for count in (-1, 0, 1, tokens - 1, tokens, tokens + 5):
        real = torch.tensor([count], dtype=torch.int32, device=device)
        expected = route_in_torch(routing, logits, correction, real)
        got = run(routing, logits, correction, real)
        compare(got, expected, exact=exact, what=f"{routing}: {count} real")
        assert bool((got.ids[max(count, 0) :] == -1).all())
        assert bool((got.weights[max(count, 0) :] == 0).all())


COMPILED = {
    **{name: (ROUTE, rule.to_cpp()) for name, rule in RULES.items()},
    "normalize_topk": (NORMALIZE, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_without_spills(name: str, arch: str) -> None:
    kernel, rule = COMPILED[name]
    cubin = compile_cubin(
        kernel.get_source(rule), name=kernel.name, arch=arch, options=CUDA_OPTIONS
    )
    assert kernel.name.encode() in cubin
    assert set(frames(cubin).values()) == {0}


ROWS = 9  # two CTAs and a quarter


@pytest.fixture(scope="module")
def kernels() -> Emulated:
    entries = "".join(
        entry(f"route_{i}", "RouteArgs", f"route<{rule.to_cpp()}>", ranks=None)
        for i, rule in enumerate(RULES.values())
    )
    text = f"#include <weft/moe/routing/route.cuh>\n{entries}"
    return Emulated(build_library(emulated_tree(), text))


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_the_emulated_kernel_chooses_and_weighs_as_torch(kernels, name):
    kernel = f"route_{list(RULES).index(name)}"

    def run(routing, logits, correction, num_tokens):
        ids = torch.full((len(logits), routing.top_k), -77, dtype=torch.int32)
        weights = torch.full(ids.shape, -77.0)
        args = build_route_args(logits, correction, num_tokens, routing.scale, ids, weights)
        kernels.launch(kernel, args, -(-len(logits) // TOKENS_PER_CTA), ROUTE_THREADS)
        return Routed(ids, weights)

    hold_to_torch(run, RULES[name], ROWS, "cpu")


def on_gpu(routing, logits, correction, num_tokens):
    return route(routing, logits, correction=correction, num_tokens=num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_a_gpu_chooses_and_weighs_as_torch(name):
    hold_to_torch(on_gpu, RULES[name], 1003, "cuda")


def any_rule(choice: random.Random) -> Routing:
    score: Score = choice.choice(get_args(Score))
    whole = score == "softmax-chosen"
    groups = 1 if whole else choice.choice([1, 1, 2, 3, 4, 8, 16, 33])
    size = choice.randint(2, 1024 // groups)
    top_groups = choice.randint(1, groups)
    return Routing(
        num_experts=groups * size,
        top_k=choice.randint(1, min(32, top_groups * size)),
        score=score,
        renormalise=choice.random() < 0.5,
        correction=not whole and choice.random() < 0.5,
        groups=groups,
        top_groups=top_groups,
        group_best=choice.choice([1, 2]),
        scale=choice.choice([1.0, 2.5]),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_any_rule(seed):
    choice = random.Random(seed)
    hold_to_torch(on_gpu, any_rule(choice), choice.choice([1, 5, 130]), "cuda", seed)


@pytest.mark.gpu
def test_no_tokens_and_more_experts_than_a_warp_holds():
    ids, weights = route(Routing(8, 2), torch.zeros(0, 8, device="cuda"))
    assert ids.shape == weights.shape == (0, 2)
    logits = torch.randn(40, 1100, generator=torch.Generator().manual_seed(1)).cuda()
    expected = route_in_torch(Routing(1100, 3), logits)
    compare(route(Routing(1100, 3), logits), expected, exact=True, what="1100 experts")


@pytest.mark.gpu
def test_a_replay_routes_new_logits():
    routing = RULES["deepseek-v3"]
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(7, 64, 256, generator=generator).cuda()
    correction = (torch.randn(256, generator=generator) * 0.1).cuda()
    logits = torch.zeros(64, 256, device="cuda")
    route(routing, logits, correction=correction)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The kernel may start before these have ended, and must wait for them.
        doubled = logits * 2.0
        for _ in range(8):
            doubled = doubled * 1.0
        got = route(routing, doubled, correction=correction)
        copies = got.ids.clone(), got.weights.clone()
    for fresh in drawn:
        logits.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        expected = route_in_torch(routing, fresh * 2.0, correction)
        compare(Routed(*copies), expected, exact=True, what="replay")


@pytest.mark.gpu
def test_a_first_call_is_not_captured():
    routing, logits = Routing(77, 3, scale=1.25), torch.zeros(4, 77, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits.mul_(1.0)  # an empty graph is a warning
        with pytest.raises(OutOfOrder, match="call it once before capturing"):
            route(routing, logits)
    route(routing, logits[:0])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        route(routing, logits)


@pytest.mark.gpu(2)
def test_logits_of_another_device():
    routing = RULES["qwen3-30b-a3b"]
    logits = torch.randn(9, 128, generator=torch.Generator().manual_seed(3)).to("cuda:1")
    assert torch.cuda.current_device() == 0
    expected = route_in_torch(routing, logits)
    compare(route(routing, logits), expected, exact=True, what="cuda:1")
    assert torch.cuda.current_device() == 0
