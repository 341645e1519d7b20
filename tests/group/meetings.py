# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet as threads of one process, and strangers that connect."""

import time
from concurrent.futures import ThreadPoolExecutor

from weft.errors import RendezvousFailed
from weft.group.meeting import ABI, meet
from weft.group.wire import encode, receive

LONG = 1000.0  # a deadline that no test waits for
SOON = 300.0  # much less than that, and enough for a busy machine


def gather(meeting, rank, size=3, timeout=5.0, device="cpu"):
    """Meet as one rank, exchange a value and leave; return the values, or the error."""
    try:
        control = meet(meeting, rank=rank, size=size, device=device, timeout=timeout)
    except RendezvousFailed as error:
        return error
    try:
        return control.gather("test", rank, timeout)
    finally:
        control.close()


def all_ranks(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def connect(meeting):
    until = time.monotonic() + 600
    while True:
        try:
            stranger = meeting.connect()
            break
        except BlockingIOError:
            assert time.monotonic() < until
            time.sleep(0.002)
    stranger.setblocking(True)
    return stranger


def make_hello(meeting, **changes):
    hello = {
        "abi": ABI, "rank": 1, "size": 3, "device": "cpu", "nonce": meeting.nonce.hex()
    }  # fmt: skip
    return encode({**hello, **changes})


def answer(connection):
    until = time.monotonic() + 600
    while (message := receive(connection)) is None:
        assert time.monotonic() < until
        time.sleep(0.002)
    return message.body
