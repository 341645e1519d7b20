"""What `weft bench layer` measures: whole MoE layers of models by name, and how tokens choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.moe import EXCHANGES, MODELS, OVERLAPS, LayerTable, MoEConfig, Routing

LAYER_MODELS = ("deepseek-v3", "qwen3-30b-a3b", "glm-4.5-air", "gpt-oss-120b")
WEIGHT_DTYPES = ("bf16", "fp8")
FP8_BLOCK = 128  # rows and columns of a weight that share a scale
# The same rules with few numbers, for a rehearsal on CPU ranks.
SMALL_HIDDEN, SMALL_INTERMEDIATE, SMALL_EXPERTS = 256, 128, 32
SPREAD = 4.0  # logits of experts that `perfect` wants or not: this far above and below 0


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Everything a rank needs to know. Equal on all ranks.

    model: one of LAYER_MODELS.   experts: of the layer, or None for the model's own number.
    dtype: of the experts' weights, "bf16" or "fp8".   tokens: sizes to measure, tokens per rank.
    exchange: "rank" or "expert", as in MoE.
    overlaps: words of `weft.MoE`; none: all that it offers, less those that this layer refuses.
    routing: "uniform", "perfect", "zipf" or "zipf:EXPONENT".
    shared: with the model's shared expert.   stages: also time the layer's parts.
    gemm, max_rows, quantize, combine_by: as in MoE; None leaves the choice to it.
    table: path of the table that "auto" would choose by; None: the one that came with weft.
    samples: timed samples per size.   traced: a trace of one call will be asked for.
    """

    ranks: int
    device: str
    model: str
    tokens: tuple[int, ...]
    overlaps: tuple[str, ...]
    exchange: str = "rank"
    routing: str = "uniform"
    dtype: str = "bf16"
    experts: int | None = None
    shared: bool = True
    stages: bool = False
    gemm: str = "auto"
    max_rows: int | None = None
    quantize: str | None = None
    combine_by: str | None = None
    table: str | None = None
    graph: bool = True
    samples: int = 15
    seed: int = 0
    traced: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("model", self.model, LAYER_MODELS),
            ("dtype", self.dtype, WEIGHT_DTYPES),
            ("exchange", self.exchange, EXCHANGES),
        ):
            if value not in allowed:
                raise InvalidArgument(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        if not self.tokens or min(self.tokens) < 1:
            raise InvalidArgument(f"tokens are {self.tokens}; there is nothing to measure")
        for word in self.overlaps:
            if word not in OVERLAPS:
                raise InvalidArgument(
                    f"overlap is {word!r}; this weft.MoE offers {', '.join(OVERLAPS)}"
                )
        if self.stages and self.exchange != "rank":
            raise InvalidArgument(
                f"stages are those of exchange 'rank'; this one is {self.exchange!r}: time it whole"
            )
        if self.traced and self.exchange != "rank":
            raise InvalidArgument(
                f"a trace shows layers of exchange 'rank'; this one is {self.exchange!r}: its "
                "kernels are those of weft bench lowlatency --trace"
            )
        if self.experts is not None and self.experts < self.ranks:
            raise InvalidArgument(f"{self.experts} experts on {self.ranks} ranks; give each one")
        config = self.config  # refuses what no layer can be
        kind, _ = self.kind
        if kind == "perfect":
            check_perfect(config.routing)
        if self.dtype == "fp8":
            check_fp8(config)
        if self.table is not None:
            LayerTable.load(self.table)  # refuses what is none

    @property
    def kind(self) -> tuple[str, float]:
        """How tokens choose, and the exponent of zipf.

        Raises InvalidArgument for another word, or an exponent that is not a number above 0.
        """
        word, _, number = self.routing.partition(":")
        try:
            exponent = float(number or 1.0)
        except ValueError:
            exponent = 0.0
        known = word == "zipf" or (word in ("uniform", "perfect") and not number)
        if not known or not 0 < exponent < 100:
            raise InvalidArgument(
                f"routing is {self.routing!r}; choose uniform, perfect, zipf or zipf:EXPONENT"
            )
        return word, exponent

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
    def overlap_words(self) -> tuple[str, ...]:
        """The modes to measure: those asked for, or all that there are."""
        return self.overlaps or OVERLAPS

    @property
    def wire(self) -> str | None:
        """What dispatch makes of the rows: FP8 experts take FP8 rows."""
        return self.quantize or ("fp8" if self.dtype == "fp8" else None)

    def moe_options(self, overlap: str, tokens: int) -> dict[str, Any]:
        """What `weft.MoE` is built with, beside its weights."""
        options: dict[str, Any] = {
            "max_tokens": tokens,
            "exchange": self.exchange,
            "overlap": overlap,
            "gemm": self.gemm,
            "max_rows": self.max_rows,
            "quantize": self.quantize,
            "table": self.table,
            "timeout": 30.0,  # ranks that share cores may be late without being dead
        }
        if self.combine_by is not None:
            options["combine_by"] = self.combine_by
        if self.dtype == "fp8":
            options["fp8"] = True  # which makes FP8 of the tokens, too
        return options


def check_fp8(config: MoEConfig) -> None:
    """Raises InvalidArgument where weights of this config cannot be FP8."""
    sizes = (config.hidden, config.intermediate)
    if any(size % FP8_BLOCK for size in sizes) or config.biased:
        raise InvalidArgument(
            f"dtype fp8 needs sizes of whole blocks of {FP8_BLOCK} and no biases; this model has "
            f"hidden {sizes[0]}, intermediate {sizes[1]}, biased={config.biased}: use bf16"
        )


def check_perfect(routing: Routing) -> None:
    """Raises InvalidArgument where no even choice can be laid out."""
    parts = routing.top_groups if routing.groups > 1 else 1
    size = routing.num_experts // (routing.groups if routing.groups > 1 else 1)
    if routing.top_k % parts or size % (routing.top_k // parts):
        raise InvalidArgument(
            f"routing perfect: top {routing.top_k} of {routing.num_experts} experts cannot be "
            f"dealt evenly to {parts} group(s) of {size}; use uniform"
        )


def make_logits(settings: LayerSettings, tokens: int, rank: int) -> torch.Tensor:
    """float32 `[tokens, num_experts]` on the CPU: what a rank's router sees.

    uniform: normal, so that every expert is as likely.   zipf: log of the popularity 1 / place^s
    plus Gumbel noise, so that the top k are drawn by it without replacement; places are drawn once.
    perfect: those of `even_choice` lie SPREAD above 0, the others below.
    """
    routing, (kind, exponent) = settings.config.routing, settings.kind
    generator = torch.Generator().manual_seed((settings.seed * 131 + tokens) * 64 + rank)
    shape = (tokens, routing.num_experts)
    if kind == "zipf":
        seeded = torch.Generator().manual_seed(settings.seed)
        places = torch.randperm(routing.num_experts, generator=seeded) + 1
        noise = torch.rand(shape, generator=generator).clamp_(1e-20, 1 - 1e-7)
        return -exponent * places.log() - (-noise.log()).log()
    normal = torch.randn(shape, generator=generator)
    if kind == "uniform":
        return normal
    chosen = even_choice(routing, torch.arange(tokens) + rank * tokens)
    return (normal * 0.1 - SPREAD).scatter_add_(1, chosen, torch.full(chosen.shape, 2 * SPREAD))


def even_choice(routing: Routing, token: torch.Tensor) -> torch.Tensor:
    """int64 `[tokens, top_k]`: experts that load all experts alike, spread over all ranks.

    Token t takes groups t, t + 1, ... (modulo their number) and in each the experts o, o + step and
    so on, with o advancing once all groups had their turn. Without groups all are one group.
    """
    groups = routing.groups if routing.groups > 1 else 1
    parts = routing.top_groups if groups > 1 else 1
    size, each = routing.num_experts // groups, routing.top_k // parts
    step = size // each
    group = (token[:, None] + torch.arange(parts)) % groups
    inside = (token // groups % step)[:, None] + torch.arange(each) * step
    return (group[:, :, None] * size + inside[:, None, :]).flatten(1)


def make_correction(settings: LayerSettings) -> torch.Tensor | None:
    """float32 `[num_experts]` on the CPU, where the routing has one: small, equal on all ranks."""
    routing = settings.config.routing
    if not routing.correction:
        return None
    generator = torch.Generator().manual_seed(settings.seed + 17)
    return torch.randn(routing.num_experts, generator=generator) * 0.01
