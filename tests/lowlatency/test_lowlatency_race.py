"""Low-latency rounds under the sanitizers, without credits, and for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program
from tests.recorded import reads

SOURCE = Path(__file__).with_name("lowlatency_race.cpp")
# Every run tries a few interleavings; the long campaign runs when these files change.
CAMPAIGN = reads("tests/lowlatency/lowlatency_race.cpp")
SANITIZED = ("-fsanitize=thread", "-g", "-O1")
CHOICES = [
    (4, "receiver", 1),
    pytest.param(4, "receiver", 0, marks=CAMPAIGN),
    pytest.param(4, "sender", 1, marks=CAMPAIGN),
    pytest.param(3, "sender", 0, marks=CAMPAIGN),
    pytest.param(1, "receiver", 1, marks=CAMPAIGN),
]


def run(name: str, *options: str, rounds: int, first_epoch: int = 0) -> tuple[int, str]:
    return run_program(SOURCE, rounds, first_epoch, name=name, options=options)


@pytest.mark.parametrize(("group", "reduce", "split_phase"), CHOICES)
def test_no_race_in_any_group_way_and_halves(group, reduce, split_phase):
    choice = (f"-DRANKS={group}", f"-DREDUCE={reduce}", f"-DSPLIT_PHASE={split_phase}")
    name = f"low-race-{group}-{reduce}-{split_phase}"
    status, text = run(name, *SANITIZED, *choice, rounds=600)
    assert status == 0, text
    assert f"600 rounds of {group} ranks: 0 wrong words" in text


@CAMPAIGN
def test_no_race_where_experts_store_rows_at_owners():
    status, text = run("low-race-gemm-push", *SANITIZED, "-DRANKS=3", "-DGEMM_PUSH=1", rounds=600)
    assert status == 0, text
    assert "600 rounds of 3 ranks: 0 wrong words" in text


@pytest.mark.parametrize("split_phase", [0, 1])
def test_without_credits_rows_are_lost(split_phase):
    status, text = run(
        f"low-race-hasty-{split_phase}",
        "-DWEFT_NO_GRANTS=1",
        f"-DSPLIT_PHASE={split_phase}",
        rounds=20_000,
    )
    assert status != 0
    assert ": 0 wrong words" not in text


def test_rounds_across_the_wrap_of_the_40_bit_epochs():
    status, text = run("low-soak", rounds=2_000, first_epoch=2**40 - 1_000)
    assert status == 0, text
    assert "2000 rounds of 4 ranks: 0 wrong words" in text


# The second run crosses the wrap in its middle.
@CAMPAIGN
@pytest.mark.parametrize("first_epoch", [0, 2**40 - 50_000])
def test_many_rounds(first_epoch):
    status, text = run("low-soak", rounds=200_000, first_epoch=first_epoch)
    assert status == 0, text
    assert "200000 rounds of 4 ranks: 0 wrong words" in text


@CAMPAIGN
def test_undefined_behaviour_and_bounds():
    status, text = run(
        "low-asan", "-fsanitize=address,undefined", "-g", "-DSPLIT_PHASE=1", rounds=1000
    )
    assert status == 0, text
