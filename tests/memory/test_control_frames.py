"""Whatever frames a rank sends, a control message ends with an error in words."""

import contextlib
import json
import os
import socket

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.memory.hostile import BODIES, JSON_VALUES, framed
from tests.memory.meetings import LONG
from weft.errors import RendezvousFailed
from weft.memory.control_plane import ControlPlane
from weft.memory.wire import Channel, Kind

FRAMES = st.one_of(
    st.builds(framed, BODIES, st.sampled_from(list(Kind)), st.sampled_from([0, 0, 0, 1])),
    st.builds(
        lambda value, op, n, kind: framed(
            json.dumps({"op": op, "n": n, "value": value}).encode(), kind
        ),
        JSON_VALUES,
        st.just("test") | JSON_VALUES,
        st.just(1) | JSON_VALUES,
        st.sampled_from([Kind.VALUE, Kind.VALUE, Kind.DESCRIPTOR, Kind.FAIL]),
    ),
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["gather", "exchange_fds"])
def test_no_frame_of_a_rank_is_more_than_an_error_in_words(rank, call):
    deep = b'{"op":"test","n":1,"value":' + b"[" * 900 + b"]" * 900 + b"}"

    @settings(max_examples=60, deadline=None, database=None)
    @given(FRAMES)
    @example(framed(b'{"op":"test","n":1,"value":NaN}', Kind.VALUE))
    @example(framed(b'{"op":"test","n":1,"value":1e999}', Kind.VALUE))
    @example(framed(deep, Kind.VALUE))
    @example(framed(b"7", Kind.FAIL))
    @example(framed(b'["\\ud800"]', Kind.FAIL))
    @example(framed(b'"\\ud800"', Kind.BYE))
    def talk(data):
        ours, theirs = socket.socketpair()
        control = ControlPlane(rank, 2, {1 - rank: Channel(ours, limit=1 << 16)}, [7, 8])
        with contextlib.closing(control), contextlib.closing(theirs):
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            try:
                if call == "gather":
                    assert len(control.gather("test", 5, LONG)) == 2
                else:
                    for fd in control.exchange_fds(ours.fileno(), LONG):
                        assert fd is not None
                        os.close(fd)
            except RendezvousFailed as error:
                str(error).encode()

    before = len(os.listdir("/proc/self/fd"))
    talk()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_first_cause_stays_when_a_broken_group_is_aborted() -> None:
    ours, theirs = socket.socketpair()
    control = ControlPlane(1, 2, {0: Channel(ours, limit=4096)}, [1, 2])
    theirs.sendall(framed(b'"the first cause"', Kind.FAIL))
    for abort in (False, True):
        if abort:
            control.abort("a later reason")
        with pytest.raises(RendezvousFailed, match="the first cause"):
            control.gather("test", None, LONG)
    control.close()
    theirs.close()
