# SPDX-License-Identifier: Apache-2.0
"""Compare a MoE layer with sgl-deep-gemm's fused MegaMoE, with equal weights and routing.

    python benchmarks/mega_moe.py weft v3 8,64,512 --out weft.json
    python benchmarks/mega_moe.py mega v3 8,64,512 --out mega.json
    torchrun --nproc-per-node 4 benchmarks/mega_moe.py weft v3 8,64,512 --out weft.json

Uses one GPU, or one per process of torchrun. The layer has routed experts only, equally many on
each rank, FP8 weights with scales for 128 x 128, bfloat16 tokens and random routing; sizes are
tokens per rank. A time is a CUDA graph of 20 calls: the median of three turns of the median of
seven replays, on the slowest rank. The first tokens of each rank are checked against plain torch.
The other library is the wheel sgl-deep-gemm 0.1.5.post1. It compiles kernels at the first call of
each size; --check-only, which times nothing, can run first for all sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

# hidden, intermediate, top_k, local experts
SHAPES = {"v3": (7168, 2048, 8, 32), "flash": (4096, 2048, 6, 32), "pro": (7168, 3072, 6, 48)}
BLOCK, CALLS, TURNS, REPLAYS, CHECKED = 128, 20, 3, 7, 4
Layer = Callable[[], torch.Tensor]
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def quantized(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random FP8 matrix and its scales."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda") / math.sqrt(columns)
    blocks = x.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = (blocks.abs().amax((1, 3)) / 448).clamp_min(1e-12)
    return (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn), scale


def make_weights(shape: str) -> Weights:
    """Return gate_up, its scales, down and its scales, of the rank's experts."""
    hidden, inner, _, experts = SHAPES[shape]
    first = dist.get_rank() * experts
    own = range(first, first + experts)
    gate_up = [quantized(2 * inner, hidden, e + 1) for e in own]
    down = [quantized(hidden, inner, e + 100_001) for e in own]
    stacked = [torch.stack(part) for pairs in (gate_up, down) for part in zip(*pairs, strict=True)]
    return stacked[0], stacked[1], stacked[2], stacked[3]


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Return every rank's tensor, concatenated."""
    out = x.new_empty((dist.get_world_size(), *x.shape))
    dist.all_gather_into_tensor(out, x.contiguous())
    return out.flatten(0, 1)


def slowest(us: float) -> float:
    """Return the largest time of any rank."""
    time = torch.tensor([us], device="cuda")
    dist.all_reduce(time, op=dist.ReduceOp.MAX)
    return time.item()


