"""Recorded figures of other libraries, shown beside ours where the sizes are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.case import Case
from weft.errors import InvalidArgument

# The records lie in the repository, not in the wheel; `--recorded` names another.
RECORDS = Path(__file__).parents[2] / "benchmarks" / "peers-8xH200.json"
RECORDED, RECKONED, PUBLISHED, THIS_RUN = "recorded", "reckoned", "published", "this run"


@dataclass(frozen=True, slots=True)
class Peer:
    """One library's times in us by tokens per rank, and where they were taken.

    source: THIS_RUN, the one that shows them (`weft.bench.baselines`); RECORDED earlier with weft's
    method; RECKONED from recorded parts, where the whole was not timed; PUBLISHED by others.
    gpus: of published figures, how many GPUs they are of.
    fp8_back: its rows come back as FP8.
    """

    library: str
    us: Mapping[int, float]
    machine: str
    date: str
    source: str = RECORDED
    gpus: int | None = None
    fp8_back: bool = False

    @property
    def measured(self) -> bool:
        """In the run that shows it."""
        return self.source == THIS_RUN

    @property
    def label(self) -> str:
        """Its name in tables and legends: what it is, and how its figures were come by."""
        of = "" if self.gpus is None else f", {self.gpus} GPUs"
        return f"{self.library}, {self.source}{of}"


def matching(case: Case, path: Path | None = None) -> list[Peer]:
    """Return the records that were taken with the sizes and routing of this case.

    Records whose rows come back as FP8 are shown only where ours do.

    path: the file of records; default `RECORDS`, and none if that is not there.

    Raises InvalidArgument for a file that cannot be read or is none of ours.
    """
    asked = case.records()
    if asked is None or (path is None and not RECORDS.is_file()):
        return []
    section, times, wanted = asked
    try:
        data: dict[str, Any] = json.loads((path or RECORDS).read_text())
        found = [
            Peer(
                library=record["library"],
                us={int(tokens): float(us) for tokens, us in record[times].items()},
                machine=record.get("machine", data["machine"]),
                date=record.get("date", data["date"]),
                source=record.get("source", RECORDED),
                gpus=record.get("gpus"),
                fp8_back=record.get("home") == "fp8",
            )
            for record in data[section]
            if all(record[name] == value for name, value in wanted.items())
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{path or RECORDS} is no file of peer records: {error!r}; it needs machine, date and "
            f"{section} with library, {times}, {', '.join(wanted)}"
        ) from error
    return [peer for peer in found if case.fp8_back or not peer.fp8_back]
