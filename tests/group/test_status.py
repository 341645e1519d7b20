# SPDX-License-Identifier: Apache-2.0
"""Other processes of the same user, and no others, read a process's waits."""

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.operators import KINDS
from tests.ranks import run_ranks
from weft.group import status


def read_own() -> list[dict[str, Any]]:
    """Return this process's groups as `weft top` reads them."""
    errors: list[str] = []
    return [
        group
        for process in status.read_all(errors.append)
        if process["pid"] == os.getpid()
        for group in process["groups"]
    ]


def test_open_groups_answer_and_closed_ones_do_not() -> None:
    def body(group: weft.Group) -> None:
        with KINDS["oneshot"].open(group) as op:
            op.rounds(3)
            group.barrier()
            if group.rank == 0:
                groups = read_own()
                ranks = {entry["rank"]: entry["waits"] for entry in groups if entry["size"] == 2}
                own = group.waits()
                assert ranks.keys() >= {0, 1}
                assert ranks[0].keys() == own.keys()
                (operator,) = own.keys() - {"control"}
                assert ranks[0][operator] == json.loads(json.dumps(asdict(own[operator])))
            group.barrier()

    run_ranks(2, "threads", body)
    assert not [entry for entry in read_own() if entry["size"] == 2]


def test_another_user_is_not_answered_and_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: weft.Group) -> None:
        assert read_own()
        names = Path("/proc/net/unix").read_text().split()
        (name,) = {name for name in names if name.startswith(f"@weft-status-{os.getpid()}-")}
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(60.0)
            connection.connect("\0" + name[1:])
            assert connection.recv(1) == b""
        assert not read_own()

    run_ranks(1, "threads", body)
