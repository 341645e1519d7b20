# SPDX-License-Identifier: Apache-2.0
"""Ranks, hosts and links fail during rounds: every other rank raises in time."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.baseline import die
from tests.hosts.network import Network
from tests.hosts.spanning import campaign, play
from tests.rounds import Round
from weft.cli.namespaces import Namespaces, can_create_namespaces, run_ip
from weft.errors import GroupError
from weft.launcher.processes import start_fork_server

TIMEOUT = 2.0
SLACK = 60.0  # of a busy machine, beyond the deadline
needs_links = pytest.mark.skipif(
    not can_create_namespaces(), reason="no network namespaces here, and the loopback cannot be cut"
)


def endless(group: weft.Group, folder: Path, last: int) -> dict[str, Any]:
    """Run rounds, each checked to the byte, until one raises or the last one ends."""
    case = Round(tokens=tuple((3 * r + 1) % 9 for r in range(group.size)), add=True)
    mark = folder / f"{group.rank}.mark"
    with case.open(group, 8, timeout=TIMEOUT) as a2a:
        try:
            for at in range(last):
                play(a2a, case.next(seed=at))
                mark.write_text(str(at + 1))
        except GroupError as error:
            when = time.monotonic()
            with pytest.raises(type(error)):  # a later call raises at once
                play(a2a, case)
            assert time.monotonic() - when < SLACK
            return {"error": type(error).__name__, "text": str(error), "when": when}
    return {"error": None, "rounds": last}


ENDLESS = f"{__name__}:endless"


def survivors(hosts: int, disturb: str, *victims: int, lasts: float = 0.0) -> dict[int, Any]:
    """Kill ranks, or cut a host's link for a time; return every survivor's error and its delay."""
    with Network(hosts) as network:
        job = network.start(2, ENDLESS, 1_000_000)
        job.wait_for(3)
        when, left = time.monotonic(), list(range(2 * hosts))
        if disturb == "kill":
            job.kill(*victims)
            left = [rank for rank in left if rank not in victims]
        else:
            network.cut(*victims)
            if lasts:
                time.sleep(lasts)
                network.mend(*victims)
        replies = dict(zip(left, job.results(left), strict=True))
    return {rank: each | {"after": each["when"] - when} for rank, each in replies.items()}


def check_all(replies: dict[int, Any], *named: str) -> None:
    for rank, each in replies.items():
        assert each["error"] in ("RailFailed", "PeerDied", "PeerLeft", "PeerTimeout"), (rank, each)
        assert each["after"] < TIMEOUT + SLACK, (rank, each)
        assert any(name in each["text"] for name in named), (rank, each)


def test_a_killed_rank_is_named_on_its_host_and_beyond():
    replies = survivors(2, "kill", 2)
    # Rank 3 left because of it, and rank 1 is on rank 3's rail.
    check_all(replies, "rank 2", "rank 3 on host 1")
    assert replies[0]["error"] == "RailFailed"
    assert "rank 2 on host 1 (host-1)" in replies[0]["text"]
    assert replies[3]["error"] == "PeerDied"


@campaign
def test_a_killed_host_is_named_on_all_others():
    replies = survivors(3, "kill", 2, 3)
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


def leave_namespaces() -> None:
    Namespaces(1).__enter__()
    die()


@needs_links
def test_namespaces_of_a_killed_process_are_removed_later() -> None:
    killed = start_fork_server().Process(target=leave_namespaces)
    killed.start()
    killed.join()
    left = f"weft-{killed.pid}-"
    assert left in run_ip("netns", "list")
    with Namespaces(2):
        assert left not in run_ip("netns", "list")
        assert f"weft-{os.getpid()}-1" in run_ip("netns", "list")
    assert f"weft-{os.getpid()}-" not in run_ip("netns", "list")
