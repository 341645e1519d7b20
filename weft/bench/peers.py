"""Recorded figures of other libraries, shown beside ours where the sizes are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.allreduce_cases import ReduceSettings
from weft.bench.cases import Settings
from weft.bench.layer_cases import LayerSettings
from weft.errors import InvalidArgument

# The records lie in the repository, not in the wheel; `--recorded` names another.
RECORDS = Path(__file__).parents[2] / "benchmarks" / "peers-8xH200.json"
RECORDED, RECKONED, PUBLISHED, THIS_RUN = "recorded", "reckoned", "published", "this run"
_MATCH = ("ranks", "hidden", "top_k", "experts", "router", "payload", "dtype")


@dataclass(frozen=True, slots=True)
class Peer:
    """One library's times in us by tokens per rank, and where they were taken.

    source: THIS_RUN, the one that shows them, by `weft.bench.rivals`; RECORDED earlier with weft's
    method; RECKONED from recorded parts, where the whole was not timed; PUBLISHED by others.
    gpus: of published figures, how many GPUs they are of.
    fp8_home: its rows come back as FP8.
    """

    library: str
    us: Mapping[int, float]
    machine: str
    date: str
    source: str = RECORDED
    gpus: int | None = None
    fp8_home: bool = False

    @property
    def measured(self) -> bool:
        """In the run that shows it."""
        return self.source == THIS_RUN

    @property
    def label(self) -> str:
        """Its name in tables and legends: what it is, and how its figures were come by."""
        of = "" if self.gpus is None else f", {self.gpus} GPUs"
        return f"{self.library}, {self.source}{of}"


def matching_peers(settings: Settings, path: Path | None = None) -> list[Peer]:
    """Return the records that were taken with the sizes, router and payload of this run.

    A payload that dispatch quantises to fp8 is like their fp8 payload; nobody's is like mxfp8.
    Records whose rows come home as fp8 are shown beside ours that do, not beside others.

    path: the file of records; default `RECORDS`, and none if that is not there.

    Raises InvalidArgument for a file that cannot be read or is none of ours.
    """
    asked = settings.rival
    if asked is None:
        return []
    wanted = {name: getattr(asked, name) for name in _MATCH}
    found = _matching(path, "records", "pair_us", wanted)
    return [peer for peer in found if settings.combine_by == "fp8" or not peer.fp8_home]


def matching_reduces(settings: ReduceSettings, path: Path | None = None) -> list[Peer]:
    """The same for all-reduces: records of the ranks, hidden size, dtype and epilogue of this run.

    What quantises is shown beside their norm, which does less.
    """
    epilogue = "none" if settings.epilogue == "none" else "norm"
    wanted = {
        "ranks": settings.ranks,
        "hidden": settings.hidden,
        "dtype": settings.dtype,
        "epilogue": epilogue,
    }
    return _matching(path, "allreduce", "us", wanted)


def matching_layers(settings: LayerSettings, path: Path | None = None) -> list[Peer]:
    """The same for whole layers: figures that others published, of as many experts on each rank.

    They are of 8 ranks and FP8 experts, and count neither a router nor a shared expert, as far as
    they say. On fewer ranks with as many experts each, an expert gets as many rows.
    """
    config = settings.config
    wanted = {
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "top_k": config.routing.top_k,
        "local_experts": config.routing.num_experts / settings.ranks,
    }
    return _matching(path, "layers", "us", wanted)


def _matching(path: Path | None, section: str, times: str, wanted: dict[str, Any]) -> list[Peer]:
    """The records of a section whose sizes are those wanted."""
    if path is None and not RECORDS.is_file():
        return []
    try:
        found: dict[str, Any] = json.loads((path or RECORDS).read_text())
        return [
            Peer(
                library=record["library"],
                us={int(tokens): float(us) for tokens, us in record[times].items()},
                machine=record.get("machine", found["machine"]),
                date=record.get("date", found["date"]),
                source=record.get("source", RECORDED),
                gpus=record.get("gpus"),
                fp8_home=record.get("home") == "fp8",
            )
            for record in found[section]
            if all(record[name] == value for name, value in wanted.items())
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{path or RECORDS} is no file of peer records: {error!r}; it needs machine, date and "
            f"{section} with library, {times}, {', '.join(wanted)}"
        ) from error
