# SPDX-License-Identifier: Apache-2.0
"""Random MoE blocks of transformers, their weights in an engine's layers, and the comparison.

An engine's blocks.py builds its own blocks and loads these weights through the engine's loaders.
weft runs them, on CPU ranks or GPUs; on GPUs the engine's own kernels run them, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import functools
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
from weft.group import Group
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
    """Sizes of a block.

    latent: Columns of experts between projections (Kimi-K3, Nemotron-3).
    limit: Of SwiGLU.
    """

    hidden: int = 256
    intermediate: int = 128
    experts: int = 16
    top_k: int = 4
    latent: int = 128
    limit: float = LIMIT


# Published sizes, with as many experts as fit on one GPU beside a float32 copy of their weights.
PUBLISHED = {
    "deepseek_v4": Shape(4096, 2048, 256, 6, limit=10.0),  # DeepSeek-V4-Flash
    "deepseek_v41": Shape(4096, 2048, 256, 6, limit=10.0),
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

    def load(linear: Any, weight: torch.Tensor, *shard: int) -> None:
        linear.weight.weight_loader(linear.weight, weight.detach().bfloat16(), *shard)

    if not hasattr(mlp, "gate_up_proj"):
        load(mlp.up_proj, shared.up_proj.weight)
    elif hasattr(shared, "gate_up_proj"):
        for shard, weight in enumerate(shared.gate_up_proj.weight.chunk(2)):
            load(mlp.gate_up_proj, weight, shard)
    else:
        load(mlp.gate_up_proj, shared.gate_proj.weight, 0)
        load(mlp.gate_up_proj, shared.up_proj.weight, 1)
    load(mlp.down_proj, shared.down_proj.weight)


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
        swiglu_limit=shape.limit,
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
        swiglu_limit=shape.limit,
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
    machine = describe_machine(gpu_names()[: line.get("gpus", 1)] if device == "cuda" else [])
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
Capture = Callable[[str], contextlib.AbstractContextManager[Any]]
WEFT_VARIANTS = ("weft", "dispatcher")
_graphs: list[Any] = []  # graphs stay, because peers have mapped memory of theirs


def split_variant(variant: str) -> tuple[str, str]:
    """Return a variant's kernels and its layout on several GPUs.

    "dp": each rank has tokens of its own and whole experts. "tp": each rank has all tokens and a
    part of each expert. "ep": each rank has all tokens and whole experts.
    """
    kernels, _, layout = variant.partition("-")
    return kernels, layout or ("dp" if kernels in WEFT_VARIANTS else "tp")


class Layouts:
    """The process groups of an engine, which are globals of one of its modules, by layout.

    Args:
        group: The ranks. One rank has one layout.
        parallel_state: The engine's module.
        create: Initializes the engine's groups for a layout. Collective.
    """

    def __init__(self, group: Group, parallel_state: Any, create: Callable[[str], Any]) -> None:
        self._group, self._module, self._create = group, parallel_state, create
        self._created: dict[str, tuple[Any, dict[str, Any]]] = {}

    def activate(self, variant: str) -> Any:
        """Make the groups of a variant's layout the engine's; return what `create` returned."""
        layout = "dp" if self._group.size == 1 else split_variant(variant)[1]
        vars(self._module).update(dict.fromkeys(self._groups()))
        if layout not in self._created:
            config = self._create(layout)
            self._created[layout] = config, self._groups()
        config, groups = self._created[layout]
        vars(self._module).update(groups)
        return config

    def _groups(self) -> dict[str, Any]:
        kind = self._module.GroupCoordinator
        items = vars(self._module).items()
        return {name: it for name, it in items if isinstance(it, kind) and name != "_WORLD"}


def check_all_reduce(variant: str, communicator: Any) -> None:
    """Raise RuntimeError if a variant that sums over ranks lacks the engine's own all-reduce."""
    if split_variant(variant)[1] != "dp" and (communicator is None or communicator.disabled):
        raise RuntimeError("the engine disabled its all-reduce; its warnings say why")


