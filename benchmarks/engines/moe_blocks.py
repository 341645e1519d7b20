# SPDX-License-Identifier: Apache-2.0
"""Random MoE blocks of transformers, their weights in an engine's layers, and the comparison.

An engine's blocks.py builds its own blocks and loads these weights through the engine's loaders.
weft runs them, on CPU ranks or one GPU; on a GPU the engine's own kernels run them, too.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import gc
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from job import OUT, describe_machine, gpu_names
from torch import nn
from trace_kernels import kernels, summed

from weft.fp8 import quantize
from weft.gemm import quantize_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4
from weft.launcher.launch import launch

VOCABULARY = 64
SCALE, LIMIT = 1.5, 2.0
BETA, LINEAR_BETA = 4.0, 25.0
TOLERANCE = 0.05
GAIN = 3.2  # of a matrix: the standard deviation of its products with normalized rows
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of tokens and their ids
Block = tuple[Any, Formula]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a block. `latent`: columns of experts between projections (Kimi-K3, Nemotron-3)."""

    hidden: int = 256
    intermediate: int = 128
    experts: int = 16
    top_k: int = 4
    latent: int = 128


# Published sizes, with as many experts as fit on one GPU beside a float32 copy of their weights.
PUBLISHED = {
    "deepseek_v4": Shape(4096, 2048, 256, 6),  # DeepSeek-V4-Flash
    "deepseek_v41": Shape(4096, 2048, 256, 6),
    "minimax_m3": Shape(6144, 3072, 64, 4),
    "kimi_k3": Shape(7168, 3072, 192, 16, 3584),
    "glm4_moe": Shape(4096, 1408, 128, 8),  # GLM-4.5-Air
    "glm4_moe_lite": Shape(2048, 1536, 64, 4),
    "mimo_v2": Shape(4096, 2048, 64, 8),
    "qwen3_moe": Shape(2048, 768, 128, 8),  # Qwen3-30B-A3B
    "nemotron_h": Shape(2688, 1856, 128, 6, 1024),  # Nemotron-3 Nano
    "gpt_oss": Shape(2880, 2880, 128, 4),  # GPT-OSS-120B
}


def draw(module: nn.Module) -> None:
    """Draw random parameters with values of bfloat16, the same for every engine and variant."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        for part in parameter.data if parameter.dim() == 3 else (parameter.data,):
            part.normal_(0, GAIN * part.shape[-1] ** -0.5)
            part.copy_(part.bfloat16())


def load_experts(layer: Any, gate_up: torch.Tensor, down: torch.Tensor, kind: str) -> None:
    """Load experts with the engine's loader, and round `gate_up` and `down` in place to its values.

    Args:
        layer: The engine's layer of routed experts.
        gate_up: float32 `[experts, 2 * intermediate, hidden]`, or `[experts, intermediate, hidden]`
            without a gate.
        down: float32 `[experts, hidden, intermediate]`.
        kind: "bfloat16", "mxfp4" or "mxfp8".
    """
    scale_name = "_weight_scale" + "_inv" * hasattr(layer, "w13_weight_scale_inv")
    up_shards = ("w1", "w3")[: gate_up.shape[1] // down.shape[2]]
    for weights, shards in ((gate_up, up_shards), (down, ("w2",))):
        prefix = "w2" if shards == ("w2",) else "w13"
        for expert, matrix in enumerate(weights):  # one at a time, because copies are large
            tensors = {"_weight": matrix.bfloat16()}
            if kind == "mxfp4":
                values, scales = (each[0] for each in quantize_mxfp4(matrix[None]))
                matrix.copy_(dequantize_mxfp4(values, scales))
                tensors = {"_weight": values, scale_name: scales}
            elif kind == "mxfp8":
                values, scales = quantize(matrix, "mxfp8")
                blocks = values.float().unflatten(1, (-1, 32)) * scales.float()[..., None]
                matrix.copy_(blocks.flatten(1))
                tensors = {"_weight": values, scale_name: scales.view(torch.uint8)}
            for suffix, tensor in tensors.items():
                name = prefix + suffix
                parameter = getattr(layer, name)
                if parameter.dtype == torch.int8:
                    tensor = tensor.view(torch.int8)
                elif parameter.dtype in (torch.float32, torch.float8_e8m0fnu):
                    tensor = tensor.view(torch.float8_e8m0fnu)
                for shard, part in zip(shards, tensor.chunk(len(shards)), strict=True):
                    parameter.weight_loader(parameter, part.contiguous(), name, shard, expert)


def load_mlp(mlp: Any, shared: Any) -> None:
    """Load transformers' shared expert."""
    if not hasattr(mlp, "gate_up_proj"):
        mlp.up_proj.weight.data.copy_(shared.up_proj.weight)
    elif hasattr(shared, "gate_up_proj"):
        mlp.gate_up_proj.weight.data.copy_(shared.gate_up_proj.weight)
    else:
        gate_up = torch.cat((shared.gate_proj.weight, shared.up_proj.weight))
        mlp.gate_up_proj.weight.data.copy_(gate_up)
    mlp.down_proj.weight.data.copy_(shared.down_proj.weight)


