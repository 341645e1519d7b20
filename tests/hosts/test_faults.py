# SPDX-License-Identifier: Apache-2.0
"""A rank, host or link fails during rounds: every other rank raises in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.hosts.network import Network
from tests.hosts.spanning import campaign, play
from tests.rounds import Round
from weft.cli.namespaces import can_create_namespaces
from weft.errors import GroupError

TIMEOUT = 2.0
SLACK = 4.0  # of a busy machine, beyond the deadline
needs_links = pytest.mark.skipif(
    not can_create_namespaces(), reason="no network namespaces here, and the loopback cannot be cut"
)


def endless(group: weft.Group, folder: Path, last: int) -> dict[str, Any]:
    """Run rounds, each checked to the byte, until one raises or the last one ends."""
    case = Round(tokens=tuple((3 * r + 1) % 9 for r in range(group.size)), add=True)
    mark, at = folder / f"{group.rank}.mark", 0
    with weft.AllToAll(group, timeout=TIMEOUT, **case.sizes(8)) as a2a:
        try:
            for at in range(last):  # noqa: B007
                play(a2a, case.next(seed=at))
                mark.write_text(str(at + 1))
        except GroupError as error:
            when = time.monotonic()
            again = raised_again(a2a, case)
            name = type(error).__name__
            return {"error": name, "text": str(error), "when": when, "again": again}
    return {"error": None, "rounds": at + 1}


def raised_again(a2a: weft.AllToAll, case: Round) -> str:
    """Return the error of a later call, which raises at once."""
    began = time.monotonic()
    try:
        play(a2a, case)
    except GroupError as error:
        assert time.monotonic() - began < TIMEOUT
        return type(error).__name__
    return "nothing"


ENDLESS = f"{__name__}:endless"


def survivors(hosts: int, disturb: str, victim: int, *, lasts: float = 0.0) -> dict[int, Any]:
    """Return every survivor's error, and its delay after the fault; two ranks per host."""
    with Network(hosts) as network:
        job = network.start(2, ENDLESS, 1_000_000)
        job.wait_for(3)
        when = time.monotonic()
        left = set(range(2 * hosts))
        if disturb == "rank":
            job.kill(victim)
            left -= {victim}
        elif disturb == "host":
            job.kill(2 * victim, 2 * victim + 1)
            left -= {2 * victim, 2 * victim + 1}
        else:
            network.cut(victim)
            if lasts:
                time.sleep(lasts)
                network.mend(victim)
        replies = dict(zip(sorted(left), job.results(sorted(left)), strict=True))
    return {rank: each | {"after": each["when"] - when} for rank, each in replies.items()}


def check_all(replies: dict[int, Any], *named: str) -> None:
    """Every rank has a typed error in time; each text contains one of `named`."""
    for rank, each in replies.items():
        assert each["error"] in ("RailFailed", "PeerDied", "PeerLeft", "PeerTimeout"), (rank, each)
        assert each["after"] < TIMEOUT + SLACK, (rank, each)
        assert any(name in each["text"] for name in named), (rank, each)
        assert each["again"] == each["error"], (rank, each)


def test_a_killed_rank_is_named_on_its_host_and_beyond():
    replies = survivors(2, "rank", 2)
    check_all(
        replies, "rank 2", "rank 3 on host 1"
    )  # which left for it, and whose rail rank 1 is on
    assert replies[0]["error"] == "RailFailed"
    assert "rank 2 on host 1 (host-1)" in replies[0]["text"]
    assert replies[3]["error"] == "PeerDied"
    assert all(each["after"] < SLACK for each in replies.values()), "a closed connection is no wait"


@campaign
def test_a_killed_host_is_named_on_all_others():
    replies = survivors(3, "host", 1)
    check_all(replies, "host 1 (host-1)")
    assert any(each["error"] == "RailFailed" for each in replies.values())


@campaign
@needs_links
@pytest.mark.parametrize("lasts", [0.0, TIMEOUT + 1.0], ids=["for good", "beyond the deadline"])
def test_a_cut_link_is_an_error_on_both_sides(lasts):
    replies = survivors(2, "link", 1, lasts=lasts)
    check_all(replies, "host 0 (host-0)", "host 1 (host-1)")
    assert lasts or {each["error"] for each in replies.values()} <= {"RailFailed", "PeerLeft"}


@campaign
@needs_links
def test_a_link_that_stalls_within_the_deadline_is_waited_for():
    with Network(2) as network:
        job = network.start(2, ENDLESS, 400)
        job.wait_for(3)
        network.cut(1)
        time.sleep(0.4)
        network.mend(1)
        assert job.results(range(4)) == [{"error": None, "rounds": 400}] * 4