def on_gpu(
    group: Group, task: Task, build: Build, capture: Capture, close: Callable[[], None]
) -> bool:
    """Compare blocks on GPUs: outputs with the formula, and times with each other.

    A variant that raises is recorded with its error, and the others continue.

    Args:
        group: The ranks, each with a GPU of its own. Rank 0 records.
        task: What to compare.
        build: Returns a block's forward function and its formula, for a name, a variant and a
            shape.
        capture: Returns a context in which a variant can be captured on several GPUs.
        close: Frees weft's layers of a block.

    Returns:
        Whether every variant ran and no relative error is above the tolerance.
    """
    right = True
    for name in task.names:
        shape, runs = PUBLISHED[name.partition(",")[0]], {}
        first: dict[int, torch.Tensor] = {}
        for variant in task.variants:
            if max(group.all_gather(time.monotonic())) > task.end:
                if group.rank == 0:
                    print(f"{name}, {variant}: not started, the time is up", flush=True)
                right = False
                continue
            line = {"block": name, "variant": variant, "shape": dataclasses.asdict(shape)}
            error, run, errors = "", None, {}
            try:
                with torch.no_grad():
                    run, formula = build(name, variant, shape)
                    errors = _compute_errors(group, task, variant, shape, run, formula, first)
            except Exception as exception:
                error = f"{type(exception).__name__}: {exception}"
                error += "\n" + "".join(traceback.format_exception(exception)[-3:])
            if _any_failed(group, task, error, **line):
                right = False
            else:
                runs[variant] = run
                right &= _record_errors(group, task, errors, **line)
            run = formula = None  # type: ignore[assignment]
            gc.collect()
            torch.cuda.empty_cache()
        if task.calls:
            for count in task.tokens:
                with torch.no_grad():
                    right &= _compare_times(group, task, name, shape, runs, capture, count)
        runs.clear()
        first.clear()
        close()
        gc.collect()
        torch.cuda.empty_cache()
    return right


def _record(group: Group, task: Task, text: str, **line: Any) -> None:
    """Record a line on rank 0. `line` has the names "block" and "variant" at least."""
    if group.rank == 0:
        text = f"{line['block']}, {line['variant']}{text}"
        record(task.what, "cuda", text, gpus=group.size, **line)


def _any_failed(group: Group, task: Task, error: str, **line: Any) -> bool:
    """Whether a variant raised on any rank. The first error is recorded."""
    errors = [(rank, text) for rank, text in enumerate(group.all_gather(error[:6000])) if text]
    if errors:
        rank, text = errors[0]
        _record(group, task, f": FAILED on rank {rank}: {text}", **line, error=text, rank=rank)
    return bool(errors)


def own_tokens(group: Group, count: int) -> slice:
    """Return this rank's part of `count` tokens."""
    part = count // group.size
    return slice(group.rank * part, (group.rank + 1) * part)


