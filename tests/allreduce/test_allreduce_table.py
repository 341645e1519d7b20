"""The table that chooses a backend: bands, hysteresis, reading by bytes, files and the vote."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from weft.allreduce.choice import common_table
from weft.allreduce.curve import EPILOGUES, Curve
from weft.allreduce.formula import formula_us, sent_bytes
from weft.allreduce.table import _LIKE, BACKENDS, SHIPPED, Table
from weft.errors import CreationFailed, GeometryMismatch, InvalidArgument

BF16 = torch.bfloat16
SIZES = (1, 2, 4, 8, 16)
ONE = (5.0, 6.0, 8.0, 12.0, 20.0)


def curve(hidden=64, epilogue="norm", dtype="bf16", tokens=SIZES, **us):
    return Curve(hidden, dtype, epilogue, tokens, us or {"oneshot": ONE})


def table(*curves, source="measured", ranks=2, gpu=""):
    return Table(gpu, ranks, source, "2026-01-02", "a machine", "a method", curves or (curve(),))


def bands(two, one=ONE, row_bytes=128, backends=("oneshot", "twoshot")):
    found = curve(oneshot=one, twoshot=two).bands(row_bytes, backends)
    return list(zip(found.starts, found.names, strict=True))


def test_the_faster_backend_serves_from_where_the_lines_cross():
    # At 4 tokens 8.0 and 9.0, at 8 tokens 12.0 and 10.0: they cross a third of the way, at 5.33.
    assert bands((9.0, 9.0, 9.0, 10.0, 12.0)) == [(0, "oneshot"), (6, "twoshot")]
    assert bands((9.0, 9.0, 9.0, 10.0, 12.0), row_bytes=64) == [(0, "oneshot"), (11, "twoshot")]
    assert bands((9.0,) * 5, backends=("twoshot",)) == [(0, "twoshot")]
    assert bands((4.0, 4.5, 6.0, 9.0, 15.0)) == [(0, "twoshot")]


def test_a_change_needs_more_than_noise():
    """3 % at two sizes that follow each other, or at the last one."""
    stay = [(0, "oneshot")]
    assert bands((9.0, 9.0, 9.0, 11.7, 19.5)) == stay, "2.5 % is noise"
    assert bands((9.0, 5.0, 9.0, 13.0, 21.0)) == stay, "one size alone is noise"
    assert bands((9.0, 9.0, 9.0, 13.0, 19.0)) == [*stay, (13, "twoshot")], "the last size"
    late = bands((4.9, 5.9, 7.9, 11.0, 18.0))
    assert late == [(0, "twoshot")], "at the first size nobody holds the ground"
    assert bands((5.1, 5.9, 7.9, 11.0, 18.0)) == [*stay, (5, "twoshot")], "ahead, then by enough"


def test_a_backend_that_ends_gives_way():
    ends = (5.0, 6.0, None, None, None)
    assert bands((9.0, 9.0, 9.0, 9.0, 9.0), one=ends) == [(0, "oneshot"), (3, "twoshot")]
    begins = (None, None, 7.0, 7.0, 7.0)
    assert bands(begins) == [(0, "oneshot"), (4, "twoshot")]
    assert curve().bands(128, ("twoshot", "twoshot_bulk")).names == ("twoshot",)


def test_bands_and_choices_agree_at_every_size():
    found = Table.formula("NVIDIA H200", 8)
    for hidden in (8, 2880, 4096, 7168, 16384):
        for backends in (BACKENDS, ("oneshot", "twoshot_bulk"), ("twoshot",)):
            sizes: dict[str, Any] = {"hidden": hidden, "dtype": BF16, "epilogue": "fp8-token"}
            band = found.bands(**sizes, backends=backends)
            assert band.starts == tuple(sorted(set(band.starts)))
            for tokens in (*range(40), *range(100, 3000, 97)):
                choice = found.choose(tokens, **sizes, backends=backends)
                assert choice.backend == band.at(tokens)
                assert choice.backend in backends


def test_what_was_not_measured_is_read_by_bytes_from_the_nearest():
    far = (20.0, 20.0, 20.0, 20.0, 21.0)
    found = table(
        curve(hidden=64, oneshot=ONE, twoshot=(9.0, 9.0, 9.0, 10.0, 12.0)),
        curve(hidden=4096, oneshot=ONE, twoshot=far),
        curve(hidden=64, epilogue="none", oneshot=far, twoshot=ONE),
    )

    def choose(tokens, hidden=64, epilogue="norm", dtype=BF16):
        return found.choose(tokens, hidden=hidden, dtype=dtype, epilogue=epilogue)

    assert (choose(5).backend, choose(6).backend) == ("oneshot", "twoshot")
    assert (choose(10, 32).backend, choose(11, 32).backend) == ("oneshot", "twoshot")
    assert choose(3, 64, dtype=torch.float32).backend == "twoshot", "6 rows of half the bytes"
    assert choose(6, 2048).backend == "oneshot"
    assert choose(1, epilogue="none").backend == "twoshot"
    assert choose(6, epilogue="fp8-group").backend == "twoshot"
    assert (choose(5).source, choose(10, 32).source) == ("measured", "nearest")
    assert (choose(17).source, choose(5, epilogue="fp8-static").source) == ("nearest", "nearest")


def test_a_choice_says_why():
    two = (9.0, 9.0, 9.0, 10.0, 12.0)
    found = table(curve(oneshot=ONE, twoshot=two))
    text = found.choose(6, hidden=64, dtype=BF16).text
    for words in (
        "twoshot for 6 tokens x 64 bf16",
        "9.5 us, oneshot 10.0",
        "2026-01-02",
        "a method",
    ):
        assert words in text
    close = table(curve(oneshot=ONE, twoshot=(9.0, 9.0, 9.0, 11.7, 19.5)))
    assert "a change needs 3%" in close.choose(8, hidden=64, dtype=BF16).text
    assert "1..16 tokens x 64 bf16, norm" in found.choose(6, hidden=32, dtype=BF16).text
    computed = Table.formula("NVIDIA L4", 4).choose(6, hidden=64, dtype=BF16)
    assert computed.source == "formula"
    assert "not measured" in computed.text
    only = found.choose(6, hidden=64, dtype=BF16, backends=("collective",))
    assert (only.backend, only.source) == ("collective", "only one")
    unknown = found.choose(6, hidden=64, dtype=BF16, backends=("collective", "nothing"))
    assert "no time" in unknown.text


def test_files_keep_everything(tmp_path):
    found = table(curve(oneshot=ONE, twoshot=(None, 9.0, 9.0, 10.25, 12.0)), curve(hidden=128))
    path = tmp_path / "table.json"
    path.write_text(found.text())
    assert Table.load(path) == found
    assert Table.load(str(path)).digest == found.digest
    assert table(curve(hidden=32)).digest != table().digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "weft all-reduce table 9"}, "table 9"),
        ({"source": "guessed"}, "guessed"),
        ({"date": ""}, "needs date"),
        ({"curves": []}, "0 curves"),
        ({"curves": [{}]}, "hidden"),
        ({"ranks": 0}, "0 ranks"),
        ({"tokens": [4, 2, 8, 16, 32]}, "rising"),
        ({"tokens": [1, 2.5, 4, 8, 16]}, "2.5 stands where a whole number"),
        ({"ranks": True}, "True stands"),
        ({"tokens": [0, 2, 4, 8, 16]}, "from 1 up"),
        ({"us": {}}, "one name"),
        ({"us": {"oneshot": [1.0]}}, "1 times for 5 sizes"),
        ({"us": {"oneshot": [1.0, 2.0, 3.0, 4.0, -5.0]}}, "above 0"),
        ({"us": {"oneshot": [1.0, 2.0, 3.0, 4.0, float("inf")]}}, "above 0"),
        ({"us": {"oneshot": "fast!"}}, "string to float"),
        ({"epilogue": "fp4"}, "fp4"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, change, words):
    data = table().as_json()
    for name, value in change.items():
        (data if name in data else data["curves"][0])[name] = value
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    refused(InvalidArgument, lambda: Table.load(path), str(path), words)


def test_what_is_no_json_is_refused(tmp_path):
    path = tmp_path / "table.json"
    refused(InvalidArgument, lambda: Table.load(path), str(path), "No such file")
    path.write_text("{")
    refused(InvalidArgument, lambda: Table.load(path), str(path))
    path.write_text("[1]")
    refused(InvalidArgument, lambda: Table.load(path), str(path))


def test_shipped_tables_are_measured_or_are_the_formula():
    paths = sorted(SHIPPED.glob("*.json"))
    tables = [Table.load(path) for path in paths]
    assert {("NVIDIA H200", n) for n in (2, 4, 8)} <= {(t.gpu, t.ranks) for t in tables}
    for path, found in zip(paths, tables, strict=True):
        if found.source == "formula":
            assert found == Table.formula(found.gpu, found.ranks), path
        assert Table.shipped(found.gpu, found.ranks) == found
    assert Table.shipped("", 5) == Table.formula("", 5)
    assert Table.shipped("NVIDIA L4", 8).source == "formula"


def test_the_formula_counts_what_is_sent():
    row = 7168 * 2
    assert sent_bytes("oneshot", 16, row, 8) == 7 * 16 * row
    assert sent_bytes("twoshot", 16, row, 8) == 14 * 2 * row
    assert sent_bytes("twoshot_bulk", 17, row, 8) == 14 * 3 * row, "whole rows have owners"
    assert formula_us("oneshot", 16, row, 8, cpu=False) == pytest.approx(4.8 + 7 * 16 * row / 334e3)
    assert set(_LIKE) == set(EPILOGUES)
    assert all(sorted(like) == sorted(EPILOGUES) and like[0] == me for me, like in _LIKE.items())


def vote(group, given):
    mine = given.get(group.rank)
    return common_table(group, mine).as_json()


def test_all_ranks_use_rank_0s_table(ranks, tmp_path):
    found = table(curve(hidden=96), ranks=3)
    path = tmp_path / "table.json"
    path.write_text(found.text())
    run = ranks(3, "cpu")
    assert run(vote, {}) == [Table.formula("", 3).as_json()] * 3
    assert run(vote, {0: path}) == [found.as_json()] * 3
    assert run(vote, {0: found, 2: str(path)}) == [found.as_json()] * 3


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            {0: table(), 1: table(curve(hidden=32))},
            GeometryMismatch,
            "the all-reduce table differs",
        ),
        ({1: table()}, GeometryMismatch, "rank 1 has table="),
        ({1: "/nowhere/table.json"}, CreationFailed, "/nowhere/table.json"),
    ],
)
def test_another_table_on_one_rank_is_refused_by_all(ranks, given, error, words):
    def body(group: weft.Group) -> str:
        with pytest.raises(error, match=words) as caught:
            common_table(group, given.get(group.rank))
        return str(caught.value)

    texts = ranks(2, "threads")(body)
    assert texts[0] == texts[1]
