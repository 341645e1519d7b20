# SPDX-License-Identifier: Apache-2.0
"""Other processes of the same user, and no others, read a process's waits."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import weft
from tests import patience
from tests.operators import KINDS
from tests.ranks import run_ranks
from weft.cli.top import read_rows
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


@contextmanager
def listening(name: bytes, answer: bytes) -> Iterator[None]:
    """Answer one connection to an abstract address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0" + name)
        listener.listen()

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_processes_with_other_answers_or_names_hide_no_rank() -> None:
    class Failing:
        rank, size = 3, 4

        def waits(self) -> Any:
            raise RuntimeError("no GPU")

    own = f"weft-status-{os.getpid()}-{'0' * 16}".encode()
    process = f"process {os.getpid()}"

    def body(group: weft.Group) -> None:
        group.barrier()
        for answer in (b'{"groups": [{"waits": {"a": 1}}]}', b"[]", b'{"groups": 1}', b"\xff"):
            if group.rank == 0:
                with listening(own, answer), listening(b"x\xff @weft-status- \n", b"{}"):
                    rows, errors = read_rows()
                assert [row.rank for row in rows if row.key[0] == os.getpid()] == [0, 1]
                own_errors = [error for error in errors if process in error]
                assert len(own_errors) == 2, errors
                assert f"{process}, rank 3: RuntimeError: no GPU" in own_errors
            group.barrier()

    failing = Failing()
    status.STATUS_SERVER.add(failing)
    try:
        run_ranks(2, "threads", body)
    finally:
        status.STATUS_SERVER.remove(failing)


def test_a_forked_child_does_not_keep_the_address() -> None:
    own = f"@weft-status-{os.getpid()}-".encode()

    def body(group: weft.Group) -> None:
        assert own in Path("/proc/net/unix").read_bytes()
        child = os.fork()
        if child == 0:
            signal.pause()
        try:
            for other in list(status.STATUS_SERVER._groups):
                status.STATUS_SERVER.remove(other)
            limit = time.monotonic() + patience.SECONDS
            while own in Path("/proc/net/unix").read_bytes():  # until the thread ends
                assert time.monotonic() < limit
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    run_ranks(1, "threads", body)