def run_variant(
    group: Group,
    variant: str,
    run: Callable[..., torch.Tensor],
    x: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return a variant's outputs of its tokens: this rank's own with "dp", else all."""
    part = slice(None)
    if split_variant(variant)[1] == "dp":
        part = own_tokens(group, len(x))
    return run(x[part].clone(), ids[part])


def _compute_errors(
    group: Group,
    task: Task,
    variant: str,
    shape: Shape,
    run: Callable[..., torch.Tensor],
    formula: Formula,
    first: dict[int, torch.Tensor],
) -> dict[str, list[str]]:
    """Return a variant's errors in this rank's part of the tokens, by number of tokens.

    They are relative errors, of all rows and of the median row, and the difference from the
    outputs of the first variant that ran, which `first` gets.
    """
    errors = {}
    for count in task.tokens:
        torch.manual_seed(1 + count)
        x, ids = draw_tokens(count, shape, "cuda")
        own = own_tokens(group, count)
        out = run_variant(group, variant, run, x, ids).float()
        out = out if len(out) < count else out[own]
        expected = formula(x[own].float(), ids[own])
        rows = (out - expected).norm(dim=1) / expected.norm(dim=1)
        error = relative_error(out, expected)
        differs = relative_error(out, first.setdefault(count, out))
        errors[str(count)] = [str(each) for each in (error, float(rows.median()), differs)]
    return errors


def _record_errors(group: Group, task: Task, errors: dict[str, list[str]], **line: Any) -> bool:
    """Record a variant's errors, the largest of all ranks; return whether they are tolerable."""
    right, by_rank = True, group.all_gather(errors)  # as text, because JSON has no NaN
    for count in task.tokens:
        rows = [[float(each) for each in of_rank[str(count)]] for of_rank in by_rank]
        error, median, differs = torch.tensor(rows, dtype=torch.float64).amax(0).tolist()
        right &= error <= TOLERANCE  # False also for NaN
        _record(
            group,
            task,
            f", {count} tokens: relative error {error:.4f}, of the median row {median:.4f}, from "
            f"the first variant {differs:.4f}",
            **line,
            tokens=count,
            relative_error=error,
            median_row_error=median,
            difference_from_first=differs,
        )
    return right


def _compare_times(
    group: Group,
    task: Task,
    name: str,
    shape: Shape,
    runs: Mapping[str, Callable[..., torch.Tensor]],
    capture: Capture,
    count: int,
    rounds: int = 15,
) -> bool:
    """Record the median time of a call of each variant, measured alternately in CUDA graphs.

    A round's time is that of its slowest rank. Blocks may write their result into their input, so
    each call copies it first. "copy" is the time of that copy of all tokens.

    Returns:
        Whether every variant could be captured.
    """
    torch.manual_seed(2 + count)
    calls = task.calls if count <= 1024 else max(1, task.calls // 4)
    batches = [draw_tokens(count, shape, "cuda") for _ in range(calls)]
    replays: dict[str, Callable[[], None]] = {}
    for variant, run in {"copy": lambda x, ids: x, **runs}.items():
        call, error = functools.partial(run_variant, group, variant, run), ""
        captures = group.size > 1 and variant in runs
        try:
            context = capture(variant) if captures else contextlib.nullcontext()
            replays[variant] = _capture(call, batches, context)
            if captures:
                _graphs.append(replays[variant])
        except Exception as exception:
            error = f"no graph: {type(exception).__name__}: {exception}"
        line = {"block": name, "variant": variant, "tokens": count}
        if _any_failed(group, task, error, **line, shape=dataclasses.asdict(shape)):
            replays.pop(variant, None)
    times: dict[str, list[float]] = {variant: [] for variant in replays}
    token = torch.zeros(1, device="cuda")
    for round_ in range(rounds + 2):
        for variant, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if group.size > 1:  # ranks begin together, after the CPU has launched everything
                torch.cuda._sleep(1_000_000)
                torch.distributed.all_reduce(token)
            begin.record()
            replay()
            end.record()
            end.synchronize()
            if round_ >= 2:
                times[variant].append(begin.elapsed_time(end) * 1000 / calls)
    for variant, of_rank in times.items():
        values = [max(each) for each in zip(*group.all_gather(of_rank), strict=True)]
        median = statistics.median(values)
        _record(
            group,
            task,
            f", {count} tokens: {median:.1f} us a call ({min(values):.1f} to {max(values):.1f})",
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
            group.barrier()
            line = {"block": name, "variant": variant, "tokens": count, "calls": calls}
            _record_kernels(group, task, replay, **line)
    return len(replays) == len(runs) + 1


def _record_kernels(group: Group, task: Task, replay: Callable[[], None], **line: Any) -> None:
    """Record the us of a call by kernel on rank 0, and keep its trace of the graph."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        replay()
        torch.cuda.synchronize()
    if group.rank != 0:
        return
    trace = OUT / f"trace-{line['variant']}-{line['tokens']}.json.gz"
    profiler.export_chrome_trace(str(trace))
    result = summed(kernels(trace), line["calls"])
    lines = (f"    {us:8.2f} {kernel[:120]}" for kernel, us in result["kernels"].items())
    _record(
        group,
        task,
        f", {line['tokens']} tokens, us of a call by kernel: {result['us']:.1f} in all, "
        f"{result['span']:.1f} from the first to the last\n" + "\n".join(lines),
        **line,
        result=result,
    )


def _capture(
    run: Callable[..., torch.Tensor],
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    context: contextlib.AbstractContextManager[Any],
) -> Callable[[], None]:
    """Return a function that replays a CUDA graph, captured in `context`, with all batches."""
    graph = torch.cuda.CUDAGraph()
    with context:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for x, ids in batches[:2]:
                run(x, ids)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for x, ids in batches:
                run(x, ids)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def main(
    about: str,
    names: Iterable[str],
    compare: Callable[..., Any],
    compare_on_gpu: Callable[..., bool],
    variants: Mapping[str, str],
    layouts: Mapping[str, str],
    **environment: str,
) -> int:
    """Compare blocks, and return the exit status: 1 if an error is above the tolerance.

    Args:
        about: Description of the command.
        names: Blocks.
        compare: `compare(group, names)` returns each block's error on a CPU rank.
        compare_on_gpu: `compare_on_gpu(group, task)` returns whether all are right on GPUs.
        variants: Kernels that run a block on a GPU, and what each is.
        layouts: Suffixes of the engine's own kernels on several GPUs, and what each is.
        **environment: Variables of CPU ranks.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("what")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4], help="of CPUs")
    listed = "; ".join(names)
    parser.add_argument("--names", nargs="*", help=f"or before the comma (default: all): {listed}")
    what = "; ".join(f"{name}: {text}" for name, text in (*variants.items(), *layouts.items()))
    parser.add_argument("--variants", nargs="*", default=["weft"], help=f"on a GPU: {what}")
    parser.add_argument("--gpus", type=int, default=1, help="ranks with a GPU each")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[8, 64, 256, 4096], help="of all GPUs together"
    )
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
    own = [name + layout for name in variants for layout in layouts if name not in WEFT_VARIANTS]
    if unknown := set(args.variants) - {*variants, *own}:
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join((*variants, *own))}")
    if args.device == "cuda":
        if len(gpu_names()) < args.gpus:
            parser.error(f"--gpus {args.gpus}, but the machine has {len(gpu_names())} GPUs")
        if uneven := [count for count in args.tokens if count % args.gpus]:
            parser.error(f"--tokens {uneven}: not multiples of --gpus {args.gpus}")
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
        ranks = args.gpus
        return int(not all(launch(compare_on_gpu, task, ranks=ranks, device="cuda", timeout=limit)))
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