def load_block(block: Any, theirs: Any, layer: Any, kind: str, bias: Any) -> Formula:
    """Draw transformers' block, load it, and return its formula.

    Args:
        block: The engine's block.
        theirs: transformers' block.
        layer: The engine's layer of routed experts.
        kind: The experts' format.
        bias: The engine's correction of the scores, or None for a block without one.
    """
    draw(theirs)
    block.gate.weight.data.copy_(theirs.gate.weight)
    by_token = hasattr(theirs.gate, "tid2eid")
    if by_token:
        table = theirs.gate.tid2eid
        num_experts = len(theirs.gate.weight)
        rows = [torch.randperm(num_experts)[: table.shape[1]] for _ in range(len(table))]
        table.copy_(torch.stack(rows))
    elif bias is not None:
        theirs.gate.e_score_correction_bias.normal_(0, 0.1)
        bias.data.copy_(theirs.gate.e_score_correction_bias)
    if hasattr(theirs, "shared_experts"):
        load_mlp(block.shared_experts, theirs.shared_experts)
    for name in ("fc1_latent_proj", "fc2_latent_proj"):  # Nemotron-3
        if hasattr(getattr(theirs, name, None), "weight"):
            getattr(block, name).weight.data.copy_(getattr(theirs, name).weight)
    experts = theirs.experts
    gate_up = experts.gate_up_proj if hasattr(experts, "gate_up_proj") else experts.up_proj
    load_experts(layer, gate_up.data, experts.down_proj.data, kind)
    return lambda x, ids: theirs(x[None], *((ids[None],) if by_token else ())).view(x.shape)


def deepseek_v4(layer: int, shape: Shape) -> tuple[Any, Any]:
    """Return a config and a block. Layers 0 to 2 choose experts by token id, others by logits."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    config = DeepseekV4Config(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=5,
        vocab_size=VOCABULARY,
        routed_scaling_factor=SCALE,
        swiglu_limit=LIMIT,
    )
    theirs = modeling_deepseek_v4.DeepseekV4SparseMoeBlock(config, layer).float()
    set_fields(config, topk_method="noaux_tc", norm_topk_prob=True, n_shared_experts=1)
    return config, theirs


def minimax_m3(shape: Shape) -> tuple[Any, Any]:
    """Return a config and a block."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

    config = MiniMaxM3VLTextConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        shared_intermediate_size=shape.intermediate,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        swiglu_limit=LIMIT,
        routed_scaling_factor=SCALE,
    )
    theirs = modeling_minimax_m3_vl.MiniMaxM3VLSparseMoeBlock(config).float()
    set_fields(config, use_routing_bias=True, scoring_func="sigmoid", n_shared_experts=1)
    set_fields(config, hidden_act="swigluoai", swiglu_beta=1.0)
    return config, theirs


def qwen3_moe(shape: Shape) -> tuple[Any, Any]:
    """Return a config and a block."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    return config, Qwen3MoeSparseMoeBlock(config).float()


def glm4_moe(shape: Shape) -> tuple[Any, Any]:
    """Return a config and a block."""
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

    config = Glm4MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        n_shared_experts=1,
        routed_scaling_factor=SCALE,
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
    )
    return config, Glm4MoeMoE(config).float()


def nemotron_h(shape: Shape, *, latent: bool) -> tuple[Any, Any]:
    """Return a config and a block, with experts between latent projections or without them."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    config = NemotronHConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        moe_shared_expert_intermediate_size=2 * shape.intermediate,
        moe_latent_size=shape.latent if latent else None,
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=SCALE,
        layers_block_type=["moe"],
    )
    return config, NemotronHMoE(config).float()


