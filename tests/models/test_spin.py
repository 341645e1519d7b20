# SPDX-License-Identifier: Apache-2.0
"""The Promela models: right variants have no error, wrong ones the named error."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models" / "spin"
SPIN = "Spin Version 6"  # of which the verdicts are
DEADLOCK = r"invalid end state"
STALE_INBOX = r"assertion violated.*\binbox\b"
STALE_OUTBOX = r"assertion violated.*\boutbox\b"
STALE_RETURNED = r"assertion violated.*\breturned\b"
STALE_ROW = r"assertion violated.*\brow\b"
STALE_PLACE = r"assertion violated.*\bplace\b"
STALE_OR_STUCK = rf"{STALE_PLACE}|{DEADLOCK}"
WAITED = r"assertion violated.*\bcredited\b"
STALE_STAGE = r"assertion violated.*\b(readers|rows|scales)\b"
STALE_WORD = r"assertion violated.*\bword\b"
ENDED = r"assertion violated.*\brunning\b"
TWO_SETS = r"assertion violated.*\bdecided\b"
LEFT_OUT = r"assertion violated.*\bended\b"
LOST_ROW = r"assertion violated.*\b(direct|part|whole)\b|invalid end state"

pytestmark = pytest.mark.skipif(
    os.environ.get("WEFT_SKIP_SPIN") == "1", reason="WEFT_SKIP_SPIN=1: the models are not checked"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A model's -D options, and a pattern of the error that it must show, if any."""

    name: str
    options: str = ""
    error: str | None = None
    large: bool = False  # its search takes longer than an optimising compiler


