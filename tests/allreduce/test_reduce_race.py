"""The fused all-reduce under ThreadSanitizer, its mutation, and a long soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program
from tests.recorded import reads

SOURCE = Path(__file__).with_name("reduce_race.cpp")
# Every run tries a few interleavings; the long campaign runs when these files change.
CAMPAIGN = reads("tests/allreduce/reduce_race.cpp")
SANITIZED = ("-fsanitize=thread", "-g", "-O1", "-ffp-contract=off")


def run(name: str, *options: str, calls: int, first_epoch: int = 0) -> tuple[int, str]:
    return run_program(SOURCE, calls, first_epoch, name=name, options=options)


@pytest.mark.parametrize(
    "count", [4, pytest.param(2, marks=CAMPAIGN), pytest.param(5, marks=CAMPAIGN)]
)
def test_no_race_with_ranks_as_threads(count):
    status, text = run(f"reduce-race-{count}", *SANITIZED, f"-DRANKS={count}", calls=1500)
    assert status == 0, text
    assert f"1500 calls of {count} ranks: 0 wrong numbers" in text


def test_no_race_with_the_epilogue_at_the_receiver():
    status, text = run("reduce-race-receiver", *SANITIZED, "-DEPILOGUE_AT=receiver", calls=1500)
    assert status == 0, text
    assert "1500 calls of 4 ranks: 0 wrong numbers" in text


def test_one_buffer_for_rows_to_be_summed_is_caught():
    status, text = run("reduce-one-side", "-DWEFT_ONE_SIDE=1", calls=200_000)
    assert status != 0, text


def test_calls_across_the_wrap_of_the_40_bit_epochs():
    status, text = run("reduce-soak", calls=1_000, first_epoch=2**40 - 500)
    assert status == 0, text
    assert "1000 calls of 4 ranks: 0 wrong numbers" in text


# The second run crosses the wrap in its middle.
@CAMPAIGN
@pytest.mark.parametrize("first_epoch", [0, 2**40 - 50_000])
def test_a_hundred_thousand_calls(first_epoch):
    status, text = run("reduce-soak", calls=100_000, first_epoch=first_epoch)
    assert status == 0, text
    assert "100000 calls of 4 ranks: 0 wrong numbers" in text


@CAMPAIGN
def test_undefined_behaviour_and_bounds():
    status, text = run("reduce-asan", "-fsanitize=address,undefined", "-g", calls=2000)
    assert status == 0, text
