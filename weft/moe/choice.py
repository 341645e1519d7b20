"""Which mode and overlap "auto" takes: from the nearest measured table, alike on all ranks.

Every overlap of a mode gives the same bits, so an overlap decides about time and memory alone. The
modes round sums in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from weft.errors import GeometryMismatch, InvalidArgument
from weft.memory import Group
from weft.memory.wire import JSON
from weft.moe.models import MoEConfig
from weft.moe.plan import AUTO, LayerPlan, Options
from weft.moe.table import LayerCurve, LayerSizes, LayerTable
from weft.tuning.table_vote import agreed_table, common_gpu
from weft.tuning.thresholds import HYSTERESIS, Bands, bands_of

_log = logging.getLogger(__name__)
MEASURED, NEAREST, RULE, ONLY = "measured", "nearest", "rule", "only one"
FAVOURITE = "gemm_push"  # begins where no other is faster by more than the hysteresis
MOST_PUSHED = {
    "throughput": 1024,
    "low_latency": 512,
}  # tokens, for the rule of thumb


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What runs beside what in a layer, and why.

    mode, overlap: what the layer does.   auto: the overlap that "auto" takes in this mode; the
        same, unless another was asked for.
    source: how "auto" chooses: "measured", "nearest" (from times of another layer that is near),
        "rule" (nothing near was measured) or "only one" (there is nothing to choose).
    us: mode -> overlap -> us by the table for max_tokens; empty where there is none.
    reason: why "auto" takes it.   origin: of the times, "" where there are none.
    """

    mode: str
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

    mode, gemm: of the layer, what "auto" came to.   max_tokens: of a rank.
    able: overlaps that can serve the layer, one at least; ties go to the first.
    unusual: options that tables do not know, in words; "" for none.
    """

    sizes: LayerSizes
    mode: str
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
        return LayerChoice(question.mode, able[0], able[0], ONLY, us, reason, origin)
    curve = table.curve(question.mode, question.gemm) if table else None
    word = overlap_bands(curve, able).at(tokens) if curve else ""
    if table is None or curve is None or curve.at(word, tokens) is None:
        word = rule_of_thumb(question)
        reason = f"{word} by a rule of thumb: {_lack(table, curve, question)}."
        return LayerChoice(question.mode, word, word, RULE, us, reason, origin)
    same = question.sizes == table.sizes and not question.unusual
    exact = same and tokens >= curve.tokens[0]
    reason = _reason(table, curve, question, word, us)
    return LayerChoice(
        question.mode, word, word, MEASURED if exact else NEAREST, us, reason, origin
    )


def overlap_bands(curve: LayerCurve, able: tuple[str, ...]) -> Bands:
    """Which of the overlaps that can serve takes which sizes of a curve."""
    return bands_of(curve.tokens, curve.us, able, favourite=FAVOURITE)


def rule_of_thumb(question: Question) -> str:
    """What "auto" takes where nothing near was measured.

    "gemm_push" took least at 8 to 1024 tokens a rank of DeepSeek-V3 in FP8 on 4 H200s, or within
    0.5 % of it, and in low-latency mode at 1 to 512 (docs/measuring.md). Beyond that nothing was
    measured, and a slot for every expert of a token takes much memory.
    """
    able = question.able
    if "gemm_push" in able and question.max_tokens <= MOST_PUSHED[question.mode]:
        return "gemm_push"
    return "shared_expert" if "shared_expert" in able else able[0]


def choose_mode(table: LayerTable | None, questions: Sequence[Question]) -> LayerChoice:
    """What mode="auto" takes: low latency where it was measured faster, else throughput.

    Low latency needs memory for every token at every expert, so it has to be faster by the
    hysteresis, and what was not measured is not taken. questions: one for each mode that serves.
    """
    found = {each.mode: choose(table, each) for each in questions}
    first = next(iter(found.values()))
    if len(found) == 1:
        return first
    throughput, low = found["throughput"], found["low_latency"]
    theirs = throughput.us.get("throughput", {}).get(throughput.overlap)
    ours = low.us.get("low_latency", {}).get(low.overlap)
    if RULE in (throughput.source, low.source) or theirs is None or ours is None:
        return throughput
    return low if ours * (1 + HYSTERESIS) < theirs else throughput


def agreed_choice(
    group: Group,
    config: MoEConfig,
    options: Options,
    plans: Mapping[tuple[str, str], LayerPlan],
) -> LayerChoice:
    """What this layer does; the same on all ranks, by rank 0's table and options. Collective.

    options: their mode and overlap are "auto" or one, equal on all ranks.   plans: by the modes and
    overlaps that serve on this rank, one at least; "auto" takes what serves on all ranks.

    Raises CreationFailed for a table that cannot be read, InvalidArgument for one of another layer,
    GeometryMismatch where ranks pass unlike tables or have no overlap in common: on all ranks.
    """
    sizes = LayerSizes.of(config, gpu=common_gpu(group), ranks=group.size, fp8=options.fp8)
    mode, gemm = next(iter(plans))[0], next(iter(plans.values())).gemm

    def shipped() -> LayerTable | None:
        return LayerTable.shipped(sizes, mode, gemm)

    table = agreed_table(group, options.table, LayerTable, shipped=shipped)
    able = [f"{mode} {overlap}" for mode, overlap in plans]
    mine: dict[str, JSON] = {
        "sizes": asdict(sizes),
        "gemm": gemm,
        "able": able,
        "unusual": _unusual(options),
    }
    gathered = group.all_gather(mine)
    lists = [each["able"] for each in gathered]
    common = [words for words in lists[0] if all(words in others for others in lists)]
    if not common:
        each = "; ".join(f"rank {rank}: {', '.join(words)}" for rank, words in enumerate(lists))
        raise GeometryMismatch(
            f"no overlap serves all ranks ({each}): pass the same combine_dtype and gemm on each"
        )
    sizes, unusual = LayerSizes(**gathered[0]["sizes"]), gathered[0]["unusual"]
    if len({each["gemm"] for each in gathered}) > 1:
        unusual = ", ".join(filter(None, (unusual, "a gemm of its own on each rank")))
    if table is not None and (words := sizes.apart(table.sizes)):
        raise InvalidArgument(
            f"the layer table is of another layer ({table.sizes.text}; this is "
            f"{sizes.text}): {'; '.join(words)}: measure this one with `weft tune layer`, "
            "or leave table out"
        )
    by_mode: dict[str, list[str]] = {}
    for name, overlap in (each.split() for each in common):
        by_mode.setdefault(name, []).append(overlap)
    questions = [
        Question(sizes, name, gathered[0]["gemm"], options.max_tokens, tuple(overlaps), unusual)
        for name, overlaps in by_mode.items()
    ]
    found = choose_mode(table, questions)
    if options.overlap != AUTO:
        found = replace(found, overlap=options.overlap)
    if group.rank == 0:
        _log.info("MoE layer, mode %r, %s GEMM: %s", found.mode, gemm, found.text)
    return found


def _unusual(options: Options) -> str:
    """Options that change times and that tables do not know, in words."""
    names = ["combine_dtype", "num_sms"]
    if not options.fp8:  # else there is one only
        names.append("quantize")
    given = {name: getattr(options, name) for name in names}
    return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)


def _told(table: LayerTable | None, question: Question) -> dict[str, dict[str, float]]:
    """mode -> overlap -> us: of this mode and gemm first, of others as they come."""
    if table is None:
        return {}
    mine = table.curve(question.mode, question.gemm)
    found = {} if mine is None else {mine.mode: mine}
    for curve in table.curves:
        if curve.mode != question.mode:
            found.setdefault(curve.mode, curve)
    return {name: curve.times_at(question.max_tokens) for name, curve in found.items()}


def _lack(table: LayerTable | None, curve: LayerCurve | None, question: Question) -> str:
    """Why no time answers, in words."""
    way = f"mode {question.mode!r} with the {question.gemm} GEMM"
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
    tokens, mine = question.max_tokens, us[question.mode]
    others = {name: time for name, time in mine.items() if name != word}
    ranked = sorted(others, key=lambda name: others[name])
    listed = "".join(f", {name} {others[name]:.1f}" for name in ranked)
    text = f"{word} for up to {tokens} tokens a rank: {mine[word]:.1f} us{listed}"
    if any(others[name] < mine[word] for name in ranked if name in question.able):
        text += f"; a change needs {HYSTERESIS:.0%} at two sizes"
    for mode, times in us.items():
        if mode != question.mode and times:
            each = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
            text += f"; mode {mode!r}: {each}"
    if tokens < curve.tokens[0]:
        text += f". Times are those of {curve.tokens[0]} tokens"
    if question.sizes != table.sizes:
        text += f". Read from {table.sizes.text}; this is {question.sizes.text}"
    if question.unusual:
        text += f". Times are those of the defaults, not of {question.unusual}"
    return f"{text}."
