"""The PTX litmus tests are what gen.py writes, and each has the verdict that is expected of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PTX = Path(__file__).resolve().parents[2] / "models" / "ptx"
# Written, but not yet put to Dartagnan: run models/ptx/run.sh, then take the name off this list.
NOT_RUN = {
    "A14-the-tail-of-dispatch",
    "G1-tile_bar_atom.release.gpu_ld.acquire.gpu_bar",
    "G2-two-tiles-in-one-cell",
    "G3-tile_relaxed-add",
}


def test_litmus_files_are_generated(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PTX / "gen.py"), str(tmp_path)], check=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in PTX.glob("*.litmus")}
    kept["expect.tsv"] = (PTX / "expect.tsv").read_text()
    assert written == kept


def test_every_test_that_was_run_has_its_expected_verdict() -> None:
    wanted = dict(line.split("\t") for line in (PTX / "expect.tsv").read_text().splitlines())
    verdict_of = {"forbidden": "PASS", "allowed": "FAIL"}
    recorded = {}
    for line in (PTX / "result.txt").read_text().splitlines():
        name, *_, verdict, _seconds, judged = line.split()
        assert judged == ("not-run" if name in NOT_RUN else "ok"), line
        recorded[name] = verdict
    assert recorded == {
        name: "not-run" if name in NOT_RUN else verdict_of[expect]
        for name, expect in wanted.items()
    }
