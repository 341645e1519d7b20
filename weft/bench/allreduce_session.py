"""One all-reduce benchmark from start to end: measure, print, write what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from weft.bench.allreduce import run
from weft.bench.allreduce_cases import ReduceSettings
from weft.bench.allreduce_plot import plot_reduce
from weft.bench.allreduce_report import print_reduce, write_reduce_json
from weft.bench.allreduce_rivals import measure_reduce_rivals
from weft.bench.peers import matching_reduces
from weft.bench.rivals import beside


@dataclass(frozen=True, slots=True)
class ReduceOutputs:
    """Files to write, None for none.  recorded: the file of other libraries' figures to read."""

    json: Path | None = None
    plot: Path | None = None
    recorded: Path | None = None


def run_reduce(
    console: Console, settings: ReduceSettings, outputs: ReduceOutputs, *, peers: bool, quiet: bool
) -> str | None:
    """Measure, and with `peers` the libraries that are installed; print and write.

    Returns what the check found wrong, or None.
    """
    recorded = matching_reduces(settings, outputs.recorded)
    found = run(settings, quiet=quiet)
    if found.problem is not None:
        return found.problem
    runs = measure_reduce_rivals(settings) if peers else []
    rivals = beside(recorded, runs, str(found.machine["date"])[:10])
    print_reduce(console, found, rivals, runs)
    if outputs.json:
        write_reduce_json(outputs.json, found, rivals, runs)
    if outputs.plot:
        plot_reduce(outputs.plot, found, rivals)
    return None
