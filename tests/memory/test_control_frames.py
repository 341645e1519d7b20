# SPDX-License-Identifier: Apache-2.0
"""Whatever a rank sends, a control message ends with an error in words."""

import contextlib
import json
import os
import socket

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.memory.hostile import BODIES, JSON_VALUES
from tests.memory.meetings import LONG
from weft.errors import RendezvousFailed
from weft.memory.control_plane import ControlPlane

PARTS = st.fixed_dictionaries(
    {},
    optional={
        "era": st.just(0) | JSON_VALUES,
        "op": st.just("test") | st.just("exchange_fds") | JSON_VALUES,
        "n": st.just(0) | JSON_VALUES,
        "value": JSON_VALUES,
        "fail": JSON_VALUES,
        "bye": JSON_VALUES,
    },
)
MESSAGES = BODIES | PARTS.map(lambda body: json.dumps(body).encode())


def plane(rank=1):
    """A rank of two, and the other one's end of their socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control = ControlPlane(rank, 2)
    control.add(1 - rank, 7, ours)
    return control, theirs


@pytest.mark.parametrize("call", ["gather", "exchange_fds"])
def test_no_message_of_a_rank_is_more_than_an_error_in_words(call):
    deep = b'{"era":0,"op":"test","n":0,"value":' + b"[" * 900 + b"]" * 900 + b"}"
    met: set[str] = set()

    @settings(max_examples=200, deadline=None, database=None)
    @given(MESSAGES, st.sampled_from([0, 0, 1]))
    @example(b'{"era":0,"op":"test","n":0,"value":5}', 0)
    @example(b'{"era":0,"op":"exchange_fds","n":0}', 1)
    @example(b'{"era":0,"op":"exchange_fds","n":0}', 0)
    @example(b'{"era":0,"op":"test","n":0,"value":5}', 1)
    @example(deep, 0)
    @example(b'{"era":0,"fail":7}', 0)
    @example(b'{"era":0,"fail":["\\ud800"]}', 0)
    @example(b'{"bye":"\\ud800"}', 1)
    def talk(data, descriptors):
        control, theirs = plane()
        with contextlib.closing(control), contextlib.closing(theirs):
            socket.send_fds(theirs, [data], [theirs.fileno()] * descriptors)
            theirs.shutdown(socket.SHUT_WR)
            try:
                if call == "gather":
                    assert len(control.gather("test", 5, LONG)) == 2
                else:
                    for fd in control.exchange_fds(theirs.fileno(), LONG):
                        assert fd is not None
                        os.close(fd)
                met.add("nothing")
            except RendezvousFailed as error:
                str(error).encode()
                met.add("error")

    before = len(os.listdir("/proc/self/fd"))
    talk()
    assert met == {"nothing", "error"}
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_first_cause_stays_when_a_broken_group_is_aborted() -> None:
    control, theirs = plane()
    theirs.send(b'{"era":0,"fail":"the first cause"}')
    for abort in (False, True):
        if abort:
            control.abort("a later reason")
        with pytest.raises(RendezvousFailed, match="the first cause"):
            control.gather("test", None, LONG)
    control.close()
    theirs.close()


def test_a_peer_that_does_not_read_is_named_at_the_deadline() -> None:
    """Its socket is full: what it sent is there, and this rank's part does not go out."""
    control, theirs = plane()
    ours = control.peers[0]
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b"x" * 1000, socket.MSG_DONTWAIT)
    theirs.send(b'{"era":0,"op":"test","n":0,"value":5}')
    with pytest.raises(RendezvousFailed, match=r"rank 0 \(pid 7\) did not read its part of test"):
        control.gather("test", None, 0.2)
    control.close()
    theirs.close()


@pytest.mark.parametrize("call", [0, 1])
def test_a_failure_of_a_later_call_does_not_undo_this_one(call):
    """All parts have come; the peer gave up waiting for this rank in it, or in the next one."""
    control, theirs = plane()
    with contextlib.closing(control), contextlib.closing(theirs):
        theirs.send(b'{"era":0,"op":"test","n":0,"value":5}')
        theirs.send(b'{"era":0,"n":%d,"fail":"rank 2 is late"}' % call)
        if call == 1:
            assert control.gather("test", 6, 5.0) == [5, 6]
        with pytest.raises(RendezvousFailed, match="rank 2 is late"):
            control.gather("test", 6, 5.0)
