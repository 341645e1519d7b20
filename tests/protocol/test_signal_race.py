"""Sends that wait for tiles under ThreadSanitizer, and their mutation."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.recorded import reads
from weft.jit import compile_program

SOURCE = Path(__file__).with_name("signal_race.cpp")
CAMPAIGN = reads("tests/protocol/signal_race.cpp")
# One rounding for each operation, as the entries are compiled.
OPTIONS = ("-fsanitize=thread", "-g", "-O1", "-ffp-contract=off")
# The first report is the verdict; to print all of them takes seconds.
ENVIRONMENT = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}


def run(*options: str, rounds: int) -> tuple[int, str]:
    program = compile_program(SOURCE, name="signal-race", options=(*OPTIONS, *options))
    done = subprocess.run(
        [str(program), str(rounds)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "way", ["push", *(pytest.param(way, marks=CAMPAIGN) for way in ("fp8", "choices"))]
)
def test_no_race_between_a_product_and_its_sends(way):
    status, text = run(f"-DWAY={way}", rounds=400)
    assert status == 0, text
    assert "400 rounds of 3 ranks: 0 wrong words" in text


@pytest.mark.parametrize("way", ["push", pytest.param("choices", marks=CAMPAIGN)])
def test_signals_that_order_nothing_are_reported(way):
    status, text = run(f"-DWAY={way}", "-DWEAK_SIGNALS=1", rounds=3)
    assert status != 0
    assert "ThreadSanitizer: data race" in text
