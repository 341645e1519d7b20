"""What "auto" takes by a table: the choice, its words, and what holds for any table."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.moe.tables import SIZES, US, curve, question, table
from weft.moe import MODES, OVERLAPS, LayerTable
from weft.moe.choice import LayerChoice, Question, choose, choose_mode
from weft.tuning.thresholds import HYSTERESIS, Times

BARE = {"none": US["none"]}


def test_the_fastest_at_these_tokens_is_taken():
    assert choose(table(), question(8)).overlap == "shared_expert"
    # 5 us behind at 8 tokens, 5 ahead at 64: the lines cross at 36.
    assert choose(table(), question(36)).overlap == "shared_expert"
    assert choose(table(), question(37)).overlap == "gemm_push"
    assert choose(table(), question(512)).overlap == "gemm_push"
    assert choose(table(), question(1)).overlap == "shared_expert", "below, the first size counts"
    assert choose(table(), question(512, ("none", "shared_expert"))).overlap == "none"


@pytest.mark.parametrize(("push", "want"), [(40.9, "gemm_push"), (41.3, "shared_expert")])
def test_push_begins_where_no_other_is_surely_faster(push, want):
    us = {
        "none": (50.0, 60.0, 90.0),
        "shared_expert": (40.0, 55.0, 85.0),
        "gemm_push": (push, 54.9, 84.9),
    }
    assert {choose(table(curve(us=us)), question(n)).overlap for n in (1, 8, 64, 512)} == {want}


def test_a_choice_says_what_it_took_and_what_the_others_would_take():
    found = choose(table(), question(64))
    assert (found.auto, found.source) == ("gemm_push", "measured")
    assert found.us == {"throughput": {"none": 60.0, "shared_expert": 55.0, "gemm_push": 50.0}}
    assert (
        "gemm_push for up to 64 tokens a rank: 50.0 us, shared_expert 55.0, none 60.0."
        in found.text
    )
    assert "Measured 2026-01-02 on a machine: a model. a method." in found.text
    assert "change needs" not in found.text
    assert "as asked" in replace(found, overlap="none").text
    close = {"none": (50.0, 60.0), "shared_expert": (51.0, 59.0)}
    near = choose(table(curve(tokens=(8, 64), us=close)), question(64))
    assert near.overlap == "none"
    assert (
        "none for up to 64 tokens a rank: 60.0 us, shared_expert 59.0; a change needs 3%"
        in near.text
    )


def test_the_other_exchange_is_told_but_not_taken():
    both = table(curve("low_latency", us={"shared_expert": (1.0, 2.0, 3.0)}), curve())
    found = choose(both, question(64))
    assert found.overlap == "gemm_push"
    assert list(found.us) == ["throughput", "low_latency"]
    assert "mode 'low_latency': shared_expert 2.0" in found.text
    assert choose(both, question(64, mode="low_latency")).us["low_latency"] == {
        "shared_expert": 2.0
    }
    assert (
        choose(both, question(64, ("none", "shared_expert"), mode="low_latency")).overlap
        == "shared_expert"
    )


def test_times_of_other_products_are_not_this_layers():
    slow: dict[str, Times] = {"none": (500.0, 600.0, 900.0)}
    mixed = table(curve(gemm="torch", us=slow), curve(), curve("low_latency", "torch", us=slow))
    assert choose(mixed, question(64)).us == {
        "throughput": {"none": 60.0, "shared_expert": 55.0, "gemm_push": 50.0},
        "low_latency": {"none": 600.0},
    }
    found = choose(mixed, question(64, ("none", "gemm_push"), gemm="torch"))
    assert (found.overlap, found.source, found.us["throughput"]) == (
        "none",
        "measured",
        {"none": 600.0},
    )


def test_what_was_read_in_its_stead_is_said():
    wide = replace(SIZES, ranks=8, experts=256)
    found = choose(table(), question(64, sizes=wide))
    assert (found.overlap, found.source) == ("gemm_push", "nearest")
    assert "Read from 4 x NVIDIA H200, 128 experts" in found.text
    assert "this is 8 x NVIDIA H200, 256 experts" in found.text
    few = choose(table(), question(2))
    assert (few.source, few.us["throughput"]["shared_expert"]) == ("nearest", 40.0)
    assert "Times are those of 8 tokens" in few.text
    other = choose(table(), question(64, ("none", "shared_expert"), unusual="combine_dtype='fp8'"))
    assert other.source == "nearest"
    assert "those of the defaults, not of combine_dtype='fp8'" in other.text


@pytest.mark.parametrize(
    ("given", "asked", "want", "words"),
    [
        (None, question(64), "gemm_push", "no table is near 4 x NVIDIA H200"),
        (None, question(1024), "gemm_push", "weft tune layer"),
        (None, question(1025), "shared_expert", "no table is near"),
        (None, question(1025, ("none", "gemm_push")), "none", "no table is near"),
        (
            None,
            question(64, ("none", "shared_expert"), mode="low_latency"),
            "shared_expert",
            "mode 'low_latency'",
        ),
        (table(), question(513), "gemm_push", "the table ends at 512 tokens a rank"),
        (
            table(),
            question(64, gemm="torch"),
            "gemm_push",
            "no times of mode 'throughput' with the torch GEMM",
        ),
        (
            table(curve(us=BARE)),
            question(64, ("shared_expert", "gemm_push")),
            "gemm_push",
            "times of shared_expert, gemm_push",
        ),
    ],
)
def test_without_times_the_rule_of_thumb_chooses(given, asked, want, words):
    found = choose(given, asked)
    assert (found.overlap, found.source) == (want, "rule")
    assert "by a rule of thumb" in found.text
    assert words in found.text
    if asked.gemm == "torch":
        assert found.us == {}, "times of other products are not this layer's"


def test_where_there_is_one_there_is_nothing_to_choose():
    found = choose(table(), question(4096, ("gemm_push",)))
    assert (found.overlap, found.source) == ("gemm_push", "only one")


@st.composite
def tables(draw: st.DrawFn) -> tuple[LayerTable, Question]:
    """Any curve, and a question that it can answer."""
    tokens = tuple(sorted(draw(st.sets(st.integers(1, 600), min_size=1, max_size=6))))
    us = st.none() | st.floats(10, 100)
    times = st.tuples(*[us for _ in tokens])
    found = draw(st.dictionaries(st.sampled_from(OVERLAPS), times, min_size=1))
    able = draw(st.lists(st.sampled_from(OVERLAPS), min_size=2, unique=True))
    return table(curve(tokens=tokens, us=found)), question(draw(st.integers(1, tokens[-1])), able)


@given(tables())
def test_what_is_chosen_can_be_had_and_no_other_is_surely_faster(drawn):
    given_, asked = drawn
    (times,) = given_.curves
    found = choose(given_, asked)
    assert found == choose(LayerTable.of_json(json.loads(given_.text()), "a copy"), asked)
    assert found.overlap == found.auto
    assert found.overlap in asked.able
    assert found.us == {"throughput": times.times_at(asked.max_tokens)}
    if found.source != "rule":
        assert found.overlap in found.us["throughput"], "what was not measured there is not taken"
        assert (found.source == "measured") == (asked.max_tokens >= times.tokens[0])
    if asked.max_tokens not in times.tokens:
        return
    place = times.tokens.index(asked.max_tokens)
    here = {name: times.us[name] for name in asked.able if name in times.us}
    known = [name for name in here if here[name][place] is not None]
    assert (found.source != "rule") == bool(known)
    if not known:
        return
    best = min(known, key=lambda name: here[name][place] or 0.0)
    assert not all(
        faster(here[best][i], here[found.overlap][i])
        for i in (place, place + 1)
        if i < len(times.tokens)
    ), f"{best} is faster twice"


def faster(one: float | None, other: float | None) -> bool:
    """By more than noise; what has no time is beaten by any."""
    return one is not None and (other is None or one < other * (1 - HYSTERESIS))


def test_what_was_refused_at_some_sizes_is_not_taken_there():
    gaps = table(curve(us={"gemm_push": (None, 50.0, None), "none": (None, None, 90.0)}))
    assert choose(gaps, question(8)).source == "rule"
    assert choose(gaps, question(64)).overlap == "gemm_push"
    assert choose(gaps, question(65)).source == "rule", "push has ended, none not begun"
    assert choose(gaps, question(512)).overlap == "none"
    assert choose(gaps, question(512)).us == {"throughput": {"none": 90.0}}


@given(tables(), st.integers(-3, 3))
def test_only_ratios_decide(drawn, power):
    given_, asked = drawn
    (times,) = given_.curves
    scaled = {
        name: tuple(None if us is None else us * 2.0**power for us in each)
        for name, each in times.us.items()
    }
    other = table(curve(tokens=times.tokens, us=scaled))
    assert choose(other, asked).overlap == choose(given_, asked).overlap


def test_words_of_a_choice_are_plain():
    found = LayerChoice(
        "throughput", "gemm_push", "gemm_push", "rule", {}, "gemm_push by a rule.", ""
    )
    assert found.text == "gemm_push by a rule."
    assert set(MODES) == {"throughput", "low_latency"}


def of_mode(mode: str, us: float) -> Any:
    return curve(mode, us={"none": (us, us, us)})


@pytest.mark.parametrize(
    ("low", "want"), [(50.0, "low_latency"), (59.5, "throughput"), (70.0, "throughput")]
)
def test_low_latency_is_taken_where_it_was_measured_faster(low, want):
    both = table(of_mode("throughput", 60.0), of_mode("low_latency", low))
    questions = [question(64, ("none",), mode=mode) for mode in MODES]
    assert choose_mode(both, questions).mode == want
    assert choose_mode(both, questions[1:]).mode == "low_latency", "nothing else serves"


def test_low_latency_is_not_taken_unmeasured():
    questions = [question(64, mode=mode) for mode in MODES]
    for known in (None, table(), table(curve("low_latency", us={"none": (1.0, 1.0, 1.0)}))):
        assert choose_mode(known, questions).mode == "throughput"