def expected(weights: Weights, x: torch.Tensor, ids: torch.Tensor, by: torch.Tensor) -> Any:
    """Return the fp32 result for a few tokens of this rank; each rank adds its experts' part."""

    def wide(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return q.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    few, rank = len(x), dist.get_rank()
    x, ids, by = gathered(x), gathered(ids), gathered(by)
    out = torch.zeros_like(x, dtype=torch.float32)
    gate_up, gate_up_scale, down, down_scale = weights
    for token, experts in enumerate((ids - rank * len(gate_up)).tolist()):
        for k, e in enumerate(experts):
            if not 0 <= e < len(gate_up):
                continue
            gate, up = (x[token].float() @ wide(gate_up[e], gate_up_scale[e]).T).chunk(2)
            gated = torch.nn.functional.silu(gate) * up
            out[token] += by[token, k] * (gated @ wide(down[e], down_scale[e]).T)
    dist.all_reduce(out)
    return out[rank * few : (rank + 1) * few]


def weft_layers(
    shape: str, weights: Weights, x: Any, ids: Any, by: Any, closing: ExitStack
) -> dict[str, Layer]:
    """Return layers with "auto" and with overlap="none"."""
    import weft
    from weft.moe import ExpertWeights, MoEConfig, Routing

    hidden, inner, top_k, experts = SHAPES[shape]
    gate_up, gate_up_scale, down, down_scale = weights
    routing = Routing(experts * dist.get_world_size(), top_k)
    config = MoEConfig(hidden=hidden, intermediate=inner, routing=routing)
    expert_weights = ExpertWeights(
        gate_up, down, gate_up_scale=gate_up_scale, down_scale=down_scale
    )
    group = closing.enter_context(weft.Group.from_torch())
    layers: dict[str, Layer] = {}
    for mode, overlap in (("auto", "auto"), ("throughput", "none")):
        options = {"max_tokens": len(x), "fp8": True, "mode": mode, "overlap": overlap}
        layer = closing.enter_context(weft.MoE(group, config, expert_weights, **options))
        name = f"weft, {'auto' if mode == 'auto' else f'{layer.mode}, {layer.overlap}'}"
        layers[name] = lambda layer=layer: layer(x, topk_ids=ids, topk_weights=by)
    return layers


def mega_layers(
    shape: str, weights: Weights, x: Any, ids: Any, by: Any, closing: ExitStack
) -> dict[str, Layer]:
    """Return the fused kernel after its quantization of the tokens."""
    import deep_gemm

    hidden, inner, top_k, experts = SHAPES[shape]
    gate_up, gate_up_scale, down, down_scale = weights
    halves = gate_up.view(torch.uint8).view(experts, 2, inner // 8, 8, hidden).transpose(1, 2)
    mixed = halves.reshape(experts, 2 * inner, hidden).view(torch.float8_e4m3fn)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        dist.group.WORLD, experts * dist.get_world_size(), len(x), top_k, hidden, inner
    )
    out, narrow = torch.empty_like(x), ids.int().contiguous()

    def call() -> torch.Tensor:
        into = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
        deep_gemm.mega_moe_pre_dispatch_sm90(
            x, narrow, by, *into, num_tokens=len(x), group_size=BLOCK
        )
        layers = ((mixed, gate_up_scale), (down, down_scale))
        deep_gemm.fp8_mega_moe(out, *layers, buffer, recipe=(BLOCK, BLOCK, BLOCK))
        return out

    return {"mega": call}


def captured(call: Layer) -> torch.cuda.CUDAGraph:
    """Return a graph of some calls that has run twice."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    dist.barrier()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Return the us per call."""
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return slowest(statistics.median(times))


def checked(
    what: str, shape: str, weights: Weights, tokens: int, closing: ExitStack
) -> dict[str, Layer]:
    """Return the layers at one number of tokens, after checking their results."""
    hidden, _, top_k, experts = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(1000 + dist.get_rank())
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").bfloat16()
    experts *= dist.get_world_size()
    scores = torch.rand(tokens, experts, generator=generator, device="cuda")
    by, ids = scores.topk(top_k)
    by = (by / by.sum(-1, keepdim=True)).contiguous()
    make = weft_layers if what == "weft" else mega_layers
    layers = make(shape, weights, x, ids, by, closing)
    want = expected(weights, x[:CHECKED], ids[:CHECKED], by[:CHECKED])
    for name, call in layers.items():
        error = (call()[:CHECKED].float() - want).norm() / want.norm()
        if not error < 0.08:
            raise SystemExit(f"{name} at {tokens} tokens: relative error {error:.3f}")
    return layers


def measure(layers: dict[str, Layer]) -> dict[str, float]:
    """Return the us of each layer."""
    graphs = {name: captured(call) for name, call in layers.items()}
    took: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(TURNS):
        for name in list(graphs)[:: 1 if turn % 2 == 0 else -1]:
            took[name].append(timed(graphs[name]))
    return {name: round(statistics.median(times), 1) for name, times in took.items()}


def main() -> None:
    """Print a line per number of tokens, and write all of them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("weft", "mega"))
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("tokens", help="tokens per rank, comma-separated")
    parser.add_argument("--check-only", action="store_true", help="only compile and check")
    parser.add_argument("--out", help="a JSON file")
    args = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    first = dist.get_rank() == 0
    weights, us = make_weights(args.shape), {}
    for tokens in map(int, args.tokens.split(",")):
        with ExitStack() as closing:
            layers = checked(args.what, args.shape, weights, tokens, closing)
            us[tokens] = {} if args.check_only else measure(layers)
        if first:
            print(args.what, args.shape, tokens, json.dumps(us[tokens]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if args.out and first:
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "ranks": dist.get_world_size(),
            "torch": torch.__version__,
        }
        with open(args.out, "w") as file:
            json.dump({"machine": machine, "us": us}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
