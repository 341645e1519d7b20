"""`weft bench layer`: whole MoE layers of models by name, from router logits to output."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weft import reference
from weft.alltoall.operator import AllToAll
from weft.bench.case import Case, Refused, choose
from weft.bench.check import settle
from weft.bench.clock import Calls, measure
from weft.bench.layer_load import check_perfect, load_of, make_correction, make_logits
from weft.bench.layer_weights import FP8_BLOCK, draw, shared_expert, stack
from weft.bench.limits import (
    HBM_READ_TB_PER_S,
    HBM_SHEET_TB_PER_S,
    LayerFloor,
    layer_floor_us,
    link_rate,
)
from weft.bench.moe import QUANTIZE
from weft.bench.routing import parse_routing
from weft.errors import CreationFailed, InvalidArgument
from weft.fields import checked
from weft.memory import Group
from weft.moe import (
    CLAMPED_SWIGLU,
    MODELS,
    MODES,
    OVERLAPS,
    MoE,
    MoEConfig,
)
from weft.moe.router import route_in_torch
from weft.placement import Placement
from weft.shape import Shape

if TYPE_CHECKING:
    from weft.bench.run import Measurement, Report

LAYER_MODELS = ("deepseek-v3", "qwen3-30b-a3b", "glm-4.5-air", "gpt-oss-120b")
ROUTINGS = ("uniform", "perfect", "zipf")
WEIGHT_DTYPES = ("bf16", "fp8")
# The same rules with few numbers, for a rehearsal on CPU ranks.
SMALL_HIDDEN, SMALL_INTERMEDIATE, SMALL_EXPERTS = 256, 128, 32
SAMPLE = 16  # tokens of a rank that are compared
# How far from the reference a result may be, in half units of the largest one (docs/moe.md).
HALF_UNITS, HALF_UNITS_FP8_BACK = 5, 16
# FP8 experts round the rows between their grouped GEMMs to 4 bits: by up to 1/16 of each number.
FP8_PART = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase(Case):
    """Whole MoE layers, by overlap.

    model: one of LAYER_MODELS.   experts: of the layer, or None for the model's own number.
    dtype: of the experts' weights, "bf16" or "fp8".   mode: as in MoE.
    overlaps: words of `weft.MoE`; none: all that it offers, less those that this layer refuses.
    routing: "uniform", "perfect", "zipf" or "zipf:EXPONENT".
    shared: with the model's shared expert.   stages: also time the layer's parts, each alone.
    gemm, max_rows, quantize, combine_dtype: as in MoE; None leaves the choice to it.
    """

    operator: ClassVar[str] = "layer"
    checked: ClassVar[str] = (
        "16 tokens of a rank against weft.reference.moe_layer in float32 (bounds: docs/moe.md)"
    )

    model: str = "deepseek-v3"
    overlaps: tuple[str, ...] = ()
    mode: str = "throughput"
    routing: str = "uniform"
    dtype: str = "bf16"
    experts: int | None = None
    shared: bool = True
    stages: bool = False
    gemm: str = "auto"
    max_rows: int | None = None
    quantize: str | None = None
    combine_dtype: str | None = None

    def __post_init__(self) -> None:
        Case.__post_init__(self)
        choose(
            model=(self.model, LAYER_MODELS),
            dtype=(self.dtype, WEIGHT_DTYPES),
            mode=(self.mode, MODES),
            routing=(parse_routing(self.routing)[0], ROUTINGS),
            quantize=(self.quantize, (None, *QUANTIZE)),
        )
        for word in self.overlaps:
            choose(overlap=(word, OVERLAPS))
        checked(Shape, ranks=self.ranks, tokens=max(self.tokens))
        if self.stages and self.mode != "throughput":
            raise InvalidArgument(
                f"stages are those of mode 'throughput'; this one is {self.mode!r}: time it whole"
            )
        if self.experts is not None and self.experts < self.ranks:
            raise InvalidArgument(f"{self.experts} experts on {self.ranks} ranks; give each one")
        config = self.config  # refuses what no layer can be
        Placement.blocks(config.routing.num_experts, self.ranks)
        if self.routing == "perfect":
            check_perfect(config.routing)
        if self.dtype == "fp8":
            check_fp8(config)

    @property
    def config(self) -> MoEConfig:
        """The layer; on CPU ranks the same rules with few numbers."""
        whole = MODELS[self.model]
        experts, shared = self.experts or whole.routing.num_experts, whole.shared
        if self.device == "cpu":
            shared = min(shared, SMALL_INTERMEDIATE)
            experts = self.experts or SMALL_EXPERTS
            whole = replace(whole, hidden=SMALL_HIDDEN, intermediate=SMALL_INTERMEDIATE)
        routing = replace(whole.routing, num_experts=experts)
        return replace(whole, routing=routing, shared=shared if self.shared else 0)

    @property
    def variants(self) -> tuple[str, ...]:
        """The modes to measure: those asked for, or all that there are."""
        return self.overlaps or OVERLAPS

    @property
    def wire(self) -> str | None:
        """What dispatch makes of the rows: FP8 experts take FP8 rows."""
        return self.quantize or ("fp8" if self.dtype == "fp8" else None)

    @property
    def fp8_back(self) -> bool:
        """Does combine return rows as FP8?"""
        return self.combine_dtype == "fp8"

    def moe_options(self, overlap: str, tokens: int) -> dict[str, Any]:
        """What `weft.MoE` is built with, besides its weights."""
        options: dict[str, Any] = {
            "max_tokens": tokens,
            "mode": self.mode,
            "overlap": overlap,
            "gemm": self.gemm,
            "max_rows": self.max_rows,
            "quantize": self.quantize,
            "num_sms": self.num_sms,
            "programmatic_launch": self.programmatic_launch,
            "timeout": 30.0,  # ranks that share cores may be late without being dead
        }
        if self.combine_dtype is not None:
            options["combine_dtype"] = self.combine_dtype
        if self.dtype == "fp8":
            options["fp8"] = True  # which makes FP8 of the tokens, too
        return options

    def title(self) -> str:
        """The sizes and options in words."""
        config = self.config
        shared = "with its shared expert" if config.shared else "no shared expert"
        return (
            f"{self.model}: {self.ranks} ranks, hidden {config.hidden}, intermediate "
            f"{config.intermediate}, top {config.routing.top_k} of {config.routing.num_experts}, "
            f"{self.dtype} experts, {shared}, routing {self.routing}, mode {self.mode}, "
            f"{self.wire or 'bf16'} out, {self.combine_dtype or self.dtype} back"
        )

    def session(self, group: Group) -> LayerSession:
        """This rank's experts."""
        return LayerSession(group, self)

    def bytes_of(self, found: Measurement, phase: str) -> tuple[float, float]:
        """NVLink bytes of the whole; parts have none of their own."""
        return 0.0, found.facts["wire_bytes"] if phase == "call" else 0.0

    def floors(self, found: Measurement, gpus: list[str]) -> LayerFloor | None:
        """Of memory and of links."""
        return layer_floor_us(found.facts["hbm_bytes"], found.facts["wire_bytes"], gpus)

    def floor_us(self, found: Measurement, gpus: list[str]) -> float | None:
        """What was measured allows no layer to be faster."""
        floors = self.floors(found, gpus)
        return None if floors is None else floors.least

    def floor_text(self) -> str:
        """What the floor is made of, in words."""
        return (
            "the larger of HBM (weights of experts that have rows, and each row that arrives in "
            f"and out once, on the busiest rank, at {HBM_READ_TB_PER_S:g} TB/s; sheet: "
            f"{HBM_SHEET_TB_PER_S:g}) and NVLink (wire bytes / {link_rate(self.ranks):g} GB/s)"
        )

    def columns(self, found: Measurement, report: Report) -> dict[str, float | str]:
        """x none: us without overlap over these.  The parts of the floor, in us."""
        from weft.bench.report import Spread, us_text

        more: dict[str, float | str] = {"max / mean rows": found.facts["imbalance"]}
        for other in report.measurements:
            if (other.variant, other.tokens) == ("none", found.tokens):
                base, own = (Spread.of(each.samples_us["call"]) for each in (other, found))
                more["x none"] = f"{base.median / own.median:.3f}"
        if floors := self.floors(found, report.machine["gpus"]):
            more |= {
                "HBM measured": us_text(floors.memory),
                "HBM sheet": us_text(floors.memory_sheet),
                "NVLink": us_text(floors.links),
            }
        if found.facts["auto"]["auto"] == found.variant:
            more["auto"] = "auto"
        return more

    def notes(self, report: Report) -> list[str]:
        """What "auto" takes at each size and why."""
        from weft.bench.report import us_text

        auto = {each.tokens: each.facts["auto"] for each in report.measurements}
        gemms = dict.fromkeys(each.facts["gemm"] for each in report.measurements)
        lines = [f"Experts multiply by {', '.join(gemms)}."]
        lines += [f"auto, {tokens} tokens: {choice['reason']}" for tokens, choice in auto.items()]
        for each in report.measurements:
            if stages := each.facts.get("stages_us"):
                parts = ", ".join(f"{name} {us_text(us)}" for name, us in stages.items())
                lines.append(f"Parts at {each.tokens} tokens, each alone, us: {parts}.")
        if self.device == "cpu":
            lines.append("CPU ranks: the model's rules with few numbers, a rehearsal.")
        if self.records():
            lines.append(
                "Published figures: FP8 experts, 8 ranks, uniform routing, neither router nor "
                "shared expert, as far as they say."
            )
        return lines

    def records(self) -> tuple[str, str, dict[str, Any]] | None:
        """Figures that others published, of as many experts on each rank.

        They are of 8 ranks and FP8 experts, and count neither a router nor a shared expert, as far
        as they say. On fewer ranks with as many experts each, an expert gets as many rows.
        """
        config = self.config
        return (
            "layers",
            "us",
            {
                "hidden": config.hidden,
                "intermediate": config.intermediate,
                "top_k": config.routing.top_k,
                "local_experts": config.routing.num_experts / self.ranks,
            },
        )