def gpt_oss(shape: Shape, kind: str) -> tuple[Any, Formula, dict[str, torch.Tensor]]:
    """Return a config, a formula, and the checkpoint of a block with random weights and biases.

    Args:
        shape: The block's sizes.
        kind: The experts' format, "bfloat16" or "mxfp4".
    """
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=1,
        swiglu_limit=7.0,  # a constant in vLLM
        dtype=torch.bfloat16,
    )
    theirs = GptOssMLP(config).float()
    draw(theirs)
    checkpoint = {}
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_().copy_(parameter.bfloat16())
        if kind == "mxfp4" and parameter.dim() == 3:
            pairs = []
            for matrix in parameter.data:  # one at a time, because copies are large
                values, scales = quantize_mxfp4(matrix.T.contiguous()[None])
                matrix.copy_(dequantize_mxfp4(values, scales)[0].T)
                pairs.append((values.unflatten(2, (-1, 16)), scales))
            for suffix, parts in zip(("blocks", "scales"), zip(*pairs, strict=True), strict=True):
                checkpoint[f"mlp.{name}_{suffix}"] = torch.cat(parts)
        else:
            checkpoint[f"mlp.{name}"] = parameter.bfloat16()
    router = copy.deepcopy(theirs.router).bfloat16()  # as engines compute it

    def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits, chosen = router(x.bfloat16())[::2]
        weights = logits.float().gather(1, chosen).softmax(1)
        out: torch.Tensor = theirs.experts(x, chosen, weights)
        return out

    return config, run, checkpoint


def load_gpt_oss(
    model_class: Any, block: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], **fields: Any
) -> None:
    """Load a checkpoint by the loader of an engine's model, which here has one block alone."""
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.mlp = block
    set_fields(model, **fields)
    with torch.no_grad():
        model.load_weights(weights)


def set_fields(config: Any, /, **fields: Any) -> None:
    """Set fields of published configs that engines read and transformers' configs lack."""
    for name, value in fields.items():
        setattr(config, name, value)


def kimi_k3(block: Any, layer: Any, shape: Shape, restore: Callable[..., Any]) -> Formula:
    """Load random MXFP4 experts into a block of Kimi-K3, and return the published formula.

    transformers has no such block, so projections and the shared expert are the engine's.

    Args:
        block: The engine's block, with random weights of all other parts.
        layer: The engine's layer of routed experts.
        shape: The block's sizes.
        restore: Norm and projection of the experts' bfloat16 sums.
    """
    weight = block.gate.weight.data.clone()
    experts, bias = len(weight), block.gate.e_score_correction_bias
    latent, inner = shape.latent, shape.intermediate
    gate_up = torch.empty(experts, 2 * inner, latent, dtype=torch.float32)
    down = torch.empty(experts, latent, inner, dtype=torch.float32)
    for tensor in (gate_up, down):
        for matrix in tensor:
            matrix.normal_(0, GAIN * matrix.shape[-1] ** -0.5)
    load_experts(layer, gate_up, down, "mxfp4")

    def run_expert(expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ gate_up[expert].T).chunk(2, -1)
        gate = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
        return (gate * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)) @ down[expert].T

    def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        scores = torch.sigmoid(nn.functional.linear(x, weight).float())
        chosen = (scores + bias).topk(shape.top_k).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * SCALE
        narrow = block.routed_expert_down_proj(x)[0].float()
        sums = torch.zeros_like(narrow)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            factors = weights[rows, places, None]
            sums[rows] += factors * run_expert(expert, narrow[rows])
        return (restore(sums.bfloat16()) + block.shared_experts(x)).float()

    return run


def fill_matrices(parameters: Iterable[nn.Parameter]) -> None:
    """Draw matrices in place."""
    for parameter in parameters:
        parameter.data.normal_(0, GAIN * parameter.shape[-1] ** -0.5)


