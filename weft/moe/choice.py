"""Which overlap "auto" takes: from the nearest measured table, alike on all ranks.

Every overlap gives the same bits, so this decides about time and memory alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from weft.errors import GeometryMismatch, InvalidArgument
from weft.memory import Group
from weft.moe.models import MoEConfig
from weft.moe.options import AUTO, Chosen, Options
from weft.moe.table import LayerCurve, LayerSizes, LayerTable
from weft.tuning.table_vote import agreed_table, common_gpu
from weft.tuning.thresholds import HYSTERESIS, Bands, bands_of

_log = logging.getLogger(__name__)
MEASURED, NEAREST, RULE, ONLY = "measured", "nearest", "rule", "only one"
FAVOURITE = "push"  # begins where no other is faster by more than the hysteresis
MOST_PUSHED = {"rank": 1024, "expert": 512}  # tokens up to which the rule of thumb takes "push"


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What runs beside what in a layer, and why.

    overlap: what the layer does.   auto: what "auto" takes; the same, unless another was asked for.
    source: how "auto" chooses: "measured", "nearest" (from times of another layer that is near),
        "rule" (nothing near was measured) or "only one" (there is nothing to choose).
    us: exchange -> overlap -> us by the table for max_tokens; empty where there is none.
    reason: why "auto" takes it.   origin: of the times, "" where there are none.
    """

    overlap: str
    auto: str
    source: str
    us: Mapping[str, Mapping[str, float]]
    reason: str
    origin: str

    @property
    def text(self) -> str:
        """All of it in words."""
        asked = f"{self.overlap}, as asked. auto: " if self.overlap != self.auto else ""
        return f"{asked}{self.reason} {self.origin}".strip()


@dataclass(frozen=True, slots=True)
class Question:
    """What a choice depends on, besides a table.

    exchange, gemm: of the layer, what "auto" came to.   max_tokens: of a rank.
    able: overlaps that can serve the layer, one at least; ties go to the first.
    unusual: options that tables do not know, in words; "" for none.
    """

    sizes: LayerSizes
    exchange: str
    gemm: str
    max_tokens: int
    able: tuple[str, ...]
    unusual: str = ""


def choose(table: LayerTable | None, question: Question) -> LayerChoice:
    """What "auto" takes. Depends on these arguments alone.

    A table that is not near must not be passed: see `LayerSizes.apart`.
    """
    us, origin = _told(table, question), table.origin if table else ""
    able, tokens = question.able, question.max_tokens
    if len(able) == 1:
        reason = f"{able[0]}: no other overlap serves this layer."
        return LayerChoice(able[0], able[0], ONLY, us, reason, origin)
    curve = table.curve(question.exchange, question.gemm) if table else None
    word = overlap_bands(curve, able).at(tokens) if curve else ""
    if table is None or curve is None or curve.at(word, tokens) is None:
        word = rule_of_thumb(question)
        reason = f"{word} by a rule of thumb: {_lack(table, curve, question)}."
        return LayerChoice(word, word, RULE, us, reason, origin)
    same = question.sizes == table.sizes and not question.unusual
    exact = same and tokens >= curve.tokens[0]
    reason = _reason(table, curve, question, word, us)
    return LayerChoice(word, word, MEASURED if exact else NEAREST, us, reason, origin)


def overlap_bands(curve: LayerCurve, able: tuple[str, ...]) -> Bands:
    """Which of the overlaps that can serve takes which sizes of a curve."""
    return bands_of(curve.tokens, curve.us, able, favourite=FAVOURITE)


def rule_of_thumb(question: Question) -> str:
    """What "auto" takes where nothing near was measured.

    "push" took least at 8 to 1024 tokens a rank of DeepSeek-V3 in FP8 on 4 H200s, or within 0.5 %
    of it, and by expert at 1 to 512 (docs/measuring.md). Beyond that nothing was measured, and
    places for every choice of a token take much memory.
    """
    able = question.able
    if "push" in able and question.max_tokens <= MOST_PUSHED[question.exchange]:
        return "push"
    return "shared" if "shared" in able else able[0]