def check_fp8(config: MoEConfig) -> None:
    """Raises InvalidArgument where weights of this config cannot be FP8."""
    sizes = (config.hidden, config.intermediate)
    if any(size % FP8_BLOCK for size in sizes) or config.biased:
        raise InvalidArgument(
            f"dtype fp8 needs sizes of whole blocks of {FP8_BLOCK} and no biases; this model has "
            f"hidden {sizes[0]}, intermediate {sizes[1]}, biased={config.biased}: use bf16"
        )


class LayerSession:
    """This rank's experts, and the inputs of the last size."""

    def __init__(self, group: Group, case: LayerCase) -> None:
        self.group, self.case = group, case
        placement = Placement.blocks(case.config.routing.num_experts, group.size)
        self.weights = stack(case, placement.experts_of(group.rank), group.device)
        self.shared = shared_expert(case, group.device)
        self._inputs: LayerInputs | None = None

    def close(self) -> None:
        """Weights go with the session."""

    def facts(self) -> dict[str, Any]:
        """Nothing of the whole run."""
        return {}

    @contextlib.contextmanager
    def trial(self, variant: str, tokens: int, *, profile: bool = False) -> Iterator[LayerTrial]:
        """The layer of one mode, with room for exactly these tokens.

        Raises Refused for a mode that it does not offer here, unless it was asked for by name.
        """
        if self._inputs is None or self._inputs.tokens != tokens:
            self._inputs = LayerInputs(self.group, self.case, self.shared, tokens)
        try:
            layer = MoE(
                self.group,
                self.case.config,
                self.weights,
                shared=self.shared,
                correction=self._inputs.correction,
                profile=profile,
                **self.case.moe_options(variant, tokens),
            )
        except (CreationFailed, InvalidArgument) as error:
            if self.case.overlaps:
                raise  # it was asked for by name
            raise Refused(f"{type(error).__name__}: {error}") from error
        with layer:
            yield LayerTrial(self._inputs, layer)
            self.group.barrier()  # a peer may still be reading what is about to go


