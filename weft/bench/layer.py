# SPDX-License-Identifier: Apache-2.0
"""`weft bench layer`: MoE layers of known models, from router logits to output."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch

from weft import reference
from weft.bench.harness import (
    TIMEOUT,
    Case,
    Measurement,
    SkippedVariant,
    TimedCall,
    Trial,
    Trials,
    synchronize_ranks,
)
from weft.bench.limits import HBM_READ_TB_PER_S, layer_floor_us, link_gb_per_s
from weft.bench.moe import row_bytes
from weft.bench.routing import (
    count_token_rows,
    draw_popularity_ranks,
    max_remote_rows,
    parse_routing,
    sample_gumbel,
)
from weft.errors import CreationFailed, InvalidArgument
from weft.fields import check_values
from weft.gemm import unpack_mxfp4
from weft.gemm.config import MXFP4
from weft.group import Group
from weft.moe import (
    CLAMPED_SWIGLU,
    MODELS,
    OVERLAPS,
    Expert,
    ExpertWeights,
    FP8Expert,
    MoE,
    MoEConfig,
)
from weft.moe.routing.router import route_in_torch
from weft.placement import Placement
from weft.shape import FP8_BLOCK, Shape

LAYER_MODELS = ("deepseek-v3", "qwen3-30b-a3b", "glm-4.5-air", "gpt-oss-120b")
WEIGHT_DTYPES = ("bf16", "fp8", "mxfp4")
# A scaled-down model for CPU ranks.
SMALL_HIDDEN, SMALL_INTERMEDIATE, SMALL_EXPERTS = 256, 128, 32
NUM_COMPARED = 16  # tokens per rank that are compared with the reference
# Allowed error in half units in the last place of the largest value (docs/user/moe.md).
HALF_UNITS, HALF_UNITS_FP8_COMBINE = 5, 16
# FP8 experts quantize the rows between their GEMMs to e4m3, with a relative error up to 1/16.
FP8_ERROR = 1 / 16
SHARED = -1  # index of the shared expert
BATCH_INVARIANT = "batch_invariant"  # a variant, with the overlap of "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase(Case):
    """Parameters of a run of MoE layers.

    Attributes:
        model: One of LAYER_MODELS.
        overlaps: Overlaps of `weft.MoE` to measure; empty for all that the layer supports.
        mode: See MoE.
        routing: "uniform", "zipf" or "zipf:EXPONENT".
        dtype: Dtype of the expert weights, "bf16", "fp8" or "mxfp4". With "mxfp4", the shared
            expert is FP8.
        experts: Number of experts; None for that of the model.
        shared: Whether to include the shared expert of the model.
        gemm: See MoE.
        quantize: See MoE; None for its default.
        combine_dtype: See MoE.
        batch_invariant: Whether to measure the layer with `batch_invariant=True`, too.
    """

    operator: ClassVar[str] = "layer"
    check_description: ClassVar[str] = (
        "16 tokens of a rank against weft.reference.moe_layer in float32 (bounds: docs/user/moe.md)"
    )

    model: str = "deepseek-v3"
    overlaps: tuple[str, ...] = ()
    mode: str = "throughput"
    routing: str = "uniform"
    dtype: str = "bf16"
    experts: int | None = None
    shared: bool = True
    gemm: str = "auto"
    quantize: str | None = None
    combine_dtype: str | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        Case.__post_init__(self)
        if parse_routing(self.routing)[0] not in ("uniform", "zipf"):
            raise InvalidArgument(
                f"routing is {self.routing!r}; choose one of uniform, zipf, zipf:EXPONENT"
            )
        check_values(Shape, ranks=self.ranks, tokens=max(self.tokens))
        if self.experts is not None and self.experts < self.ranks:
            raise InvalidArgument(
                f"experts is {self.experts}; it must be at least the number of ranks, {self.ranks}"
            )
        config = self.config  # validates the sizes
        Placement.blocks(config.routing.num_experts, self.ranks)
        sizes = (config.hidden, config.intermediate)
        is_unaligned = any(size % FP8_BLOCK for size in sizes)
        if self.uses_fp8_rows and (is_unaligned or (self.dtype == "fp8" and config.biased)):
            biases = " and no biases" if self.dtype == "fp8" else ""
            raise InvalidArgument(
                f"dtype {self.dtype} needs sizes that are multiples of {FP8_BLOCK}{biases}; this "
                f"model has hidden {sizes[0]}, intermediate {sizes[1]}, biased={config.biased}: "
                "use bf16"
            )

    @property
    def config(self) -> MoEConfig:
        """Config of the layer; smaller than the model's on CPU ranks."""
        model = MODELS[self.model]
        experts, shared = self.experts or model.routing.num_experts, model.shared
        if self.device == "cpu":
            shared = min(shared, SMALL_INTERMEDIATE)
            experts = self.experts or SMALL_EXPERTS
            model = replace(model, hidden=SMALL_HIDDEN, intermediate=SMALL_INTERMEDIATE)
        routing = replace(model.routing, num_experts=experts)
        return replace(model, routing=routing, shared=shared if self.shared else 0)

    @property
    def uses_fp8_rows(self) -> bool:
        """Whether the rows of the experts' GEMMs are FP8."""
        return self.dtype in ("fp8", "mxfp4")

    @property
    def dispatch_format(self) -> str | None:
        """Quantization format of dispatched rows; None for the dtype of the model."""
        return self.quantize or ("fp8" if self.uses_fp8_rows else None)

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants to measure: overlaps, and BATCH_INVARIANT."""
        return (self.overlaps or OVERLAPS) + (BATCH_INVARIANT,) * self.batch_invariant

    def moe_options(self, variant: str, tokens: int) -> dict[str, Any]:
        """Return the arguments of `weft.MoE` other than the weights."""
        names = ("mode", "gemm", "quantize", "combine_dtype", "num_sms", "programmatic_launch")
        return {name: getattr(self, name) for name in names} | {
            "max_tokens": tokens,
            "overlap": "auto" if variant == BATCH_INVARIANT else variant,
            "batch_invariant": variant == BATCH_INVARIANT,
            "timeout": TIMEOUT,
            "fp8": self.uses_fp8_rows,
        }

    def describe(self) -> str:
        config = self.config
        shared = "with its shared expert" if config.shared else "no shared expert"
        return (
            f"{self.model}: {self.ranks} ranks, hidden {config.hidden}, intermediate "
            f"{config.intermediate}, top {config.routing.top_k} of {config.routing.num_experts}, "
            f"{self.dtype} experts, {shared}, routing {self.routing}, mode {self.mode}, "
            f"{self.dispatch_format or 'bf16'} dispatched, {self.combine_dtype or 'bf16'} combined"
        )

    def trials(self, group: Group) -> Trials:
        """Yield a trial per size and variant; max_tokens of a layer is exactly that size."""
        placement = Placement.blocks(self.config.routing.num_experts, group.size)
        weights = generate_local_experts(self, placement.experts_of(group.rank), group.device)
        shared = generate_shared_expert(self, group.device)
        for tokens in self.tokens:
            data = LayerTestData(group, self, shared, tokens)
            for variant in self.variants:
                try:
                    layer = MoE(
                        group,
                        self.config,
                        weights,
                        shared=shared,
                        correction=data.correction,
                        **self.moe_options(variant, tokens),
                    )
                except (CreationFailed, InvalidArgument) as error:
                    if self.overlaps:
                        raise  # the user requested it
                    yield SkippedVariant(variant, tokens, f"{type(error).__name__}: {error}")
                    continue
                with contextlib.closing(layer):
                    yield LayerTrial(data, layer, variant)

    def phase_bytes(self, measurement: Measurement, phase: str) -> tuple[float, float]:
        """Return no logical bytes, and the NVLink bytes of the layer."""
        return 0.0, measurement.metadata["wire_bytes"]

    def floor_us(self, measurement: Measurement, gpus: list[str]) -> float | None:
        return layer_floor_us(
            measurement.metadata["hbm_bytes"], measurement.metadata["wire_bytes"], gpus
        )

    def describe_floor(self) -> str:
        return (
            "max of HBM (weights of experts that have rows, and each received row read and "
            f"written once, on the busiest rank, at {HBM_READ_TB_PER_S:g} TB/s) and NVLink (wire "
            f"bytes / {link_gb_per_s(self.ranks):g} GB/s)"
        )

    def extra_columns(self, measurement: Measurement) -> dict[str, float | str]:
        """Return the imbalance of the routing, and whether "auto" selects this overlap."""
        metadata = measurement.metadata
        is_auto = metadata["auto"]["auto"] == measurement.variant
        columns: dict[str, float | str] = {"max / mean rows": metadata["imbalance"]}
        return columns | ({"auto": "auto"} if is_auto else {})

    def format_notes(self, measurements: Sequence[Measurement]) -> list[str]:
        """Return the GEMM of the experts, and why "auto" selects an overlap at each size."""
        gemms = dict.fromkeys(m.metadata["gemm"] for m in measurements)
        reasons = {m.tokens: m.metadata["auto"]["reason"] for m in measurements}
        lines = [f"GEMM of the experts: {', '.join(gemms)}."]
        lines += [f"auto, {tokens} tokens: {reason}" for tokens, reason in reasons.items()]
        if self.device == "cpu":
            lines.append("CPU ranks: a scaled-down model.")
        return lines


class LayerTestData:
    """Inputs of one rank at one size, and the expected output of a sample of its tokens."""

    def __init__(self, group: Group, case: LayerCase, shared: Any, tokens: int) -> None:
        self.group, self.case, self.shared, self.tokens = group, case, shared, tokens
        device, config = group.device, case.config
        generator = torch.Generator().manual_seed(case.row_seed(tokens, group.rank))
        x = torch.randn(tokens, config.hidden, generator=generator)
        self.x = x.to(device, config.dtype)
        self.logits = generate_logits(case, tokens, group.rank).to(device)
        correction = generate_correction(case)
        self.correction = None if correction is None else correction.to(device)
        self.out = torch.empty_like(self.x)
        num_compared = min(tokens, NUM_COMPARED)
        self.sample = torch.linspace(0, tokens - 1, num_compared).long().to(device)
        self._expected: torch.Tensor | None = None

    def error_bound(self, expected: torch.Tensor) -> float:
        """Return the maximum error that rounding can cause."""
        amax = float(expected.abs().max())
        half_units = HALF_UNITS_FP8_COMBINE if self.case.combine_dtype else HALF_UNITS
        rounding = half_units * torch.finfo(self.case.config.dtype).eps / 2 * max(1.0, amax)
        return rounding + (FP8_ERROR * amax if self.case.uses_fp8_rows else 0.0)

    def compute_expected(self, owners: tuple[int, ...]) -> torch.Tensor:
        """Compute the expected output of the sample, float32 `[sample, hidden]`.

        Every rank generates all experts that the sample selects and runs
        `weft.reference.moe_layer` in float32 with their dequantized weights.

        Args:
            owners: Rank of each expert.
        """
        if self._expected is not None:
            return self._expected
        config, device = self.case.config, self.group.device
        x = self.x[self.sample]
        ids, weights = route_in_torch(config.routing, self.logits[self.sample], self.correction)
        rows = x
        if self.case.dispatch_format is not None:
            quantized = reference.quantize(x, self.case.dispatch_format)
            rows = reference.dequantize(*quantized).to(x.dtype)
        is_clamped = config.gating is CLAMPED_SWIGLU
        rank_sums = torch.zeros((self.group.size, *x.shape), device=device)
        for expert in sorted(set(ids.flatten().tolist())):
            expert_weights = generate_expert(self.case, expert, device)
            rank_sums[owners[expert]] += reference.moe_layer(
                rows,
                torch.where(ids == expert, 0, -1),
                weights,
                dequantize_weights(expert_weights.gate_up, expert_weights.gate_up_scale),
                dequantize_weights(expert_weights.down, expert_weights.down_scale),
                gate_up_bias=expert_weights.gate_up_bias,
                down_bias=expert_weights.down_bias,
                gating=reference.clamped_swiglu if is_clamped else reference.swiglu,
                weigh_input=config.routing.weigh == "input",
            )
        total = rank_sums.to(config.dtype).float().sum(dim=0)
        self._expected = total if self.shared is None else total + self.shared(x).float()
        return self._expected


class LayerTrial(Trial):
    """A layer of one variant at one size."""

    def __init__(self, data: LayerTestData, layer: MoE, variant: str) -> None:
        self.data, self.layer, self.group = data, layer, data.group
        self.variant, self.tokens, self.outputs = variant, data.tokens, [data.out]

    def timed_call(self) -> TimedCall:
        """Return a forward pass. It is not capturable with the "torch" GEMM, which synchronizes."""
        data = self.data
        call = functools.partial(self.layer, data.x, data.logits, out=data.out)
        return TimedCall({"call": call}, capturable=self.layer.gemm != "torch")

    def compare(self) -> str | None:
        synchronize_ranks(self.group)
        self.layer.check()
        rank, out = f"rank {self.group.rank}", self.data.out
        if not bool(out.isfinite().all()):
            return f"{rank}: the output has values that are not finite"
        expected = self.data.compute_expected(self.layer.exchange.placement.ranks)
        error = float((out[self.data.sample].float() - expected).abs().max())
        bound = self.data.error_bound(expected)
        if error <= bound:
            return None
        return f"{rank}: the error against the reference is {error:.4g}; {bound:.4g} is allowed"

    def metadata(self) -> dict[str, Any]:
        """Return the expert load, the choice of "auto", and the GEMM of the experts."""
        load = compute_load(self.data.case, self.tokens)
        return {
            "most": load.max_rows,  # the names in recorded results
            "mean": load.mean_rows,
            "hit": load.num_active_experts,
            "hbm_bytes": load.hbm_bytes,
            "wire_bytes": load.wire_bytes,
            "imbalance": load.imbalance,
            "gemm": self.layer.gemm,
            "auto": asdict(self.layer.explain()),
        }


def generate_logits(case: LayerCase, tokens: int, rank: int) -> torch.Tensor:
    """Generate the router logits of one rank on the CPU, float32 `[tokens, num_experts]`.

    uniform: normally distributed, so that all experts are equally likely.
    zipf: as in `generate_ids`, so that the top k are a sample without replacement.
    """
    routing, (kind, exponent) = case.config.routing, parse_routing(case.routing)
    generator = torch.Generator().manual_seed((case.seed * 131 + tokens) * 64 + rank)
    shape = (tokens, routing.num_experts)
    if kind == "uniform":
        return torch.randn(shape, generator=generator)
    popularity_ranks = draw_popularity_ranks(routing.num_experts, case.seed)
    return -exponent * popularity_ranks.log() + sample_gumbel(shape, generator)


def generate_correction(case: LayerCase) -> torch.Tensor | None:
    """Generate small correction biases on the CPU, float32 `[num_experts]`, or None if unused."""
    routing = case.config.routing
    if not routing.correction:
        return None
    generator = torch.Generator().manual_seed(case.seed + 17)
    return torch.randn(routing.num_experts, generator=generator) * 0.01


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Rows of the experts and minimum memory and link traffic of one size.

    Attributes:
        max_rows: Maximum number of rows of an expert.
        mean_rows: Mean number of rows per expert.
        num_active_experts: Number of experts that have rows.
        hbm_bytes: Minimum memory traffic of the busiest rank: it reads the weights of its active
            experts and of the shared expert, reads each received row and writes its result, and
            reads and writes its own tokens.
        wire_bytes: Bytes that the busiest rank sends or receives in dispatch and combine, with one
            row per token and rank.
    """

    max_rows: int
    mean_rows: float
    num_active_experts: int
    hbm_bytes: int
    wire_bytes: int

    @property
    def imbalance(self) -> float:
        """Maximum number of rows of an expert, divided by the mean."""
        return self.max_rows / self.mean_rows


