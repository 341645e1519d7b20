# SPDX-License-Identifier: Apache-2.0
"""A server of the stand-in continues after one of its ranks is killed.

benchmarks/sglang/elastic.py kills ranks of a real server.
"""

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.plugins.sglang.server import enter, leave, replicated, sglang
from tests.plugins.standins import CLOSE, tokens
from weft.errors import SetupError
from weft.launcher.launch import launch
from weft.plugins.sglang import elastic, engine

run = partial(launch, tolerate_deaths=True, timeout=3000.0)


def outlive_rank(group: weft.Group, form: str, way: str, when: str) -> dict[str, Any]:
    """Rank 1 is killed before, in or after a pass; the others continue."""
    os.environ["WEFT_SGLANG_TIMEOUT"] = "600"
    server = replicated(group, form=form, ep_dispatch_algorithm=way)
    scheduler, errors = sglang().Scheduler(), []
    tables = dict(vars(sglang().STATE.places))

    def die(now: str) -> None:
        if (when, number, group.rank) == (now, 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    server.runner.model.blocks[1].register_forward_pre_hook(lambda *_: die("layer"))
    for number in range(6):
        assert scheduler.get_next_batch_to_run(None, None) == "batch"
        count = (number + group.rank) % 4
        die("exchange")
        counts = [row[0] for row in sglang().exchange([count, 7, 0], group.size)]
        die("pass")
        errors.append(server.distance(tokens(count, 10 * number + group.rank), counts, "qwen3"))
        die("after")
    blocks = engine._blocks
    assert blocks is not None
    assert blocks.watch is not None
    assert max(errors) < CLOSE
    for name, table in tables.items():  # graphs hold their addresses
        assert getattr(sglang().STATE.places, name) is table
    result = {
        "active": sglang().ElasticEPStateManager.instance().active_ranks_cpu.tolist(),
        "reported": scheduler.reported,
        "moved": server.runner.eplb_manager.reason,
        "watched": blocks.watch._thread.is_alive(),
    }
    leave()
    return result


@pytest.mark.parametrize(
    ("form", "way", "when"),
    [
        *(("block", "static", when) for when in ("exchange", "pass", "after")),
        ("block", "dynamic", "layer"),
        ("dispatcher", "static", "layer"),
    ],
)
def test_a_server_outlives_a_rank(form: str, way: str, when: str) -> None:
    """The others' tokens are as without a death, also in the interrupted pass."""
    active = [1, 0, 1, 1]
    expected = {"active": active, "reported": [active], "moved": "rank 1 has died", "watched": True}
    result = run(outlive_rank, form, way, when, ranks=4)
    assert result == [expected, None, expected, expected]


@pytest.fixture
def standin() -> Iterator[Any]:
    yield enter()
    leave()


def test_experts_without_a_replica_are_named(standin: Any) -> None:
    """The tables are then unchanged."""
    standin.place(torch.tensor([[0, 1, 2, 3, 0, 1, 2, 2]]), 4, 4, True)
    places = standin.STATE.places
    before = places.logical_to_all_physical_map.clone()
    with pytest.raises(SetupError, match=r"without rank 1, 1 experts have no replica: 3 of layer"):
        elastic.reroute_experts(places, {1}, rank=0)
    assert torch.equal(places.logical_to_all_physical_map, before)


def test_requests_of_a_dead_rank_are_aborted(standin: Any) -> None:
    """Other requests continue, and new ones go to living ranks."""
    standin.STATE.exec = SimpleNamespace(moe=SimpleNamespace(elastic_ep_backend="weft"))
    standin.STATE.parallel.num_dp_ranks = 3
    sent: list[Any] = []
    aborted: list[Any] = []
    manager = SimpleNamespace(rid_to_state={}, _handle_abort_req=aborted.append)
    manager.update_control_communicator_fan_out = lambda count: setattr(manager, "fan_out", count)

    def send(*names: str) -> list[int | None]:
        """Send requests, and return their ranks."""
        requests = [standin.TokenizedGenerateReqInput(rid=name) for name in names]
        for request in requests:
            manager.rid_to_state[request.rid] = SimpleNamespace()
            elastic.route_requests(lambda _, message: sent.append(message), manager, request)
        assert sent[-len(requests) :] == requests
        return [request.routed_dp_rank for request in requests]

    assert send("0", "1", "2", "3", "HEALTH_CHECK 1") == [1, 2, 0, 1, None]
    dead = standin.ActiveRanksOutput(status=[True, True, False])
    elastic.route_requests(lambda _, message: sent.append(message), manager, dead)
    assert sent[-1] is dead
    assert [each.rid for each in aborted] == ["1"]
    reason = aborted[0].finished_reason
    assert reason["status_code"] is HTTPStatus.SERVICE_UNAVAILABLE
    assert "rank 2, which processed this request, has died" in reason["message"]
    assert manager.fan_out == 2
    assert send("4", "5", "6") == [0, 1, 0]
    standin.STATE.exec.moe.elastic_ep_backend = None  # without the flag nothing is chosen
    assert send("7") == [None]


def test_messages_do_not_wait_for_a_dead_rank(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket whose peer has died is not writable."""
    monkeypatch.setitem(sys.modules, "zmq", SimpleNamespace(PUSH=8, POLLOUT=2))  # SGLang has it
    elastic_flags = SimpleNamespace(elastic_ep_backend="weft")
    standin.STATE.exec = SimpleNamespace(moe=elastic_flags)
    for backend, kind, writable, sent in (
        ("weft", 8, True, [1]),
        ("weft", 8, False, []),
        ("weft", 3, False, [1]),  # a REQ socket
        (None, 8, False, [1]),
    ):
        elastic_flags.elastic_ep_backend = backend
        poll = lambda milliseconds, events, writable=writable: 2 * writable  # noqa: E731
        socket = SimpleNamespace(type=kind, poll=poll, sent=[])
        standin.sock_send(socket, 1)
        assert socket.sent == sent
