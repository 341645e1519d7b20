"""`weft demo`: a trained mixture of experts on several ranks, heard, counted and compared."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.bench.routing import token_rows
from weft.cli.eval import Plan, Row, check_packages, rows_of
from weft.cli.eval_job import Answers, Run
from weft.cli.options import chosen_device
from weft.errors import InvalidArgument
from weft.memory import launch

CHECKPOINT = Path(__file__).parents[2] / "models" / "arithmetic" / "checkpoint"
RANKS = (2, 4)  # that can share the checkpoint's heads and experts
QUESTIONS = 200
# Each rank answers its own part of the questions, as replicas in a server do; all_reduce cannot.
WEFT, OTHERS = Run("weft", own_batches=True), (Run("all_reduce"), Run("all_to_all", True))
ORDER = (Run(None), *OTHERS, WEFT)  # of the table

Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole demo.

    rows: int64 `[ranks, ranks]`, token rows from rank i to rank j while each rank answered one
    question.  tokens: each rank's own rows then, of all layers.  row_bytes: of one row.
    table: one row for each of ORDER.
    """

    device: str
    rows: torch.Tensor
    tokens: tuple[int, ...]
    row_bytes: int
    table: list[Row]

    @property
    def right(self) -> bool:
        """Every text is the same, whoever carried the tokens."""
        return all(row.equal == row.questions for row in self.table)


def device_of(device: str) -> str:
    """As chosen_device, but auto takes GPUs only where there are several."""
    alone = device == "auto" and torch.cuda.device_count() < min(RANKS)
    return "cpu" if alone else chosen_device(device)


def plan_of(ranks: int, device: str, checkpoint: Path | None) -> Plan:
    """The demo's questions to its checkpoint, all in one batch. ranks: 0 for 4, or fewer GPUs.

    Raises InvalidArgument where the checkpoint, GPUs or packages are missing.
    """
    check_packages()
    if checkpoint is None and not CHECKPOINT.is_dir():
        raise InvalidArgument(
            f"the demo's checkpoint lies in weft's repository, not in the package, and {CHECKPOINT}"
            " does not exist: run `make demo` there, or name a folder with --checkpoint"
        )
    most = torch.cuda.device_count() if device == "cuda" else max(RANKS)
    fits = [each for each in RANKS if each <= most]
    if (ranks or max(fits, default=0)) not in fits:
        allowed = " or ".join(map(str, RANKS))
        raise InvalidArgument(
            f"the demo runs on {allowed} ranks, and --ranks is {ranks or 'not given'}; "
            f"--device {device} has room for {most}: choose others, or --device cpu"
        )
    return Plan.of(
        checkpoint or CHECKPOINT,
        ORDER,
        device=device,
        questions=QUESTIONS,
        batch=QUESTIONS,
        ranks=ranks or max(fits),
        dtype="fp32",
        max_new_tokens=48,
    )


def run(plan: Plan, listener: Listener) -> Verdict:
    """Answer aloud, then count. listener: hears what ranks tell, one after another, in a thread."""
    from weft.cli.demo_ranks import Outcome, rank_body
    from weft.cli.eval_ranks import answer_alone

    aloud = [question.prompt for question in plan.asked[: plan.ranks]]
    with _listening(listener) as path:
        outcomes: list[Outcome] = launch(
            rank_body,
            plan.job,
            (WEFT, *OTHERS),
            aloud,
            path,
            ranks=plan.ranks,
            device=plan.device,
            timeout=3600,
        )
    listener({"rank": 0, "loading": None})
    found: dict[Run, list[Answers]] = {Run(None): [answer_alone(plan.job, plan.device)]}
    every = zip(*(outcome.answers for outcome in outcomes), strict=True)
    found.update(zip((WEFT, *OTHERS), map(list, every), strict=True))
    routed = [outcome.routed for outcome in outcomes]
    return Verdict(
        device=plan.device,
        rows=token_rows([torch.tensor(each.ids) for each in routed], routed[0].experts),
        tokens=tuple(len(each.ids) for each in routed),
        row_bytes=routed[0].row_bytes,
        table=rows_of(plan, [(each, found[each]) for each in plan.runs]),
    )


@contextmanager
def _listening(listener: Listener) -> Iterator[Path]:
    """A pipe in the file system, whose lines a thread hands to `listener`."""
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
        path = Path(folder) / "told"
        os.mkfifo(path, 0o600)
        # Open for both: reading must not end when a rank closes, and an empty line ends it here.
        end = os.open(path, os.O_RDWR)

        def listen() -> None:
            with os.fdopen(os.dup(end)) as lines:
                for line in lines:
                    if not line.strip():
                        return
                    listener(json.loads(line))

        thread = threading.Thread(target=listen, name="weft-demo", daemon=True)
        thread.start()
        try:
            yield path
        finally:
            os.write(end, b"\n")
            thread.join()
            os.close(end)
