"""The protocol under ThreadSanitizer, its mutation, and the long soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program
from tests.recorded import reads

SOURCE = Path(__file__).with_name("race.cpp")
# Every run tries a few interleavings; the long campaign runs when these files change.
CAMPAIGN = reads("tests/alltoall/race.cpp")
SANITIZED = ("-fsanitize=thread", "-g", "-O1")


def run(name: str, *options: str, rounds: int, first_epoch: int = 0) -> tuple[int, str]:
    return run_program(SOURCE, rounds, first_epoch, name=name, options=options)


def test_no_race_with_ranks_as_threads():
    status, text = run("race", *SANITIZED, rounds=3000)
    assert status == 0, text
    assert "3000 rounds of 4 ranks: 0 wrong words" in text


@CAMPAIGN
@pytest.mark.parametrize("combine", ["pull", "push", "push_fp8", "gemm_push"])
@pytest.mark.parametrize(("group", "split_phase"), [(1, 1), (4, 1), (9, 0)])
def test_no_race_in_other_groups_ways_and_halves(combine, group, split_phase):
    choice = (f"-DRANKS={group}", f"-DCOMBINE={combine}", f"-DSPLIT_PHASE={split_phase}")
    status, text = run(f"race-{combine}-{group}", *SANITIZED, *choice, rounds=400)
    assert status == 0, text
    assert f"400 rounds of {group} ranks: 0 wrong words" in text


@CAMPAIGN
@pytest.mark.parametrize("combine", ["push", "push_fp8", "gemm_push"])
def test_a_weakened_release_of_pushed_rows_is_reported(combine):
    choice = (f"-DCOMBINE={combine}", "-DWEFT_WEAK_FLAGS=1")
    status, text = run(f"race-weak-{combine}", *SANITIZED, *choice, rounds=300)
    assert status != 0
    assert "ThreadSanitizer: data race" in text


def test_a_weakened_release_is_reported():
    """x86 hides the missing order from the data; the sanitizer must see it or proves nothing."""
    status, text = run("race-weak", *SANITIZED, "-DWEFT_WEAK_FLAGS=1", rounds=300)
    assert status != 0
    assert "ThreadSanitizer: data race" in text


def test_rounds_across_the_wrap_of_the_40_bit_epochs():
    status, text = run("soak", rounds=2_000, first_epoch=2**40 - 1_000)
    assert status == 0, text
    assert "2000 rounds of 4 ranks: 0 wrong words" in text


# The second run crosses the wrap in its middle.
@CAMPAIGN
@pytest.mark.parametrize("first_epoch", [0, 2**40 - 250_000])
def test_a_million_rounds(first_epoch):
    status, text = run("soak", rounds=500_000, first_epoch=first_epoch)
    assert status == 0, text
    assert "500000 rounds of 4 ranks: 0 wrong words" in text


@CAMPAIGN
def test_undefined_behaviour_and_bounds():
    status, text = run("race-asan", "-fsanitize=address,undefined", "-g", rounds=2000)
    assert status == 0, text