def agreed_choice(
    group: Group, config: MoEConfig, options: Options, offers: Mapping[str, Chosen]
) -> LayerChoice:
    """What this layer does; the same on all ranks, by rank 0's table and options. Collective.

    options: their overlap is "auto" or one, equal on all ranks.   offers: by the overlaps that this
    rank can serve, one at least; "auto" takes one that all ranks can.

    Raises CreationFailed for a table that cannot be read, InvalidArgument for one of another layer,
    GeometryMismatch where ranks pass unlike tables or have no overlap in common: on all ranks.
    """
    sizes = LayerSizes.of(config, gpu=common_gpu(group), ranks=group.size, fp8=options.fp8)
    exchange, gemm = options.exchange, next(iter(offers.values())).gemm

    def shipped() -> LayerTable | None:
        return LayerTable.shipped(sizes, exchange, gemm)

    table = agreed_table(group, options.table, LayerTable, shipped=shipped, what="the layer table")
    mine = Question(sizes, exchange, gemm, options.max_tokens, tuple(offers), _unusual(options))
    told = group.all_gather(asdict(mine))
    lists = [each["able"] for each in told]
    common = tuple(word for word in lists[0] if all(word in words for words in lists))
    if not common:
        each = "; ".join(f"rank {rank}: {', '.join(words)}" for rank, words in enumerate(lists))
        raise GeometryMismatch(
            f"no overlap serves all ranks ({each}): pass the same combine_by and gemm on each"
        )
    sizes = LayerSizes(**told[0]["sizes"])
    question = Question(**(told[0] | {"sizes": sizes, "able": common}))
    if len({each["gemm"] for each in told}) > 1:
        unusual = ", ".join(filter(None, (question.unusual, "a gemm of its own on each rank")))
        question = replace(question, unusual=unusual)
    if table is not None and (words := question.sizes.apart(table.sizes)):
        raise InvalidArgument(
            f"the layer table is of another layer ({table.sizes.text}; this is "
            f"{question.sizes.text}): {'; '.join(words)}: measure this one with `weft tune layer`, "
            "or leave table out"
        )
    found = choose(table, question)
    if options.overlap != AUTO:
        found = replace(found, overlap=options.overlap)
    if group.rank == 0:
        _log.info("MoE layer, exchange %r, %s products: %s", exchange, gemm, found.text)
    return found


def _unusual(options: Options) -> str:
    """Options that change times and that tables do not know, in words."""
    names = ["combine_by", "num_sms"]
    if not options.fp8:  # else there is one only
        names.append("quantize")
    given = {name: getattr(options, name) for name in names}
    return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)


def _told(table: LayerTable | None, question: Question) -> dict[str, dict[str, float]]:
    """exchange -> overlap -> us: of this exchange and gemm first, of others as they come."""
    if table is None:
        return {}
    mine = table.curve(question.exchange, question.gemm)
    found = {} if mine is None else {mine.exchange: mine}
    for curve in table.curves:
        if curve.exchange != question.exchange:
            found.setdefault(curve.exchange, curve)
    return {name: curve.times_at(question.max_tokens) for name, curve in found.items()}


def _lack(table: LayerTable | None, curve: LayerCurve | None, question: Question) -> str:
    """Why no time answers, in words."""
    way = f"exchange {question.exchange!r} with {question.gemm} products"
    if table is None:
        return (
            f"no table is near {question.sizes.text}, {way}; measure one with `weft tune layer` "
            "and pass it as table="
        )
    if curve is None:
        return f"the table has no times of {way}"
    if question.max_tokens > curve.tokens[-1]:
        return (
            f"the table ends at {curve.tokens[-1]} tokens a rank, this layer has room for "
            f"{question.max_tokens}"
        )
    return f"the table has no times of {', '.join(question.able)} for {question.max_tokens} tokens"


def _reason(
    table: LayerTable,
    curve: LayerCurve,
    question: Question,
    word: str,
    us: Mapping[str, Mapping[str, float]],
) -> str:
    """The time of what was chosen, those of the others, and what was read in their stead."""
    tokens, mine = question.max_tokens, us[question.exchange]
    others = {name: time for name, time in mine.items() if name != word}
    ranked = sorted(others, key=lambda name: others[name])
    listed = "".join(f", {name} {others[name]:.1f}" for name in ranked)
    text = f"{word} for up to {tokens} tokens a rank: {mine[word]:.1f} us{listed}"
    if any(others[name] < mine[word] for name in ranked if name in question.able):
        text += f"; a change needs {HYSTERESIS:.0%} at two sizes"
    for exchange, times in us.items():
        if exchange != question.exchange and times:
            each = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
            text += f"; exchange {exchange!r}: {each}"
    if tokens < curve.tokens[0]:
        text += f". Times are those of {curve.tokens[0]} tokens"
    if question.sizes != table.sizes:
        text += f". Read from {table.sizes.text}; this is {question.sizes.text}"
    if question.unusual:
        text += f". Times are those of the defaults, not of {question.unusual}"
    return f"{text}."