VARIANTS = {
    "alltoall": (
        Variant("two ranks", "N=2 ROUNDS=4"),
        Variant("three ranks", "N=3 ROUNDS=3"),
        Variant("three ranks, sparse routing", "N=3 ROUNDS=3 SPARSE"),
        Variant("a rank without tokens runs the whole protocol", "N=3 ROUNDS=3 IDLE"),
        Variant("a rank without tokens sits out", "N=3 IDLE SKIP", DEADLOCK),
        Variant("combine without its barrier", "NOREADY", STALE_OUTBOX),
        Variant("dispatch waits only for ranks it needs", "SPARSE NEEDED", STALE_OUTBOX),
        # Halves: each phase as two calls, in strict order, with other work in between.
        Variant("halves in strict order, work in between", "N=3 ROUNDS=3 WORK"),
        Variant("received rows read between combine's halves", "READS", STALE_INBOX),
        Variant("output written between combine's halves", "WRITES", STALE_OUTBOX),
        Variant("the next dispatch sent before combine is received", "OVERTAKE", STALE_INBOX),
        Variant("two all-to-alls overlapped two deep", "N=2 ROUNDS=3 SETS=2"),
        Variant("two all-to-alls, three ranks", "N=3 ROUNDS=2 SETS=2"),
        Variant("two all-to-alls called in different orders", "N=2 SETS=2 CROSS", DEADLOCK),
        # Rows that are pushed home, into single buffers.
        Variant("push, two ranks", "N=2 ROUNDS=4 PUSH"),
        Variant("push, three ranks", "N=3 ROUNDS=3 PUSH"),
        Variant("push, three ranks, sparse routing", "N=3 ROUNDS=3 SPARSE PUSH"),
        Variant("push, output written between combine's halves", "N=3 ROUNDS=3 PUSH WRITES"),
        Variant("push, received rows read between combine's halves", "PUSH READS", STALE_INBOX),
        Variant("push, the next dispatch before combine is received", "PUSH OVERTAKE", STALE_INBOX),
        Variant("push, two all-to-alls overlapped two deep", "N=2 ROUNDS=3 SETS=2 PUSH"),
        Variant("push, a rank waits for no dispatch", "PUSH BLIND", STALE_RETURNED),
        Variant("push, dispatch waits only for ranks it needs", "N=3 ROUNDS=3 SPARSE NEEDED PUSH"),
        Variant("the same, pushing whole tiles", "SPARSE NEEDED PUSH DENSE", STALE_RETURNED),
        Variant("push, crash, with a deadline", "N=3 ROUNDS=2 PUSH CRASH DEADLINE"),
        Variant("push, deadlines that are too short", "N=3 ROUNDS=2 PUSH EARLY"),
        # Epochs. With a flag array for each phase no rank can run ahead of a poll, so == would do;
        # with one array for both it deadlocks. >= is right in either, so the code has it.
        Variant("== and two flag arrays", "N=3 ROUNDS=3 EQUAL"),
        Variant("== and one flag array", "N=2 ONE EQUAL", DEADLOCK),
        Variant("== and one flag array, three ranks", "N=3 ROUNDS=2 ONE EQUAL", DEADLOCK),
        Variant(">= and one flag array", "N=3 ROUNDS=2 ONE"),
        Variant("epochs wrap", "N=3 ROUNDS=9 WRAP=8"),
        Variant("epochs wrap, one flag array", "N=2 ROUNDS=7 WRAP=4 ONE"),
        Variant("wrap too small", "N=2 ROUNDS=3 WRAP=2 ONE", DEADLOCK),
        Variant("wrap without serial comparison", "N=2 ROUNDS=5 WRAP=4 PLAIN", STALE_INBOX),
        # Ranks that stop.
        Variant("crash, with a deadline", "N=3 ROUNDS=2 CRASH DEADLINE"),
        Variant("crash, without a deadline", "N=3 ROUNDS=2 CRASH", DEADLOCK),
        Variant("deadlines that are too short", "N=3 ROUNDS=2 EARLY"),
        Variant("crash and deadlines that are too short", "N=3 ROUNDS=2 CRASH EARLY"),
        Variant("abort at every rank", "N=3 ROUNDS=2 ABORT=3"),
        Variant("abort at one rank, with a deadline", "N=3 ROUNDS=2 ABORT=1 DEADLINE"),
        Variant("abort at one rank, without a deadline", "N=3 ROUNDS=2 ABORT=1", DEADLOCK),
        # Generations.
        Variant("flags left by an older generation", "N=3 ROUNDS=2 OLD"),
        Variant("flags left by an older generation, accepted", "OLD NOGEN", STALE_INBOX),
        Variant("a late flag of an older generation", "N=2 ROUNDS=3 LATE EARLY"),
        Variant("a late flag of an older generation, accepted", "LATE EARLY NOGEN", STALE_INBOX),
        Variant("a late flag of an older generation, without a deadline", "LATE", DEADLOCK),
    ),
    "zombie": (
        Variant("zombie, slots stay with their rank"),
        Variant("zombie, slots renumbered", "RENUMBER", STALE_ROW),
        Variant("zombie, renumbered after it is surely dead", "RENUMBER FENCE"),
    ),
    "recovery": (
        Variant("recovery without a rank that died", "ROUNDS=3", large=True),
        Variant("recovery, no meeting before", "NOFIRST", STALE_ROW),
        Variant("recovery, no meeting after", "NOSECOND", DEADLOCK),
        Variant("recovery, flags stay", "KEEP", STALE_ROW),
        Variant("recovery without a mask", "UNMASKED", DEADLOCK),
    ),
    "lowlatency": (
        # Low-latency rows: a place is blank, then a row, then blank again.
        Variant("low latency, two ranks", "N=2 CALLS=6"),
        Variant("low latency, three ranks", "N=3 CALLS=2", large=True),
        Variant("low latency, halves", "N=2 CALLS=6 HALVES"),
        Variant("low latency, halves, three ranks", "N=3 CALLS=3 SPLIT"),
        Variant("low latency, in turn nobody waits for a credit", "CALLS=8 STEADY"),
        Variant("the same, three ranks", "N=3 CALLS=3 STEADY", large=True),
        Variant("in turn, rows stored home by others", "CALLS=6 STEADY HOMES"),
        Variant("before they may be", "CALLS=6 STEADY HOMES BLIND", STALE_PLACE),
        Variant("in turn, in one place", "CALLS=4 STEADY SHARED", WAITED),
        Variant("whole calls in one place", "CALLS=6 SHARED"),
        Variant("low latency, stores without a credit", "EAGER", STALE_PLACE),
        Variant("low latency, credits too early", "HASTY", STALE_PLACE),
        Variant("low latency, a place is not left blank", "KEEP", STALE_PLACE),
        Variant("one place, credits of one kind", "SHARED LAX", STALE_PLACE),
        Variant("halves in one place", "CALLS=6 HALVES SHARED", STALE_OR_STUCK),
        Variant("low latency, calls in another order", "UNEQUAL", DEADLOCK),
    ),
    "combine_flag_in_data": (
        # Combine with flag-in-data: rows that bring their own news, summed beside the pushes.
        Variant("flag-in-data, two ranks", "ROUNDS=3"),
        Variant("flag-in-data, sparse routing", "ROUNDS=4 SPARSE"),
        Variant("flag-in-data, a rank without tokens", "ROUNDS=3 IDLE"),
        Variant("flag-in-data, three ranks", "N=3 ROUNDS=2 SPARSE COARSE", large=True),
        Variant("flag-in-data, crash, with a deadline", "CRASH DEADLINE"),
        Variant("flag-in-data, crash, without a deadline", "CRASH", DEADLOCK),
        Variant("flag-in-data, a taken row stays in its place", "KEEP", STALE_RETURNED),
        Variant("flag-in-data, counted before it has read", "SPARSE EAGER", STALE_INBOX),
        Variant("flag-in-data, nobody waits for ready", "SPARSE DEAF", STALE_INBOX),
        Variant("flag-in-data, rows that nobody is owed", "SPARSE DENSE", STALE_RETURNED),
        Variant("flag-in-data, dispatch does not wait", "BLIND", STALE_INBOX),
    ),
    "allreduce": (
        # The fused all-reduce: slots that are their own flag.
        Variant("all-reduce, two ranks", "N=2 CALLS=5"),
        Variant("all-reduce, three ranks", "N=3 CALLS=4", large=True),
        Variant("all-reduce, one buffer", "N=2 ONE_SIDE", LOST_ROW),
        Variant("all-reduce, one buffer for rows to be summed", "ONE_PART CALLS=3", LOST_ROW),
        Variant("the same, emptied before the sum is told", "ONE_PART FENCED CALLS=4", large=True),
        Variant("all-reduce, slots are not emptied", "N=2 KEEP", LOST_ROW),
        Variant("all-reduce, owners do not wait for all", "BLIND CALLS=3", LOST_ROW),
        Variant("all-reduce, a rank leaves out a call", "ABSENT CALLS=3", f"{DEADLOCK}|violated"),
    ),
    "grouped_gemm": (
        # The ring of stages and the exchange of a cluster of the grouped GEMM.
        Variant("grouped GEMM, two CTAs", large=True),
        Variant("grouped GEMM, two steps at a time", "TILES=1 STEPS=5 TWO"),
        Variant("grouped GEMM, two steps of one stage", "TILES=1 STEPS=2 STAGES=1 TWO", DEADLOCK),
        Variant("grouped GEMM, its exchange alone", "ALONE TILES=5"),
        Variant("grouped GEMM, its exchange alone, two warps", "ALONE TILES=3 WARPS=2", large=True),
        Variant("grouped GEMM, one arrival too few on empty", "FEW", DEADLOCK),
        Variant("grouped GEMM, deaf to its neighbour", "TILES=3 DEAF", STALE_STAGE, large=True),
        Variant("grouped GEMM, scales are not awaited", "BLIND", STALE_STAGE),
        Variant("grouped GEMM, one half is exchanged", "TILES=3 SINGLE", STALE_WORD),
        Variant("grouped GEMM, a word is expected too late", "LATE", DEADLOCK),
        Variant("grouped GEMM, the last arrivals are not awaited", "HASTY", ENDED),
    ),
    "agreement": (
        # Survivors agree on who is gone.
        Variant("agreement, two of three ranks die", large=True),
        Variant("agreement, one of four ranks dies", "N=4 DEATHS=1", large=True),
        Variant("a stopped rank wakes while it is killed, and two die", "SUSPECT=2", large=True),
        Variant("new processes are taken in by all or none", "SWAP", large=True),
        Variant("the same, a stopped rank wakes", "SWAP SUSPECT=2 DEATHS=1", large=True),
        Variant("the same, each decides by itself", "SWAP HASTY DEATHS=1", TWO_SETS),
        Variant("by who has met them", "SWAP ALONE DEATHS=1", DEADLOCK),
        Variant("agreement, a page of one word", "SLOTS=1", STALE_WORD),
        Variant("agreement, a page is not read again after the end", "ONCE", TWO_SETS),
        Variant("agreement, each decides by itself", "HASTY", TWO_SETS),
        Variant("a stopped rank is left out alive", "DEATHS=1 SUSPECT=1 EXPEL", LEFT_OUT),
    ),
}


