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
# What the model says of shapes that the field knows, so that every axiom of the checker is needed.
CLASSIC = """
CoRR forbidden
two strong reads of one location
x=0;
P0@cta 0,gpu 0: st.relaxed.sys x, 1
P1@cta 0,gpu 1: ld.relaxed.sys r1, x; ld.relaxed.sys r2, x
exists (P1:r1 == 1 /\\ P1:r2 == 0)

CoRR-weak allowed
two weak reads that race
x=0;
P0@cta 0,gpu 0: st.weak x, 1
P1@cta 0,gpu 1: ld.weak r1, x; ld.weak r2, x
exists (P1:r1 == 1 /\\ P1:r2 == 0)

CoRR-scopes allowed
scopes that leave each other out are as good as none
x=0;
P0@cta 0,gpu 0: st.relaxed.gpu x, 1
P1@cta 0,gpu 1: ld.relaxed.gpu r1, x; ld.relaxed.gpu r2, x
exists (P1:r1 == 1 /\\ P1:r2 == 0)

CoWR forbidden
a thread sees its own write
x=0;
P0@cta 0,gpu 0: st.weak x, 1; ld.weak r1, x
exists (P0:r1 == 0)

CoRW forbidden
a thread does not read what it writes later
x=0;
P0@cta 0,gpu 0: ld.weak r1, x; st.weak x, 1
exists (P0:r1 == 1)

CoWW forbidden
writes of one thread have one order for all
x=0;
P0@cta 0,gpu 0: st.relaxed.sys x, 1; st.relaxed.sys x, 2
P1@cta 0,gpu 1: ld.relaxed.sys r1, x; ld.relaxed.sys r2, x
exists (P1:r1 == 2 /\\ P1:r2 == 1)

two-orders forbidden
morally strong writes have one order for all readers
x=0;
P0@cta 0,gpu 0: st.relaxed.sys x, 1
P1@cta 0,gpu 1: st.relaxed.sys x, 2
P2@cta 0,gpu 2: ld.relaxed.sys r1, x; ld.relaxed.sys r2, x
P3@cta 0,gpu 3: ld.relaxed.sys r1, x; ld.relaxed.sys r2, x
exists (P2:r1 == 1 /\\ P2:r2 == 2 /\\ P3:r1 == 2 /\\ P3:r2 == 1)

SB allowed
stores are buffered
x=0; y=0;
P0@cta 0,gpu 0: st.relaxed.sys x, 1; ld.relaxed.sys r1, y
P1@cta 0,gpu 1: st.relaxed.sys y, 1; ld.relaxed.sys r1, x
exists (P0:r1 == 0 /\\ P1:r1 == 0)

LB allowed
loads pass later stores
x=0; y=0;
P0@cta 0,gpu 0: ld.relaxed.sys r1, x; st.relaxed.sys y, 1
P1@cta 0,gpu 1: ld.relaxed.sys r1, y; st.relaxed.sys x, 1
exists (P0:r1 == 1 /\\ P1:r1 == 1)

IRIW allowed
acquires do not agree on the order of two releases
x=0; y=0;
P0@cta 0,gpu 0: st.release.sys x, 1
P1@cta 0,gpu 1: st.release.sys y, 1
P2@cta 0,gpu 2: ld.acquire.sys r1, x; ld.acquire.sys r2, y
P3@cta 0,gpu 3: ld.acquire.sys r1, y; ld.acquire.sys r2, x
exists (P2:r1 == 1 /\\ P2:r2 == 0 /\\ P3:r1 == 1 /\\ P3:r2 == 0)

adds forbidden
adds of scopes with each other in them are atomic
x=0;
P0@cta 0,gpu 0: atom.relaxed.gpu.add r1, x, 1
P1@cta 1,gpu 0: atom.relaxed.gpu.add r1, x, 1
exists (P0:r1 == 0 /\\ P1:r1 == 0)

adds-scopes allowed
adds of other scopes are not
x=0;
P0@cta 0,gpu 0: atom.relaxed.gpu.add r1, x, 1
P1@cta 0,gpu 1: atom.relaxed.gpu.add r1, x, 1
exists (P0:r1 == 0 /\\ P1:r1 == 0)

adds-alone forbidden
two adds cannot each have read the other
x=0;
P0@cta 0,gpu 0: atom.relaxed.sys.add r1, x, 1
P1@cta 0,gpu 1: atom.relaxed.sys.add r1, x, 1
exists (P0:r1 == 1 /\\ P1:r1 == 1)

barrier-of-another-CTA allowed
a barrier orders the threads of its own CTA
x=0;
P0@cta 0,gpu 0: st.weak x, 1; bar.cta.sync 0
P1@cta 1,gpu 0: bar.cta.sync 0; ld.weak r1, x
exists (P1:r1 == 0)

WRC-of-one-location forbidden
what a thread has observed is older than what it releases
x=0; f=0;
P0@cta 0,gpu 0: st.relaxed.sys x, 1
P1@cta 0,gpu 1: ld.relaxed.sys r1, x; st.release.sys f, 1
P2@cta 0,gpu 2: ld.acquire.sys r1, f; ld.weak r2, x
exists (P1:r1 == 1 /\\ P2:r1 == 1 /\\ P2:r2 == 0)

release-and-a-later-write forbidden
a strong write behind a release of its location carries it on
x=0; f=0;
P0@cta 0,gpu 0: st.weak x, 1; st.release.sys f, 1; st.relaxed.sys f, 2
P1@cta 0,gpu 1: ld.acquire.sys r1, f; ld.weak r2, x
exists (P1:r1 == 2 /\\ P1:r2 == 0)

read-and-a-later-acquire forbidden
what a strong read has seen, an acquire of its location behind it acquires
x=0; f=0;
P0@cta 0,gpu 0: st.weak x, 1; st.release.sys f, 1
P1@cta 0,gpu 1: ld.relaxed.sys r1, f; st.relaxed.sys f, 2
P2@cta 0,gpu 2: ld.relaxed.sys r1, f; ld.acquire.sys r2, f; ld.weak r3, x
exists (P1:r1 == 1 /\\ P2:r1 == 1 /\\ P2:r2 == 2 /\\ P2:r3 == 0)

race allowed
weak writes that race have no order, and both have come
x=0; f=0; g=0;
P0@cta 0,gpu 0: st.weak x, 1; st.release.sys f, 1
P1@cta 0,gpu 1: st.weak x, 2; st.release.sys g, 1
P2@cta 0,gpu 2: ld.acquire.sys r1, f; ld.acquire.sys r2, g; ld.weak r3, x; ld.weak r4, x
exists (P2:r1 == 1 /\\ P2:r2 == 1 /\\ P2:r3 == 1 /\\ P2:r4 == 2)

own-write-through-a-proxy allowed
a thread may miss what it wrote through another proxy
x=0; s@surface aliases x;
P0@cta 0,gpu 0: sust.weak s, 1; ld.weak r1, x
exists (P0:r1 == 0)

own-write-behind-a-proxy-fence forbidden
unless a proxy fence is between
x=0; s@surface aliases x;
P0@cta 0,gpu 0: sust.weak s, 1; fence.proxy.surface; ld.weak r1, x
exists (P0:r1 == 0)
"""
KNOWN = {test.name: test for test in map(Litmus.parse, CLASSIC.strip().split("\n\n"))}


def test_litmus_files_are_generated(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PTX / "gen.py"), str(tmp_path)], check=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in PTX.glob("*.litmus")}
    kept["expect.tsv"] = (PTX / "expect.tsv").read_text()
    assert written == kept


@pytest.mark.parametrize("name", LITMUS)
def test_the_model_gives_the_expected_verdict(name: str) -> None:
    assert verdict(LITMUS[name]) == LITMUS[name].expect


@pytest.mark.parametrize("name", KNOWN)
def test_the_checker_agrees_on_shapes_that_the_field_knows(name: str) -> None:
    assert verdict(KNOWN[name]) == KNOWN[name].expect


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
