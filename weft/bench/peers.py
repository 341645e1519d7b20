"""Recorded figures of other libraries, shown beside ours where the sizes are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.cases import Settings
from weft.errors import InvalidArgument

# The records lie in the repository, not in the wheel; `--recorded` names another.
RECORDS = Path(__file__).parents[2] / "benchmarks" / "peers-8xH200.json"
_MATCH = ("ranks", "hidden", "top_k", "experts", "router", "payload", "dtype")


@dataclass(frozen=True, slots=True)
class Peer:
    """One library's pair times in us by tokens per rank, and where they were taken.

    measured: in the run that shows them, by `weft.bench.rivals`.
    """

    library: str
    pair_us: Mapping[int, float]
    machine: str
    date: str
    measured: bool = False


def matching_peers(settings: Settings, path: Path | None = None) -> list[Peer]:
    """Return the records that were taken with the sizes, router and payload of this run.

    A payload that dispatch quantises to fp8 is like their fp8 payload; nobody's is like mxfp8.

    path: the file of records; default `RECORDS`, and none if that is not there.

    Raises InvalidArgument for a file that cannot be read or is none of ours.
    """
    if path is None and not RECORDS.is_file():
        return []
    asked = settings.rival
    if asked is None:
        return []
    wanted = {name: getattr(asked, name) for name in _MATCH}
    try:
        found: dict[str, Any] = json.loads((path or RECORDS).read_text())
        return [
            Peer(
                library=record["library"],
                pair_us={int(tokens): float(us) for tokens, us in record["pair_us"].items()},
                machine=found["machine"],
                date=found["date"],
            )
            for record in found["records"]
            if all(record[name] == value for name, value in wanted.items())
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{path or RECORDS} is no file of peer records: {error!r}; it needs machine, date and "
            f"records with library, pair_us, {', '.join(_MATCH)}"
        ) from error
