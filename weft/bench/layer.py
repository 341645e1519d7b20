# SPDX-License-Identifier: Apache-2.0
"""`weft bench layer`: whole MoE layers of named models, from router logits to output."""

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
    Calls,
    Case,
    Measurement,
    Rejection,
    Trial,
    Trials,
    synchronize_ranks,
)
from weft.bench.limits import HBM_READ_TB_PER_S, layer_floor_us, link_rate
from weft.bench.moe import row_bytes
from weft.bench.routing import max_rank_rows, parse_routing, places_of, sample_gumbel, token_rows
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
SAMPLE = 16  # compared tokens per rank
# Allowed error in half units in the last place of the largest value (docs/user/moe.md).
HALF_UNITS, HALF_UNITS_FP8_BACK = 5, 16
# FP8 experts quantize the rows between their GEMMs to e4m3: each value by up to 1/16.
FP8_PART = 1 / 16
SHARED = -1  # seed offset of the shared expert


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase(Case):
    """Whole MoE layers with each overlap.

    Attributes:
        model: One of LAYER_MODELS.
        overlaps: Overlaps of `weft.MoE`; empty for all that this layer supports.
        mode: As in MoE.
        routing: "uniform", "zipf" or "zipf:EXPONENT".
        dtype: Dtype of the experts' weights, "bf16", "fp8" or "mxfp4". With "mxfp4", the shared
            expert is FP8.
        experts: Number of experts, or None for the model's.
        shared: Whether to include the model's shared expert.
        gemm: As in MoE.
        quantize: As in MoE; None leaves the choice to it.
        combine_dtype: As in MoE.
    """

    operator: ClassVar[str] = "layer"
    checked: ClassVar[str] = (
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

    def __post_init__(self) -> None:
        Case.__post_init__(self)
        if parse_routing(self.routing)[0] not in ("uniform", "zipf"):
            raise InvalidArgument(
                f"routing is {self.routing!r}; choose one of uniform, zipf, zipf:EXPONENT"
            )
        check_values(Shape, ranks=self.ranks, tokens=max(self.tokens))
        if self.experts is not None and self.experts < self.ranks:
            raise InvalidArgument(
                f"{self.experts} experts on {self.ranks} ranks; use one or more each"
            )
        config = self.config  # validates the sizes
        Placement.blocks(config.routing.num_experts, self.ranks)
        sizes = (config.hidden, config.intermediate)
        partial = any(size % FP8_BLOCK for size in sizes)
        if self.fp8_rows and (partial or (self.dtype == "fp8" and config.biased)):
            biases = " and no biases" if self.dtype == "fp8" else ""
            raise InvalidArgument(
                f"dtype {self.dtype} needs sizes of whole blocks of {FP8_BLOCK}{biases}; this "
                f"model has hidden {sizes[0]}, intermediate {sizes[1]}, biased={config.biased}: "
                "use bf16"
            )

    @property
    def config(self) -> MoEConfig:
        """The layer's config, scaled down on CPU ranks."""
        model = MODELS[self.model]
        experts, shared = self.experts or model.routing.num_experts, model.shared
        if self.device == "cpu":
            shared = min(shared, SMALL_INTERMEDIATE)
            experts = self.experts or SMALL_EXPERTS
            model = replace(model, hidden=SMALL_HIDDEN, intermediate=SMALL_INTERMEDIATE)
        routing = replace(model.routing, num_experts=experts)
        return replace(model, routing=routing, shared=shared if self.shared else 0)

    @property
    def fp8_rows(self) -> bool:
        """Whether experts take FP8 rows."""
        return self.dtype in ("fp8", "mxfp4")

    @property
    def wire(self) -> str | None:
        """Format of dispatched rows, or None for the model's dtype."""
        return self.quantize or ("fp8" if self.fp8_rows else None)

    def moe_options(self, overlap: str, tokens: int) -> dict[str, Any]:
        """Return the arguments of `weft.MoE` besides its weights."""
        names = ("mode", "gemm", "quantize", "combine_dtype", "num_sms", "programmatic_launch")
        options = {name: getattr(self, name) for name in names}
        sizes = {"max_tokens": tokens, "overlap": overlap, "timeout": TIMEOUT}
        return {**options, **sizes, "fp8": self.fp8_rows}

    def title(self) -> str:
        config = self.config
        shared = "with its shared expert" if config.shared else "no shared expert"
        return (
            f"{self.model}: {self.ranks} ranks, hidden {config.hidden}, intermediate "
            f"{config.intermediate}, top {config.routing.top_k} of {config.routing.num_experts}, "
            f"{self.dtype} experts, {shared}, routing {self.routing}, mode {self.mode}, "
            f"{self.wire or 'bf16'} dispatched, {self.combine_dtype or 'bf16'} combined"
        )

    def trials(self, group: Group) -> Trials:
        """Yield the layer with each overlap, with capacity for exactly the tokens of a size."""
        placement = Placement.blocks(self.config.routing.num_experts, group.size)
        weights = stack_experts(self, placement.experts_of(group.rank), group.device)
        shared = shared_expert(self, group.device)
        for tokens in self.tokens:
            inputs = LayerInputs(group, self, shared, tokens)
            for overlap in self.overlaps or OVERLAPS:
                try:
                    layer = MoE(
                        group,
                        self.config,
                        weights,
                        shared=shared,
                        correction=inputs.correction,
                        **self.moe_options(overlap, tokens),
                    )
                except (CreationFailed, InvalidArgument) as error:
                    if self.overlaps:
                        raise  # the user selected it
                    yield Rejection(overlap, tokens, f"{type(error).__name__}: {error}")
                    continue
                with contextlib.closing(layer):
                    yield LayerTrial(inputs, layer, overlap)

    def bytes_of(self, measured: Measurement, phase: str) -> tuple[float, float]:
        """Return the NVLink bytes of the whole layer."""
        return 0.0, measured.facts["wire_bytes"]

    def floor_us(self, measured: Measurement, gpus: list[str]) -> float | None:
        """Return the longer of the memory's and the links' time."""
        return layer_floor_us(measured.facts["hbm_bytes"], measured.facts["wire_bytes"], gpus)

    def floor_text(self) -> str:
        return (
            "the larger of HBM (weights of experts that have rows, and each received row read and "
            f"written once, on the busiest rank, at {HBM_READ_TB_PER_S:g} TB/s) and NVLink (wire "
            f"bytes / {link_rate(self.ranks):g} GB/s)"
        )

    def columns(self, measured: Measurement) -> dict[str, float | str]:
        """Return the routing's imbalance, and whether "auto" selects this overlap."""
        facts = measured.facts
        columns: dict[str, float | str] = {"max / mean rows": facts["imbalance"]}
        return columns | ({"auto": "auto"} if facts["auto"]["auto"] == measured.variant else {})

    def notes(self, measured: Sequence[Measurement]) -> list[str]:
        """Return the experts' GEMM, and what "auto" selects at each size and why."""
        gemms = dict.fromkeys(each.facts["gemm"] for each in measured)
        auto = {each.tokens: each.facts["auto"]["reason"] for each in measured}
        lines = [f"GEMM of the experts: {', '.join(gemms)}."]
        lines += [f"auto, {tokens} tokens: {reason}" for tokens, reason in auto.items()]
        if self.device == "cpu":
            lines.append("CPU ranks: a scaled-down model.")
        return lines


class LayerInputs:
    """One rank's tokens and logits of one size, with the expected output of any layer."""

    def __init__(self, group: Group, case: LayerCase, shared: Any, tokens: int) -> None:
        self.group, self.case, self.shared, self.tokens = group, case, shared, tokens
        device, config = group.device, case.config
        generator = torch.Generator().manual_seed(case.seed_of(tokens, group.rank))
        x = torch.randn(tokens, config.hidden, generator=generator)
        self.x = x.to(device, config.dtype)
        self.logits = make_logits(case, tokens, group.rank).to(device)
        correction = make_correction(case)
        self.correction = None if correction is None else correction.to(device)
        self.out = torch.empty_like(self.x)
        self.sample = torch.linspace(0, tokens - 1, min(tokens, SAMPLE)).long().to(device)
        self._expected: torch.Tensor | None = None

    def bound(self, expected: torch.Tensor) -> float:
        """Return the largest difference that rounding explains."""
        largest = max(1.0, float(expected.abs().max()))
        half_units = HALF_UNITS_FP8_BACK if self.case.combine_dtype else HALF_UNITS
        rounding = half_units * torch.finfo(self.case.config.dtype).eps / 2 * largest
        part = FP8_PART * float(expected.abs().max()) if self.case.fp8_rows else 0.0
        return rounding + part

    def expected(self, owners: tuple[int, ...]) -> torch.Tensor:
        """Return weft.reference.moe_layer of the sample, float32 `[sample, hidden]`.

        Each expert is generated again, on every rank, and multiplies in float32 with its
        dequantized weights.
        """
        if self._expected is not None:
            return self._expected
        config, device = self.case.config, self.group.device
        x = self.x[self.sample]
        ids, weights = route_in_torch(config.routing, self.logits[self.sample], self.correction)
        sent, clamped = x, config.gating is CLAMPED_SWIGLU
        if self.case.wire is not None:  # use the dequantized rows
            sent = reference.dequantize(*reference.quantize(x, self.case.wire)).to(x.dtype)
        sums = torch.zeros((self.group.size, *x.shape), device=device)
        for expert in sorted(set(ids.flatten().tolist())):
            stored = make_expert(self.case, expert, device)
            sums[owners[expert]] += reference.moe_layer(
                sent,
                torch.where(ids == expert, 0, -1),
                weights,
                dequantize_weights(stored.gate_up, stored.gate_up_scale),
                dequantize_weights(stored.down, stored.down_scale),
                gate_up_bias=stored.gate_up_bias,
                down_bias=stored.down_bias,
                gating=reference.clamped_swiglu if clamped else reference.swiglu,
                weigh_input=config.routing.weigh == "input",
            )
        total = sums.to(config.dtype).float().sum(dim=0)
        self._expected = total if self.shared is None else total + self.shared(x).float()
        return self._expected


class LayerTrial(Trial):
    """A layer with one set of inputs."""

    def __init__(self, inputs: LayerInputs, layer: MoE, variant: str) -> None:
        self.inputs, self.layer, self.group = inputs, layer, inputs.group
        self.variant, self.tokens, self.outputs = variant, inputs.tokens, [inputs.out]

    def calls(self) -> Calls:
        """Return the call from logits to output; the "torch" GEMM synchronizes, so no graph."""
        inputs = self.inputs
        call = functools.partial(self.layer, inputs.x, inputs.logits, out=inputs.out)
        return Calls({"call": call}, graph=self.layer.gemm != "torch")

    def compare(self) -> str | None:
        synchronize_ranks(self.group)
        self.layer.check()
        rank, out = f"rank {self.group.rank}", self.inputs.out
        if not bool(out.isfinite().all()):
            return f"{rank}: the output has values that are not finite"
        expected = self.inputs.expected(self.layer.exchange.placement.ranks)
        error = float((out[self.inputs.sample].float() - expected).abs().max())
        bound = self.inputs.bound(expected)
        if error <= bound:
            return None
        return f"{rank}: the error against the reference is {error:.4g}; {bound:.4g} is allowed"

    def facts(self) -> dict[str, Any]:
        """Return the routing's load, the selection of "auto", and the experts' GEMM."""
        load = load_of(self.inputs.case, self.tokens)
        auto = asdict(self.layer.explain())
        return asdict(load) | {
            "imbalance": load.imbalance,
            "gemm": self.layer.gemm,
            "auto": auto,
        }


def make_logits(case: LayerCase, tokens: int, rank: int) -> torch.Tensor:
    """Return a rank's router logits on the CPU, float32 `[tokens, num_experts]`.

    uniform: normal, so that all experts are equally likely.
    zipf: log of the popularity 1 / place^s plus Gumbel noise, so that the top k are a sample
    without replacement. The experts' places are drawn once.
    """
    routing, (kind, exponent) = case.config.routing, parse_routing(case.routing)
    generator = torch.Generator().manual_seed((case.seed * 131 + tokens) * 64 + rank)
    shape = (tokens, routing.num_experts)
    if kind == "uniform":
        return torch.randn(shape, generator=generator)
    places = places_of(routing.num_experts, case.seed)
    return -exponent * places.log() + sample_gumbel(shape, generator)


def make_correction(case: LayerCase) -> torch.Tensor | None:
    """Return small correction biases, float32 `[num_experts]` on the CPU, or None if unused."""
    routing = case.config.routing
    if not routing.correction:
        return None
    generator = torch.Generator().manual_seed(case.seed + 17)
    return torch.randn(routing.num_experts, generator=generator) * 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one size.

    Attributes:
        most: Rows of the expert with most rows.
        mean: Mean rows per expert.
        hit: Number of experts that have rows.
        hbm_bytes: Least bytes that the busiest rank moves through its memory: the weights of its
            experts that have rows and of the shared expert, each received row read and answered
            once, its own tokens read and written once.
        wire_bytes: Bytes that leave or enter the busiest rank, out and back, one row per token and
            rank.
    """

    most: int
    mean: float
    hit: int
    hbm_bytes: int
    wire_bytes: int

    @property
    def imbalance(self) -> float:
        """Rows of the expert with most rows over the mean."""
        return self.most / self.mean


def load_of(case: LayerCase, tokens: int) -> Load:
    """Route every rank's logits on the CPU and compute the load."""
    config, correction = case.config, make_correction(case)
    ids = [
        route_in_torch(config.routing, make_logits(case, tokens, rank), correction).ids
        for rank in range(case.ranks)
    ]
    return compute_load(case, ids)


def compute_load(case: LayerCase, ids: list[torch.Tensor]) -> Load:
    """Compute the load of ids; `ids[r]` are rank r's `[tokens, top_k]`."""
    config, ranks = case.config, case.ranks
    experts, hidden, itemsize = config.routing.num_experts, config.hidden, config.dtype.itemsize
    rows = torch.bincount(torch.cat(ids).flatten().long(), minlength=experts)
    owner = torch.tensor(Placement.blocks(experts, ranks).ranks)
    hit = torch.bincount(owner, weights=(rows > 0).double(), minlength=ranks).long()
    arrivals = token_rows(ids, experts).sum(dim=0)
    sent = row_bytes(hidden, itemsize, case.wire)
    answered = hidden * itemsize
    own = torch.tensor([len(each) for each in ids]) * 2 * answered
    memory = (
        hit * weight_bytes(config, case.dtype, config.intermediate, biased=config.biased)
        + arrivals * (sent + answered)
        + own
    )
    wire = max_rank_rows(token_rows(ids, experts))
    back = row_bytes(hidden, itemsize, case.combine_dtype)
    shared = "fp8" if case.fp8_rows else case.dtype
    return Load(
        most=int(rows.max()),
        mean=float(rows.double().mean()),
        hit=int((rows > 0).sum()),
        hbm_bytes=int(memory.max()) + weight_bytes(config, shared, config.shared),
        wire_bytes=wire * (sent + back),
    )


def make_expert(case: LayerCase, expert: int, device: torch.device) -> ExpertWeights:
    """Generate one expert, or the shared one for SHARED.

    Equal seeds give equal weights on devices of one kind, so any rank can generate any expert.
    """
    config, shared = case.config, expert == SHARED
    generator = torch.Generator(device).manual_seed(case.seed * 100_003 + expert + 1)
    inner = config.shared if shared else config.intermediate

    def normal(*shape: int, fan: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator, device=device) / math.sqrt(fan)

    weights = ExpertWeights(
        normal(2 * inner, config.hidden, fan=config.hidden),
        normal(config.hidden, inner, fan=inner),
    )
    if config.biased and not shared:
        biases = normal(2 * inner, fan=4), normal(config.hidden, fan=4)
        gate_up_bias, down_bias = (bias.to(config.dtype) for bias in biases)
        weights = replace(weights, gate_up_bias=gate_up_bias, down_bias=down_bias)
    if case.dtype == "bf16" or shared:
        return replace(
            weights, gate_up=weights.gate_up.to(config.dtype), down=weights.down.to(config.dtype)
        )
    return weights.to_fp8() if case.dtype == "fp8" else weights.to_mxfp4()


def dequantize_weights(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the values of stored weights, float32 `[experts, rows, columns]`."""
    if scale is None:
        return stored.float()
    if stored.dtype == MXFP4:
        return unpack_mxfp4(stored, scale)
    return reference.dequantize(stored, scale.repeat_interleave(FP8_BLOCK, 1))


def stack_experts(case: LayerCase, local: tuple[int, ...], device: torch.device) -> ExpertWeights:
    """Return a rank's experts for `weft.MoE`; they are generated one at a time."""
    parts: dict[str, torch.Tensor] = {}
    for place, expert in enumerate(local):
        weights = make_expert(case, expert, device)
        for name in (field.name for field in fields(weights)):
            if (part := getattr(weights, name)) is None:
                continue
            if name not in parts:
                parts[name] = part.new_empty((len(local), *part.shape[1:]))
            parts[name][place] = part[0]
    return ExpertWeights(**parts)


def shared_expert(case: LayerCase, device: torch.device) -> Expert | FP8Expert | None:
    """Return the shared expert or None, in FP8 if rows are, otherwise in the config's dtype."""
    if not case.config.shared:
        return None
    weights = make_expert(case, SHARED, device)
    plain = Expert(weights.gate_up[0], weights.down[0])
    return FP8Expert.from_expert(plain) if case.fp8_rows else plain


def weight_bytes(config: MoEConfig, dtype: str, inner: int, *, biased: bool = False) -> int:
    """Return the bytes of an expert with `inner` intermediate columns, with scales and biases."""
    numbers, rows = 3 * config.hidden * inner, 2 * inner + config.hidden
    biases = biased * rows * config.dtype.itemsize
    if dtype == "fp8":
        return numbers + 4 * numbers // FP8_BLOCK**2
    if dtype == "mxfp4":
        return numbers // 2 + numbers // 32 + 4 * rows + biases
    return numbers * config.dtype.itemsize + biases