class LayerInputs:
    """One rank's tokens and logits of one size, and what any layer must make of them."""

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
        self._wanted: torch.Tensor | None = None

    def bound(self, wanted: torch.Tensor) -> float:
        """The largest difference that roundings on the way explain."""
        largest = max(1.0, float(wanted.abs().max()))
        half_units = HALF_UNITS_FP8_BACK if self.case.fp8_back else HALF_UNITS
        rounding = half_units * torch.finfo(self.case.config.dtype).eps / 2 * largest
        part = FP8_PART * float(wanted.abs().max()) if self.case.dtype == "fp8" else 0.0
        return rounding + part

    def wanted(self, owners: tuple[int, ...]) -> torch.Tensor:
        """float32 `[sample, hidden]`: weft.reference.moe_layer, expert by expert.

        Each expert is drawn again, whoever holds it, and multiplies in float32 with the numbers
        that its stored weights stand for.
        """
        if self._wanted is not None:
            return self._wanted
        config, device = self.case.config, self.group.device
        x = self.x[self.sample]
        ids, weights = route_in_torch(config.routing, self.logits[self.sample], self.correction)
        sent, clamped = self._sent(x), config.gating is CLAMPED_SWIGLU
        sums = torch.zeros((self.group.size, *x.shape), device=device)
        for expert in sorted(set(ids.flatten().tolist())):
            drawn = draw(self.case, expert, device)
            up_bias, down_bias = drawn.gate_up_bias, drawn.down_bias
            sums[owners[expert]] += reference.moe_layer(
                sent,
                torch.where(ids == expert, 0, -1),
                weights,
                drawn.gate_up.wide()[None],
                drawn.down.wide()[None],
                gate_up_bias=None if up_bias is None else up_bias[None],
                down_bias=None if down_bias is None else down_bias[None],
                gating=reference.clamped_swiglu if clamped else reference.swiglu,
                weigh_input=config.routing.weigh == "input",
            )
        total = sums.to(config.dtype).float().sum(dim=0)
        self._wanted = total if self.shared is None else total + self.shared(x).float()
        return self._wanted

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        """x as the wire brings it."""
        if self.case.wire is None:
            return x
        wide = reference.dequantize(*reference.quantize(x, self.case.wire))
        return wide.to(x.dtype)