def draw_tokens(count: int, shape: Shape, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return random bfloat16 tokens `[count, hidden]` and their ids `[count]`."""
    x = torch.randn(count, shape.hidden, device=device).bfloat16()
    return x, torch.randint(VOCABULARY, (count,), device=device)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the expected norm."""
    return float((out.float() - expected).norm() / expected.norm())


def compare_block(
    run: Callable[..., torch.Tensor], formula: Formula, count: int, shape: Shape
) -> float:
    """Return the relative error of a block on `count` random tokens, or 0 without any."""
    x, ids = draw_tokens(count, shape)
    with torch.no_grad():
        out = run(x.clone(), ids)
        return relative_error(out, formula(x.float(), ids)) if count else 0.0


def record(what: str, device: str, text: str, **line: Any) -> None:
    """Append a line to results.jsonl, and print `text`."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = describe_machine(gpu_names()[:1] if device == "cuda" else [])
    with open(OUT / "results.jsonl", "a") as file:
        file.write(json.dumps({"bench": what, **line, "date": date, "machine": machine}) + "\n")
    print(text, flush=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What a GPU rank compares.

    Attributes:
        names: Blocks.
        variants: Ways to run each block; "weft" is one of them.
        tokens: Batch sizes.
        calls: Calls of the block in a CUDA graph, or 0 to measure no time.
        profile: Whether to record each graph's kernels, too.
        end: When to start nothing more, in seconds of `time.monotonic`.
    """

    what: str
    names: tuple[str, ...]
    variants: tuple[str, ...]
    tokens: tuple[int, ...]
    calls: int
    profile: bool
    end: float


Build = Callable[[str, str, Shape], tuple[Callable[..., torch.Tensor], Formula]]


def on_gpu(task: Task, build: Build, close: Callable[[], None]) -> bool:
    """Compare blocks on one GPU: outputs with the formula, and times with each other.

    A variant that raises is recorded with its error, and the others continue.

    Args:
        task: What to compare.
        build: Returns a block's forward function and its formula, for a name, a variant and a
            shape.
        close: Frees weft's layers of a block.

    Returns:
        Whether every variant ran and no relative error is above the tolerance.
    """
    right = True
    for name in task.names:
        shape, runs = PUBLISHED[name.partition(",")[0]], {}
        first: dict[int, torch.Tensor] = {}
        for variant in task.variants:
            if time.monotonic() > task.end:
                print(f"{name}, {variant}: not started, the time is up", flush=True)
                right = False
                continue
            try:
                with torch.no_grad():
                    run, formula = build(name, variant, shape)
                    right &= _check_outputs(task, name, variant, shape, run, formula, first)
                runs[variant] = run
            except Exception as error:
                right = False
                text = f"{type(error).__name__}: {error}"
                place = "".join(traceback.format_exception(error)[-3:])
                record(
                    task.what,
                    "cuda",
                    f"{name}, {variant}: FAILED {text}\n{place}",
                    block=name,
                    variant=variant,
                    error=text[:2000],
                )
            run = formula = None  # type: ignore[assignment]
            gc.collect()
            torch.cuda.empty_cache()
        if task.calls:
            for count in task.tokens:
                with torch.no_grad():
                    _compare_times(task, name, shape, runs, count)
        runs.clear()
        first.clear()
        close()
        gc.collect()
        torch.cuda.empty_cache()
    return right


def _check_outputs(
    task: Task,
    name: str,
    variant: str,
    shape: Shape,
    run: Callable[..., torch.Tensor],
    formula: Formula,
    first: dict[int, torch.Tensor],
) -> bool:
    """Record the errors of a variant; `first` gets the outputs of the first one that ran."""
    right = True
    for count in task.tokens:
        torch.manual_seed(1 + count)
        x, ids = draw_tokens(count, shape, "cuda")
        out = run(x.clone(), ids).float()
        expected = formula(x.float(), ids)
        rows = (out - expected).norm(dim=1) / expected.norm(dim=1)
        error = relative_error(out, expected)
        differs = relative_error(out, first.setdefault(count, out))
        right &= error <= TOLERANCE  # False also for NaN
        record(
            task.what,
            "cuda",
            f"{name}, {variant}, {count} tokens: relative error {error:.4f}, of the median row "
            f"{float(rows.median()):.4f}, from the first variant {differs:.4f}",
            block=name,
            variant=variant,
            shape=dataclasses.asdict(shape),
            tokens=count,
            relative_error=error,
            median_row_error=float(rows.median()),
            difference_from_first=differs,
        )
    return right


def _compare_times(
    task: Task,
    name: str,
    shape: Shape,
    runs: Mapping[str, Callable[..., torch.Tensor]],
    count: int,
    rounds: int = 15,
) -> None:
    """Record the median time of a call of each variant, measured alternately in CUDA graphs.

    Blocks may write their result into their input, so each call copies it first. "copy" is the time
    of that copy, which every variant's time contains.
    """
    torch.manual_seed(2 + count)
    calls = task.calls if count <= 1024 else max(1, task.calls // 4)
    batches = [draw_tokens(count, shape, "cuda") for _ in range(calls)]
    replays: dict[str, Callable[[], None]] = {}
    for variant, run in {"copy": lambda x, ids: x, **runs}.items():
        try:
            replays[variant] = _capture(run, batches)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            record(
                task.what,
                "cuda",
                f"{name}, {variant}, {count} tokens: no graph: {text}",
                block=name,
                variant=variant,
                tokens=count,
                error=text[:2000],
            )
    times: dict[str, list[float]] = {variant: [] for variant in replays}
    for round_ in range(rounds + 2):
        for variant, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            if round_ >= 2:
                times[variant].append(begin.elapsed_time(end) * 1000 / calls)
    for variant, values in times.items():
        median = statistics.median(values)
        record(
            task.what,
            "cuda",
            f"{name}, {variant}, {count} tokens: {median:.1f} us a call ({min(values):.1f} to "
            f"{max(values):.1f})",
            block=name,
            variant=variant,
            shape=dataclasses.asdict(shape),
            tokens=count,
            calls=calls,
            microseconds=median,
            fastest=min(values),
            slowest=max(values),
        )
    if task.profile:
        for variant, replay in replays.items():
            _record_kernels(task.what, name, variant, count, calls, replay)


def _record_kernels(
    what: str, name: str, variant: str, count: int, calls: int, replay: Callable[[], None]
) -> None:
    """Record the us of a call by kernel, and keep the trace of the graph."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        replay()
        torch.cuda.synchronize()
    trace = OUT / f"trace-{variant}-{count}.json.gz"
    profiler.export_chrome_trace(str(trace))
    result = summed(kernels(trace), calls)
    lines = (f"    {us:8.2f} {kernel[:120]}" for kernel, us in result["kernels"].items())
    record(
        what,
        "cuda",
        f"{name}, {variant}, {count} tokens, us of a call by kernel: {result['us']:.1f} in all, "
        f"{result['span']:.1f} from the first to the last\n" + "\n".join(lines),
        block=name,
        variant=variant,
        tokens=count,
        calls=calls,
        result=result,
    )


def _capture(
    run: Callable[..., torch.Tensor], batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], None]:
    """Return a function that replays a CUDA graph with a call for each batch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x, ids in batches[:2]:
            run(x.clone(), ids)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, ids in batches:
            run(x.clone(), ids)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def main(
    about: str,
    names: Iterable[str],
    compare: Callable[..., Any],
    compare_on_gpu: Callable[..., bool],
    variants: Mapping[str, str],
    **environment: str,
) -> int:
    """Compare blocks, and return the exit status: 1 if an error is above the tolerance.

    Args:
        about: Description of the command.
        names: Blocks.
        compare: `compare(group, names)` returns each block's error on a CPU rank.
        compare_on_gpu: `compare_on_gpu(group, task)` returns whether all are right on one GPU.
        variants: Ways to run a block on a GPU, and what each is.
        **environment: Variables of CPU ranks.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("what")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4], help="of CPUs")
    listed = "; ".join(names)
    parser.add_argument("--names", nargs="*", help=f"or before the comma (default: all): {listed}")
    what = "; ".join(f"{name}: {text}" for name, text in variants.items())
    parser.add_argument("--variants", nargs="*", default=["weft"], help=f"on a GPU: {what}")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 64, 256, 4096])
    parser.add_argument(
        "--calls", type=int, help="in a CUDA graph; 0: no times (default: speed 20)"
    )
    parser.add_argument("--profile", action="store_true", help="kernels of the graphs, too")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing later")
    args = parser.parse_args()
    speed = args.what == "speed"
    measured = [name for name in names if name.endswith("by logits")]
    families = {name: name.partition(",")[0] for name in names}
    if unknown := set(args.names or ()) - {*families, *families.values()}:
        parser.error(f"no block {', '.join(unknown)}; there are {listed}")
    wanted = args.names or (measured if speed else families)
    args.names = [name for name, family in families.items() if {name, family} & {*wanted}]
    args.calls = 20 * speed if args.calls is None else args.calls
    if unknown := set(args.variants) - {*variants}:
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join(variants)}")
    if args.device == "cuda":
        end = time.monotonic() + args.seconds
        task = Task(
            args.what,
            tuple(args.names),
            tuple(args.variants),
            tuple(args.tokens),
            args.calls,
            args.profile,
            end,
        )
        limit = min(args.seconds + 120, 3600.0)
        return int(not all(launch(compare_on_gpu, task, ranks=1, device="cuda", timeout=limit)))
    os.environ |= environment | {"TORCHDYNAMO_DISABLE": "1"}
    worst = 0.0
    for ranks in args.ranks:
        results = launch(compare, args.names, ranks=ranks, timeout=600.0)
        for name in args.names:
            error = max(result[name] for result in results)
            text = f"{name}, {ranks} ranks: relative error {error:.3f}"
            record(args.what, "cpu", text, block=name, ranks=ranks, relative_error=error)
            worst = max(worst, error)
    return int(worst > TOLERANCE)
