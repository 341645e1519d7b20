"""`weft bench lowlatency --variants`: all checked, timed in turn, told, on CPU ranks."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

import weft
from tests.bench.test_lowlatency import SETTINGS
from weft.bench import lowlatency_ladder
from weft.bench.lowlatency_ladder import (
    ROUNDS,
    VARIANTS,
    Ladder,
    climb,
    climb_body,
    parse_variants,
    print_ladder,
    write_ladder_json,
)
from weft.bench.lowlatency_trial import LowTrial
from weft.cli import app
from weft.errors import InvalidArgument

SMALL = replace(SETTINGS, samples=2)


def test_every_variant_is_timed_at_every_size_and_told(tmp_path):
    ladder = climb(SMALL, parse_variants("all"), quiet=True)
    assert ladder.problems == {}
    assert [(each.tokens, each.variant) for each in ladder.rungs] == [
        (tokens, name) for tokens in (1, 6) for name in VARIANTS
    ]
    for rung in ladder.rungs:
        assert all(len(samples) == 2 * ROUNDS for samples in rung.samples["pair"])
    assert set(ladder.memory) == set(VARIANTS)
    text = io.StringIO()
    print_ladder(Console(file=text, width=160), ladder)
    assert all(name in text.getvalue() for name in VARIANTS)
    write_ladder_json(tmp_path / "ladder.json", ladder)
    written = json.loads((tmp_path / "ladder.json").read_text())
    assert len(written["medians"]) == 2 * len(VARIANTS)


def test_a_variant_that_is_wrong_is_named_and_the_others_go_on(ranks, monkeypatch):
    right = LowTrial.check

    def wrong(trial: LowTrial) -> str | None:
        found = right(trial)
        return "spoiled" if trial.settings.reduce == "sender" and trial.group.rank == 1 else found

    monkeypatch.setattr(LowTrial, "check", wrong)

    def body(group: weft.Group) -> Ladder:
        return Ladder(SMALL, **climb_body(group, SMALL, ("default", "sender"), True))

    for ladder in ranks(2, "threads")(body):
        assert ladder.problems == {"sender": "1 tokens, before timing: spoiled"}
        assert [(each.variant, each.tokens) for each in ladder.rungs] == [
            ("default", 1),
            ("default", 6),
        ]
        text = io.StringIO()
        print_ladder(Console(file=text, width=160), ladder)
        assert "sender: 1 tokens, before timing: spoiled" in text.getvalue()


def test_names_that_are_none_are_refused():
    with pytest.raises(InvalidArgument, match=r"variants has 'fast'; choose of default, halves"):
        parse_variants("default,fast")
    assert parse_variants("halves,default,halves") == ("halves", "default")


def test_the_command_leaves_with_an_error_when_a_check_fails(monkeypatch):
    def climbed(settings: object, variants: object, *, quiet: bool) -> Ladder:
        machine = {"gpus": [], "cpus": 1, "cpu": "x", "torch": "y", "date": "z"}
        return Ladder(SMALL, machine, {}, [], {"halves": "1 tokens, before timing: wrong"})

    monkeypatch.setattr(lowlatency_ladder, "climb", climbed)
    monkeypatch.setattr(lowlatency_ladder, "machine_line", lambda machine: "a machine")
    found = CliRunner().invoke(
        app, ["bench", "lowlatency", "--device", "cpu", "--variants", "halves"]
    )
    assert found.exit_code == 1, found.output
    assert "halves: 1 tokens, before timing: wrong" in found.output


def test_a_trace_of_several_variants_is_refused():
    arguments = ["bench", "lowlatency", "--device", "cpu", "--variants", "all", "--trace", "x"]
    found = CliRunner().invoke(app, arguments)
    assert isinstance(found.exception, InvalidArgument)
