# SPDX-License-Identifier: Apache-2.0
"""Each protocol under ThreadSanitizer with ranks as threads, also with faults.

Every run tries a few interleavings; the slow tests try many.
"""

from pathlib import Path

import pytest

from tests.mutations import RACES
from tests.programs import run_program

TESTS, RACE = Path(__file__).parents[1], Path(__file__).with_name("race.hpp")
A2A, LOW = "alltoall/race.cpp", "lowlatency/lowlatency_race.cpp"
REDUCE = "allreduce/reduce_race.cpp"
COUNTED = {A2A: ("rounds", "words"), LOW: ("rounds", "words"), REDUCE: ("calls", "numbers")}
THREADS = "-fsanitize=thread -g -O1 -ffp-contract=off"
BOUNDS = "-fsanitize=address,undefined -g"
WRAP = 2**40  # epochs have so many values


def campaign(program: str, *args: object) -> object:
    return pytest.param(program, *args, marks=pytest.mark.slow)


def run(program, rounds, options, first_epoch=0, fault=None):
    name, mutation = Path(program).stem, RACES[fault] if fault else None
    sources = RACE, TESTS / program
    return run_program(
        sources, rounds, first_epoch, name=name, options=options.split(), mutation=mutation
    )


@pytest.mark.parametrize(
    ("program", "rounds", "ranks", "options", "first_epoch"),
    [
        (A2A, 3000, 4, THREADS, 0),
        *(
            campaign(
                A2A, 400, ranks, f"{THREADS} -DCOMBINE={combine} -DSPLIT_PHASE={split_phase}", 0
            )
            for combine in ("pull", "push", "push_fp8", "gemm_push")
            for ranks, split_phase in ((1, 1), (4, 1), (9, 0))
        ),
        (LOW, 600, 4, f"{THREADS} -DREDUCE=receiver -DSPLIT_PHASE=1", 0),
        campaign(LOW, 600, 4, f"{THREADS} -DREDUCE=receiver -DSPLIT_PHASE=0", 0),
        campaign(LOW, 600, 4, f"{THREADS} -DREDUCE=sender -DSPLIT_PHASE=1", 0),
        campaign(LOW, 600, 3, f"{THREADS} -DREDUCE=sender -DSPLIT_PHASE=0", 0),
        campaign(LOW, 600, 1, f"{THREADS} -DREDUCE=receiver -DSPLIT_PHASE=1", 0),
        campaign(LOW, 600, 3, f"{THREADS} -DGEMM_PUSH=1", 0),
        (REDUCE, 1500, 4, THREADS, 0),
        (REDUCE, 1500, 4, f"{THREADS} -DEPILOGUE_AT=receiver", 0),
        campaign(REDUCE, 1500, 2, THREADS, 0),
        campaign(REDUCE, 1500, 5, THREADS, 0),
        campaign(A2A, 2000, 4, BOUNDS, 0),
        campaign(LOW, 1000, 4, f"{BOUNDS} -DSPLIT_PHASE=1", 0),
        campaign(REDUCE, 2000, 4, BOUNDS, 0),
        # Epochs of 40 bits wrap in the middle of these.
        (A2A, 2_000, 4, "", WRAP - 1_000),
        (LOW, 2_000, 4, "", WRAP - 1_000),
        (REDUCE, 1_000, 4, "", WRAP - 500),
        campaign(A2A, 200_000, 4, "", WRAP - 100_000),
        campaign(LOW, 100_000, 4, "", WRAP - 50_000),
        campaign(REDUCE, 50_000, 4, "", WRAP - 25_000),
    ],
)
def test_rounds_are_right_and_without_races(program, rounds, ranks, options, first_epoch):
    status, text = run(program, rounds, f"-DRANKS={ranks} {options}", first_epoch)
    assert status == 0, text
    unit, wrong = COUNTED[program]
    assert f"{rounds} {unit} of {ranks} ranks: 0 wrong {wrong}" in text


UNORDERED = "a release that orders nothing"


@pytest.mark.parametrize(
    ("program", "rounds", "options", "fault"),
    [
        # x86 hides the missing order from the data, but the sanitizer sees it.
        (A2A, 300, f"{THREADS} -DCOMBINE=pull", UNORDERED),
        *(
            campaign(A2A, 300, f"{THREADS} -DCOMBINE={combine}", UNORDERED)
            for combine in ("push", "push_fp8", "gemm_push")
        ),
        # Rows are lost, so waits end at the deadline.
        (LOW, 20_000, "-DDEADLINE_S=1 -DSPLIT_PHASE=0", "no credits"),
        (LOW, 20_000, "-DDEADLINE_S=1 -DSPLIT_PHASE=1", "no credits"),
        (REDUCE, 200_000, "-DDEADLINE_S=1", "one buffer instead of two"),
    ],
)
def test_a_fault_is_detected(program, rounds, options, fault):
    status, text = run(program, rounds, options, fault=fault)
    assert status != 0
    assert "ThreadSanitizer: data race" in text if fault == UNORDERED else ": 0 wrong" not in text
