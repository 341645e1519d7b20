# SPDX-License-Identifier: Apache-2.0
"""Every PTX litmus test has its expected verdict, computed here and recorded from Dartagnan."""

import subprocess
import sys
from pathlib import Path

import pytest

from models.ptx.check import ALLOWED, FORBIDDEN, verdict
from models.ptx.gen import Litmus, read

PTX = Path(__file__).resolve().parents[2] / "models" / "ptx"
LITMUS = {test.name: test for test in read()}
# Not yet put to Dartagnan: run models/ptx/run.sh, then take the name off this list.
NOT_RUN = {"A14-the-tail-of-dispatch"}


def test_litmus_files_are_generated(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PTX / "gen.py"), str(tmp_path)], check=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in PTX.glob("*.litmus")}
    kept["expect.tsv"] = (PTX / "expect.tsv").read_text()
    assert written == kept


@pytest.mark.parametrize("name", LITMUS)
def test_the_model_gives_the_expected_verdict(name: str) -> None:
    assert verdict(LITMUS[name]) == LITMUS[name].expect


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        ("fence.sc.sys", "is no instruction that this checker knows"),
        ("ld.relaxed r1, x", "is no instruction that this checker knows"),
        ("st.async.sys x, 1", "is no instruction that this checker knows"),
        ("sust.weak x, 1", "only sust goes through a proxy"),
        ("bar.cta.sync 0; bar.cta.sync 0", "one barrier of a thread"),
    ],
)
def test_unknown_instructions_are_errors(instruction: str, text: str) -> None:
    block = f"odd allowed\nodd\nx=0;\nP0@cta 0,gpu 0: {instruction}\nexists (1 == 1)"
    with pytest.raises(ValueError, match=text):
        verdict(Litmus.parse(block))


def test_the_verdicts_agree_with_dartagnan() -> None:
    verdict_of = {FORBIDDEN: "PASS", ALLOWED: "FAIL"}
    recorded = {}
    for line in (PTX / "result.txt").read_text().splitlines():
        name, *_, reported, _seconds, judged = line.split()
        assert judged == ("not-run" if name in NOT_RUN else "ok"), line
        recorded[name] = reported
    assert recorded == {
        name: "not-run" if name in NOT_RUN else verdict_of[test.expect]
        for name, test in LITMUS.items()
    }