class LayerTrial:
    """A layer with its inputs."""

    def __init__(self, inputs: LayerInputs, layer: MoE) -> None:
        self.inputs, self.layer, self.group = inputs, layer, inputs.group
        self.graph = layer.gemm != "torch"  # which waits for the host

    def call(self) -> None:
        """What is timed: from logits to output."""
        self.layer(self.inputs.x, self.inputs.logits, out=self.inputs.out)

    def calls(self) -> Calls:
        """The call."""
        return Calls.of(self.call, graph=self.graph)

    def poison(self) -> None:
        """So that a call which writes nothing is noticed."""
        self.inputs.out.fill_(float("nan"))

    def check(self) -> str | None:
        """Run the layer into poisoned memory; what is wrong, or None."""
        self.poison()
        self.call()
        return self.compare()

    def compare(self) -> str | None:
        """What is wrong with what lies in `out`, or None."""
        settle(self.group)
        self.layer.check()
        rank, out = f"rank {self.group.rank}", self.inputs.out
        if not bool(out.isfinite().all()):
            return f"{rank}: the output has numbers that are not finite"
        wanted = self.inputs.wanted(self.layer.exchange.placement.ranks)
        error = float((out[self.inputs.sample].float() - wanted).abs().max())
        bound = self.inputs.bound(wanted)
        if error <= bound:
            return None
        return f"{rank}: off the reference by {error:.4g}; {bound:.4g} is allowed"

    def facts(self) -> dict[str, Any]:
        """The load of the routing, what "auto" takes, how the experts multiply; and the parts."""
        case = self.inputs.case
        load = load_of(case, self.inputs.tokens)
        found = asdict(load) | {"imbalance": load.imbalance, "gemm": self.layer.gemm}
        found["auto"] = asdict(self.layer.explain())
        if case.stages and self.layer.overlap == "none":
            stages = measure_stages(self)
            ranks = self.group.all_gather(stages)
            found["stages_us"] = {name: max(each[name] for each in ranks) for name in stages}
        return found


def measure_stages(trial: LayerTrial) -> dict[str, float]:
    """Median us of the layer's parts on this rank, each alone on one round's rows. Collective.

    Alone, a part finds its predecessor's rows in the caches as they are left by itself, and no
    launch of a neighbour hides its own: the parts add up to more than the layer. pair: dispatch and
    combine back to back; their split has events between, which cost some us. experts: all between.
    """
    case, layer, inputs = trial.inputs.case, trial.layer, trial.inputs
    exchange = layer.exchange
    assert isinstance(exchange, AllToAll)  # LayerCase has refused the other
    ids, weights = layer.route(inputs.logits)

    def median(calls: Calls) -> dict[str, float]:
        found = measure(trial.group, calls, samples=case.samples, graph=case.graph)
        return {name: statistics.median(us) for name, us in found.us.items()}

    def dispatch() -> Any:
        return exchange.dispatch(inputs.x, ids, weights)

    parts = {"route": median(Calls.of(lambda: layer.route(inputs.logits)))["call"]}
    if inputs.shared is not None:
        parts["shared"] = median(Calls.of(lambda: inputs.shared(inputs.x)))["call"]
    combine = {"combine": lambda: exchange.combine(out=inputs.out)}
    parts |= median(Calls({"dispatch": dispatch, **combine}, "pair"))
    received = dispatch()
    experts = Calls.of(lambda: layer.experts(received), graph=trial.graph)
    parts["experts"] = median(experts)["call"]
    exchange.combine(out=inputs.out)
    layer.check()
    return parts