def run(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} returned {done.returncode}:\n{text}"
    return text


@pytest.fixture(scope="module")
def spin() -> str:
    run([str(ROOT / "tools" / "need_spin.sh")], ROOT)
    # Another program of that name is common (a developer tool for Python), so ask it who it is.
    result = shutil.which("spin")
    assert result is not None
    version = run([result, "-V"], ROOT)
    assert SPIN in version, f"the verdicts are of {SPIN}, this is {version}"
    return result


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        pytest.param(model, each, id=each.name, marks=pytest.mark.slow)
        for model, variants in VARIANTS.items()
        for each in variants
    ],
)
def test_variant(model: str, variant: Variant, spin: str, tmp_path: Path) -> None:
    options = [f"-D{option}" for option in variant.options.split()]
    reported = run([spin, "-a", *options, str(MODELS / f"{model}.pml")], tmp_path)
    assert "rror" not in reported, reported
    effort, table = ("-O2", "-w24") if variant.large else ("-O0", "-w20")
    run(["gcc", effort, "-w", "-DSAFETY", "-o", "pan", "pan.c"], tmp_path)
    report = run(["./pan", "-m200000", table], tmp_path)

    # An incomplete search proves nothing.
    assert "max search depth too small" not in report, report
    assert "out of memory" not in report, report
    errors = re.search(r"errors: (\d+)", report)
    assert errors is not None, report
    reported = next((line for line in report.splitlines() if line.startswith("pan:1:")), "no error")
    if variant.error is None:
        assert errors[1] == "0", reported
    else:
        assert errors[1] != "0", f"wanted '{variant.error}', got no error"
        assert re.search(variant.error, reported), f"wanted '{variant.error}', got '{reported}'"
