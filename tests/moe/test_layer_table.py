"""The table that chooses an overlap: files, what is near, the choice and its words."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compat.calls import refused
from weft.errors import InvalidArgument
from weft.moe import EXCHANGES, MODELS, OVERLAPS, LayerTable
from weft.moe.layer_choice import LayerChoice, Question, choose
from weft.moe.layer_table import DTYPES, SHIPPED, LayerCurve, LayerSizes
from weft.ops.bands import HYSTERESIS, Times

SIZES = LayerSizes("NVIDIA H200", 4, 128, 8, 7168, 2048, 2048, "fp8")
TOKENS = (8, 64, 512)
US: dict[str, Times] = {
    "none": (50.0, 60.0, 90.0),
    "shared": (40.0, 55.0, 95.0),
    "push": (45.0, 50.0, 80.0),
}
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def curve(exchange="rank", gemm="tiled", tokens=TOKENS, us=US):
    return LayerCurve(exchange, gemm, tokens, us)


def table(*curves, sizes=SIZES):
    return LayerTable(sizes, "a model", "2026-01-02", "a machine", "a method", curves or (curve(),))


def question(max_tokens=64, able=OVERLAPS, sizes=SIZES, **changes):
    return Question(
        sizes,
        **{"exchange": "rank", "gemm": "tiled", **changes},
        **{"max_tokens": max_tokens, "able": tuple(able)},
    )


def test_the_fastest_at_these_tokens_is_taken():
    assert choose(table(), question(8)).overlap == "shared"
    # 5 us behind at 8 tokens, 5 ahead at 64: the lines cross at 36.
    assert choose(table(), question(36)).overlap == "shared"
    assert choose(table(), question(37)).overlap == "push"
    assert choose(table(), question(512)).overlap == "push"
    assert choose(table(), question(1)).overlap == "shared", "below, the first size counts"
    assert choose(table(), question(512, ("none", "shared"))).overlap == "none"


def test_a_choice_says_what_it_took_and_what_the_others_would_take():
    found = choose(table(), question(64))
    assert (found.auto, found.source) == ("push", "measured")
    assert found.us == {"rank": {"none": 60.0, "shared": 55.0, "push": 50.0}}
    assert "push for up to 64 tokens a rank: 50.0 us, shared 55.0, none 60.0." in found.text
    assert "Measured 2026-01-02 on a machine: a model. a method." in found.text
    assert "change needs" not in found.text
    assert "as asked" in replace(found, overlap="none").text
    close = {"none": (50.0, 60.0), "shared": (51.0, 59.0)}
    near = choose(table(curve(tokens=(8, 64), us=close)), question(64))
    assert near.overlap == "none"
    assert "none for up to 64 tokens a rank: 60.0 us, shared 59.0; a change needs 3%" in near.text


def test_the_other_exchange_is_told_but_not_taken():
    both = table(curve("expert", us={"shared": (1.0, 2.0, 3.0)}), curve())
    found = choose(both, question(64))
    assert found.overlap == "push"
    assert list(found.us) == ["rank", "expert"]
    assert "exchange 'expert': shared 2.0" in found.text
    assert choose(both, question(64, exchange="expert")).us["expert"] == {"shared": 2.0}
    assert choose(both, question(64, ("none", "shared"), exchange="expert")).overlap == "shared"


def test_times_of_other_products_are_not_this_layers():
    slow: dict[str, Times] = {"none": (500.0, 600.0, 900.0)}
    mixed = table(curve(gemm="grouped", us=slow), curve(), curve("expert", "padded", us=slow))
    assert choose(mixed, question(64)).us == {
        "rank": {"none": 60.0, "shared": 55.0, "push": 50.0},
        "expert": {"none": 600.0},
    }
    found = choose(mixed, question(64, ("none", "push"), gemm="grouped"))
    assert (found.overlap, found.source, found.us["rank"]) == ("none", "measured", {"none": 600.0})


def test_what_was_read_in_its_stead_is_said():
    wide = replace(SIZES, ranks=8, experts=256)
    found = choose(table(), question(64, sizes=wide))
    assert (found.overlap, found.source) == ("push", "nearest")
    assert "Read from 4 x NVIDIA H200, 128 experts" in found.text
    assert "this is 8 x NVIDIA H200, 256 experts" in found.text
    few = choose(table(), question(2))
    assert (few.source, few.us["rank"]["shared"]) == ("nearest", 40.0)
    assert "Times are those of 8 tokens" in few.text
    other = choose(table(), question(64, ("none", "columns"), unusual="combine_by='fp8'"))
    assert other.source == "nearest"
    assert "those of the defaults, not of combine_by='fp8'" in other.text


@pytest.mark.parametrize(
    ("given", "asked", "want", "words"),
    [
        (None, question(64), "push", "no table is near 4 x NVIDIA H200"),
        (None, question(512), "push", "weft tune layer"),
        (None, question(513), "shared", "no table is near"),
        (None, question(513, ("none", "columns")), "none", "no table is near"),
        (None, question(64, ("none", "shared"), exchange="expert"), "shared", "exchange 'expert'"),
        (table(), question(513), "shared", "the table ends at 512 tokens a rank"),
        (table(), question(64, gemm="grouped"), "push", "no times of exchange 'rank' with grouped"),
        (table(), question(64, ("columns", "signals")), "columns", "no times of columns, signals"),
    ],
)
def test_without_times_the_rule_of_thumb_chooses(given, asked, want, words):
    found = choose(given, asked)
    assert (found.overlap, found.source) == (want, "rule")
    assert "by a rule of thumb" in found.text
    assert words in found.text
    if asked.gemm == "grouped":
        assert found.us == {}, "times of other products are not this layer's"


def test_where_there_is_one_there_is_nothing_to_choose():
    found = choose(table(), question(4096, ("push",)))
    assert (found.overlap, found.source) == ("push", "only one")


NEAR = {
    "ranks": {"ranks": 8, "experts": 256},
    "experts": {"experts": 256},
    "fewer experts": {"experts": 64},
    "top_k": {"top_k": 4},
    "hidden": {"hidden": 3584},
    "intermediate": {"intermediate": 4096},
    "shared": {"shared": 1024},
}
FAR = {
    "gpu is 'NVIDIA B200', there 'NVIDIA H200'": {"gpu": "NVIDIA B200"},
    "dtype is 'bf16', there 'fp8'": {"dtype": "bf16"},
    "shared expert is False, there True": {"shared": 0},
    "ranks is 0.444 times": {"ranks": 9, "experts": 288},
    "experts a rank is 0.496 times": {"experts": 258},
    "top_k is 2.67 times": {"top_k": 3},
    "hidden is 0.498 times": {"hidden": 14400},
    "intermediate is 2.01 times": {"intermediate": 1019},
    "shared is 2.01 times": {"shared": 1019},
}


@pytest.mark.parametrize("changes", NEAR.values(), ids=NEAR)
def test_near_is_up_to_twice_and_half(changes):
    other = replace(SIZES, **changes)
    assert other.apart(SIZES) == []
    assert SIZES.apart(other) == []
    assert other.distance(SIZES) == SIZES.distance(other) == 1.0
    assert SIZES.distance(SIZES) == 0.0


@pytest.mark.parametrize(("words", "changes"), FAR.items(), ids=FAR)
def test_far_is_named(words, changes):
    found = replace(SIZES, **changes).apart(SIZES)
    assert len(found) == 1
    assert words in found[0]


def test_the_nearest_shipped_table_is_read(monkeypatch, tmp_path):
    deep = MODELS["deepseek-v3"]

    def read(ranks: int, exchange="rank", gemm="tiled", fp8=True, gpu="NVIDIA H200", config=deep):
        sizes = LayerSizes.of(config, gpu=gpu, ranks=ranks, fp8=fp8)
        found = LayerTable.shipped(sizes, exchange, gemm)
        return found and found.sizes.ranks

    assert read(8) == 4, "32 experts a rank, as 4 ranks of 128 have"
    assert read(4) == 4
    assert read(2) is None, "128 experts a rank are more than twice 32"
    for unlike in (
        {"gpu": "NVIDIA B200"},
        {"fp8": False},
        {"exchange": "expert"},
        {"gemm": "grouped"},
        {"config": MODELS["qwen3-30b-a3b"]},
    ):
        assert read(8, **unlike) is None, unlike
    monkeypatch.setattr("weft.moe.layer_table.SHIPPED", tmp_path)
    for name, model in (("b", "second"), ("a", "first")):
        (tmp_path / f"{name}.json").write_text(replace(table(), model=model).text())
    found = LayerTable.shipped(SIZES, "rank", "tiled")
    assert found is not None
    assert found.model == "first", "of equally near ones the first by name"


def test_shipped_tables_are_the_records():
    paths = sorted(SHIPPED.glob("*.json"))
    assert len(paths) == 2
    for path in paths:
        found = LayerTable.load(path)
        record = json.loads(
            (BENCHMARKS / f"layer-{found.sizes.ranks}xH200-2026-11-21.json").read_text()
        )
        record = record[0] if isinstance(record, list) else record
        wanted = {(r["tokens"], r["overlap"]): r["us"]["median"] for r in record["rows"]}
        (times,) = found.curves
        got = {
            (tokens, word): us
            for word, column in times.us.items()
            for tokens, us in zip(times.tokens, column, strict=True)
        }
        assert got == wanted
        assert (times.exchange, times.gemm) == ("rank", record["gemm"])
        settings, config = record["settings"], MODELS[found.model]
        assert found.sizes == LayerSizes(
            record["machine"]["gpus"][0],
            settings["ranks"],
            settings["experts"],
            config.routing.top_k,
            config.hidden,
            config.intermediate,
            config.shared,
            settings["dtype"],
        )
        assert found.text() == path.read_text()
        told = "docs/measuring.md says push at every size"
        sizes = [choose(found, question(n, sizes=found.sizes)) for n in range(1, 513)]
        assert {each.overlap for each in sizes} == {"push"}, told


def test_files_keep_everything(tmp_path):
    found = table(curve(us={"none": (None, 60.25, 90.0)}), curve("expert"))
    path = tmp_path / "table.json"
    path.write_text(found.text())
    assert LayerTable.load(path) == found
    assert LayerTable.load(str(path)).digest == found.digest
    assert table(sizes=replace(SIZES, ranks=2)).digest != table().digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "weft all-reduce table 1"}, "all-reduce table 1"),
        ({"date": ""}, "needs date"),
        ({"curves": []}, "curves are of []"),
        ({"curves": [{}]}, "exchange"),
        ({"curves": [asdict(curve()), asdict(curve())]}, "each exchange and gemm once"),
        ({"ranks": 0}, "at least 1"),
        ({"hidden": 71.5}, "71.5 stands where a whole number"),
        ({"shared": -1}, "shared at least 0"),
        ({"dtype": "fp4"}, ", ".join(DTYPES)),
        ({"exchange": "token"}, "choose one of rank, expert"),
        ({"tokens": [8, 8, 512]}, "rising"),
        ({"us": {}}, "one name"),
        ({"us": {"later": [1.0, 2.0, 3.0]}}, "overlap is 'later'"),
        ({"us": {"none": [1.0]}}, "1 times for 3 sizes"),
        ({"us": {"none": [1.0, 0.0, 3.0]}}, "above 0"),
        ({"us": {"none": [1.0, float("nan"), 3.0]}}, "above 0"),
        ({"us": [1.0]}, "items"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, change, words):
    data = table().as_json()
    for name, value in change.items():
        (data if name in data else data["curves"][0])[name] = value
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    refused(InvalidArgument, lambda: LayerTable.load(path), str(path), words)


def test_what_is_no_json_is_refused(tmp_path):
    path = tmp_path / "table.json"
    refused(InvalidArgument, lambda: LayerTable.load(path), str(path), "No such file")
    for text in ("{", "[1]", "\x80\x02]q\x00.", '"weft layer table 1"'):
        path.write_text(text)
        refused(InvalidArgument, lambda: LayerTable.load(path), str(path))
    path.write_bytes(b"\x80\x04K\x01.")
    refused(InvalidArgument, lambda: LayerTable.load(path), str(path))


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
def test_what_is_chosen_can_be_had_and_no_rival_is_surely_faster(drawn):
    given_, asked = drawn
    (times,) = given_.curves
    found = choose(given_, asked)
    assert found == choose(LayerTable.of_json(json.loads(given_.text()), "a copy"), asked)
    assert found.overlap == found.auto
    assert found.overlap in asked.able
    assert found.us == {"rank": times.times_at(asked.max_tokens)}
    if found.source != "rule":
        assert found.overlap in found.us["rank"], "what was not measured there is not taken"
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
    gaps = table(curve(us={"push": (None, 50.0, None), "none": (None, None, 90.0)}))
    assert choose(gaps, question(8)).source == "rule"
    assert choose(gaps, question(64)).overlap == "push"
    assert choose(gaps, question(65)).source == "rule", "push has ended, none not begun"
    assert choose(gaps, question(512)).overlap == "none"
    assert choose(gaps, question(512)).us == {"rank": {"none": 90.0}}


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
    found = LayerChoice("push", "push", "rule", {}, "push by a rule.", "")
    assert found.text == "push by a rule."
    assert set(EXCHANGES) == {"rank", "expert"}
