# SPDX-License-Identifier: Apache-2.0
"""Each protocol under ThreadSanitizer with ranks as threads, also with faults.

Every run tries a few interleavings; the slow tests try many.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations import RACES
from tests.programs import run_program

TESTS, RACE = Path(__file__).parents[1], Path(__file__).with_name("race.hpp")
A2A, LOW, REDUCE = (
    "alltoall/race.cpp",
    "lowlatency/lowlatency_race.cpp",
    "allreduce/reduce_race.cpp",
)
COUNTED = {A2A: ("rounds", "words"), LOW: ("rounds", "words"), REDUCE: ("calls", "numbers")}
SANITIZED = ("-fsanitize=thread", "-g", "-O1", "-ffp-contract=off")
WRAP = 2**40  # epochs have so many values


def campaign(program: str, *args: object) -> object:
    """Return a case of the slow tests."""
    return pytest.param(program, *args, marks=pytest.mark.slow)


def run(
    program: str, rounds: int, *options: str, first_epoch: int = 0, fault: str | None = None
) -> tuple[int, str]:
    name, mutation = Path(program).stem, RACES[fault] if fault else None
    sources = RACE, TESTS / program
    return run_program(sources, rounds, first_epoch, name=name, options=options, mutation=mutation)


def require_right(found: tuple[int, str], program: str, rounds: int, ranks: int = 4) -> None:
    status, text = found
    assert status == 0, text
    unit, wrong = COUNTED[program]
    assert f"{rounds} {unit} of {ranks} ranks: 0 wrong {wrong}" in text


@pytest.mark.parametrize(
    ("program", "rounds", "ranks", "options"),
    [
        (A2A, 3000, 4, ""),
        *(
            campaign(A2A, 400, ranks, f"-DCOMBINE={combine} -DSPLIT_PHASE={split_phase}")
            for combine in ("pull", "push", "push_fp8", "gemm_push")
            for ranks, split_phase in ((1, 1), (4, 1), (9, 0))
        ),
        (LOW, 600, 4, "-DREDUCE=receiver -DSPLIT_PHASE=1"),
        campaign(LOW, 600, 4, "-DREDUCE=receiver -DSPLIT_PHASE=0"),
        campaign(LOW, 600, 4, "-DREDUCE=sender -DSPLIT_PHASE=1"),
        campaign(LOW, 600, 3, "-DREDUCE=sender -DSPLIT_PHASE=0"),
        campaign(LOW, 600, 1, "-DREDUCE=receiver -DSPLIT_PHASE=1"),
        campaign(LOW, 600, 3, "-DGEMM_PUSH=1"),
        (REDUCE, 1500, 4, ""),
        (REDUCE, 1500, 4, "-DEPILOGUE_AT=receiver"),
        campaign(REDUCE, 1500, 2, ""),
        campaign(REDUCE, 1500, 5, ""),
    ],
)
def test_no_race_with_ranks_as_threads(program, rounds, ranks, options):
    result = run(program, rounds, *SANITIZED, f"-DRANKS={ranks}", *options.split())
    require_right(result, program, rounds, ranks)


@pytest.mark.parametrize(
    ("program", "combine"),
    [(A2A, "pull"), *(campaign(A2A, combine) for combine in ("push", "push_fp8", "gemm_push"))],
)
def test_a_weakened_release_is_reported(program, combine):
    """x86 hides the missing order from the data, but the sanitizer sees it."""
    options = (*SANITIZED, f"-DCOMBINE={combine}")
    status, text = run(program, 300, *options, fault="a release that orders nothing")
    assert status != 0
    assert "ThreadSanitizer: data race" in text


@pytest.mark.parametrize(
    ("program", "rounds", "options", "fault"),
    [
        (LOW, 20_000, ["-DSPLIT_PHASE=0"], "no credits"),
        (LOW, 20_000, ["-DSPLIT_PHASE=1"], "no credits"),
        (REDUCE, 200_000, [], "one buffer instead of two"),
    ],
)
def test_without_credits_or_with_one_buffer_rows_are_lost(program, rounds, options, fault):
    # Rows are lost, so waits end at the deadline.
    status, text = run(program, rounds, "-DDEADLINE_S=1", *options, fault=fault)
    assert status != 0
    assert ": 0 wrong" not in text


# Epochs of 40 bits wrap in the middle of these.
@pytest.mark.parametrize(
    ("program", "rounds", "first_epoch"),
    [
        (A2A, 2_000, WRAP - 1_000),
        (LOW, 2_000, WRAP - 1_000),
        (REDUCE, 1_000, WRAP - 500),
        campaign(A2A, 200_000, WRAP - 100_000),
        campaign(LOW, 100_000, WRAP - 50_000),
        campaign(REDUCE, 50_000, WRAP - 25_000),
    ],
)
def test_many_rounds_and_the_wrap(program, rounds, first_epoch):
    require_right(run(program, rounds, first_epoch=first_epoch), program, rounds)


@pytest.mark.parametrize(
    ("program", "rounds", "options"),
    [campaign(A2A, 2000, ""), campaign(LOW, 1000, "-DSPLIT_PHASE=1"), campaign(REDUCE, 2000, "")],
)
def test_undefined_behaviour_and_bounds(program, rounds, options):
    result = run(program, rounds, "-fsanitize=address,undefined", "-g", *options.split())
    require_right(result, program, rounds)