def compute_load(case: LayerCase, tokens: int) -> ExpertLoad:
    """Compute the expert load of one size by routing the logits of every rank on the CPU."""
    config, correction = case.config, generate_correction(case)
    ids = [
        route_in_torch(config.routing, generate_logits(case, tokens, rank), correction).ids
        for rank in range(case.ranks)
    ]
    return compute_load_from_ids(case, ids)


def compute_load_from_ids(case: LayerCase, ids: list[torch.Tensor]) -> ExpertLoad:
    """Compute the expert load of the ids `[tokens, top_k]` of each rank."""
    config, ranks = case.config, case.ranks
    experts, hidden, itemsize = config.routing.num_experts, config.hidden, config.dtype.itemsize
    rows = torch.bincount(torch.cat(ids).flatten().long(), minlength=experts)
    owner = torch.tensor(Placement.blocks(experts, ranks).ranks)
    active_experts = torch.bincount(owner, weights=(rows > 0).double(), minlength=ranks).long()
    token_rows = count_token_rows(ids, experts)
    dispatch_row_bytes = row_bytes(hidden, itemsize, case.dispatch_format)
    combine_row_bytes = row_bytes(hidden, itemsize, case.combine_dtype)
    result_bytes = hidden * itemsize
    num_tokens = torch.tensor([len(rank_ids) for rank_ids in ids])
    hbm_bytes = (
        active_experts * weight_bytes(config, case.dtype, config.intermediate, biased=config.biased)
        + token_rows.sum(dim=0) * (dispatch_row_bytes + result_bytes)
        + num_tokens * 2 * result_bytes
    )
    shared_dtype = "fp8" if case.uses_fp8_rows else case.dtype
    return ExpertLoad(
        max_rows=int(rows.max()),
        mean_rows=float(rows.double().mean()),
        num_active_experts=int((rows > 0).sum()),
        hbm_bytes=int(hbm_bytes.max()) + weight_bytes(config, shared_dtype, config.shared),
        wire_bytes=max_remote_rows(token_rows) * (dispatch_row_bytes + combine_row_bytes),
    )


