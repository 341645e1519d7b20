"""One case from start to end: measure, print, write what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from weft.bench import report
from weft.bench.cases import Settings
from weft.bench.moe import run
from weft.bench.peers import matching_peers
from weft.bench.plot import plot
from weft.bench.rivals import beside, measure_rivals
from weft.bench.trace import trace


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write, None for none.  recorded: the file of other libraries' figures to read."""

    json: Path | None = None
    plot: Path | None = None
    trtllm_json: Path | None = None
    recorded: Path | None = None
    trace: Path | None = None

    def of_case(self, name: str) -> Outputs:
        """The same with the case's name before each suffix: `all.json`, `all-kimi-k2.json`."""
        return Outputs(
            json=_named(self.json, name),
            plot=_named(self.plot, name),
            trtllm_json=_named(self.trtllm_json, name),
            recorded=self.recorded,
            trace=_named(self.trace, name),
        )


def _named(path: Path | None, name: str) -> Path | None:
    return path and path.with_name(f"{path.stem}-{name}{path.suffix}")


def run_cases(
    console: Console, plans: Sequence[Settings], outputs: Outputs, *, peers: bool, quiet: bool
) -> str | None:
    """Run the plans one after the other; return what the check found wrong, or None.

    Of several, each writes files of its own. The first that is wrong ends the run.
    """
    for settings in plans:
        several = len(plans) > 1 and settings.case is not None
        chosen = outputs.of_case(str(settings.case)) if several else outputs
        problem = run_case(console, settings, chosen, peers=peers, quiet=quiet)
        if problem is not None:
            return f"{settings.case}: {problem}" if several else problem
    return None


def run_case(
    console: Console, settings: Settings, outputs: Outputs, *, peers: bool, quiet: bool
) -> str | None:
    """Measure one case, and with `peers` the libraries that are installed; print and write."""
    recorded = matching_peers(settings, outputs.recorded)
    found = run(settings, quiet=quiet)
    if found.problem is not None:
        return found.problem
    runs = measure_rivals(settings) if peers else []
    rivals = beside(recorded, runs, str(found.machine["date"])[:10])
    report.print_report(console, found, rivals, runs)
    if outputs.json:
        report.write_json(outputs.json, found, rivals, runs)
    if outputs.trtllm_json:
        report.write_trtllm_json(outputs.trtllm_json, found)
    if outputs.plot:
        plot(outputs.plot, found, rivals)
    whole = replace(settings, halves=False, beside=None)  # a timeline shows whole operations
    return trace(outputs.trace, whole) if outputs.trace else None