def generate_expert(case: LayerCase, expert: int, device: torch.device) -> ExpertWeights:
    """Generate the weights of one expert; `expert` may be SHARED.

    Any rank can generate any expert, because the weights depend only on the seed and the device
    type.
    """
    config, is_shared = case.config, expert == SHARED
    generator = torch.Generator(device).manual_seed(case.seed * 100_003 + expert + 1)
    inner = config.shared if is_shared else config.intermediate

    def normal(*shape: int, fan: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator, device=device) / math.sqrt(fan)

    weights = ExpertWeights(
        normal(2 * inner, config.hidden, fan=config.hidden),
        normal(config.hidden, inner, fan=inner),
    )
    if config.biased and not is_shared:
        biases = normal(2 * inner, fan=4), normal(config.hidden, fan=4)
        gate_up_bias, down_bias = (bias.to(config.dtype) for bias in biases)
        weights = replace(weights, gate_up_bias=gate_up_bias, down_bias=down_bias)
    if case.dtype == "bf16" or is_shared:
        return replace(
            weights, gate_up=weights.gate_up.to(config.dtype), down=weights.down.to(config.dtype)
        )
    return weights.to_fp8() if case.dtype == "fp8" else weights.to_mxfp4()


def dequantize_weights(weights: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return weights as float32 `[experts, rows, columns]`."""
    if scale is None:
        return weights.float()
    if weights.dtype == MXFP4:
        return unpack_mxfp4(weights, scale)
    return reference.dequantize(weights, scale.repeat_interleave(FP8_BLOCK, 1))


def generate_local_experts(
    case: LayerCase, local: tuple[int, ...], device: torch.device
) -> ExpertWeights:
    """Generate the weights of a rank's experts, one expert at a time to limit the memory."""
    stacked: dict[str, torch.Tensor] = {}
    for index, expert in enumerate(local):
        weights = generate_expert(case, expert, device)
        for name in (field.name for field in fields(weights)):
            if (tensor := getattr(weights, name)) is None:
                continue
            if name not in stacked:
                stacked[name] = tensor.new_empty((len(local), *tensor.shape[1:]))
            stacked[name][index] = tensor[0]
    return ExpertWeights(**stacked)


def generate_shared_expert(case: LayerCase, device: torch.device) -> Expert | FP8Expert | None:
    """Generate the shared expert, in FP8 if the rows are FP8; None if the layer has none."""
    if not case.config.shared:
        return None
    weights = generate_expert(case, SHARED, device)
    expert = Expert(weights.gate_up[0], weights.down[0])
    return FP8Expert.from_expert(expert) if case.uses_fp8_rows else expert


def weight_bytes(config: MoEConfig, dtype: str, inner: int, *, biased: bool = False) -> int:
    """Return the bytes of the weights, scales and biases of one expert.

    Args:
        config: Config of the layer.
        dtype: Dtype of the weights, as in `LayerCase`.
        inner: Intermediate size of the expert.
        biased: Whether the expert has biases.
    """
    num_weights, num_rows = 3 * config.hidden * inner, 2 * inner + config.hidden
    bias_bytes = biased * num_rows * config.dtype.itemsize
    if dtype == "fp8":
        return num_weights + 4 * num_weights // FP8_BLOCK**2
    if dtype == "mxfp4":
        return num_weights // 2 + num_weights // 32 + 4 * num_rows + bias_bytes
    return num_weights * config.dtype.itemsize + bias_bytes
