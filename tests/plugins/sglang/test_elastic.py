# SPDX-License-Identifier: Apache-2.0
"""A server of the stand-in continues after one of its ranks is killed.

benchmarks/sglang/elastic.py kills ranks of a real server.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.baseline import die
from tests.group.test_replacement import fork
from tests.plugins.sglang.server import enter, leave, replicated, sglang
from tests.plugins.standins import CLOSE, tokens
from weft.errors import OutOfOrder, SetupError
from weft.launcher.launch import launch
from weft.plugins.sglang import elastic, engine, healing
from weft.plugins.sglang.weights import check_weights_equal, describe_weights

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
        "reported": [report.status for report in scheduler.reported],
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


HEALED = 3  # passes after the join
ENDS = "ends"  # in place of changed weights


class Rank:
    """A rank that makes passes, and compares the results with one process."""

    def __init__(self, group: Any, **flags: Any) -> None:
        os.environ["WEFT_SGLANG_TIMEOUT"] = "600"
        elastic.MAX_DIGESTS = 7  # so that weights are compared in several messages
        self.group, self.server = group, replicated(group, **flags)
        self.scheduler = sglang().Scheduler()

    @property
    def reports(self) -> list[Any]:
        return list(self.scheduler.reported)

    def is_complete(self) -> bool:
        assert elastic._survivors is not None
        return not elastic._survivors.dead

    def make_pass(self, count: int) -> None:
        rows = sglang().exchange([count, 7, 0], self.group.size)
        self.scheduler.get_next_batch_to_run(None, None)
        x = tokens(count, 10 * count + self.group.rank)
        assert self.server.distance(x, [row[0] for row in rows], "qwen3") < CLOSE


def replace_rank(address: str, rank: int, changed: str) -> None:
    """Load and run passes alone, then join and make passes with the others."""
    if changed == ENDS:
        os._exit(1)
    healing.set_join_address(address)
    place = SimpleNamespace(rank=rank, size=4)
    place.process_group = lambda: healing._create_process_group(rank, 4)
    replacement = Rank(place, ep_join_mode="recover")
    model = replacement.server.runner.model
    alone = replacement.server.step(tokens(3, 1), [3, 0, 0, 0])
    assert alone.isfinite().all()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if changed and name.endswith(changed):
                weights[-1, -1, -1:] += 1.0
    for _ in range(HEALED):
        replacement.make_pass(2)
    assert replacement.is_complete()
    assert [report.status for report in replacement.reports] == [[True] * 4]
    leave()


def heal(group: weft.Group, victim: int, changed: str) -> tuple[list[Any], list[bool]]:
    """Replace a rank that dies; the first replacement may end, or be refused for its weights."""
    rank, hub, failed = Rank(group), 1 if victim == 0 else 0, list[bool]()
    process: Any = None
    rank.make_pass(group.rank)
    if group.rank == victim:
        die()
    while not (rank.reports and all(rank.reports[-1].status)):
        rank.make_pass(group.rank)
        num_meetings = sum(report.rid is not None for report in rank.reports)
        if group.rank == hub and num_meetings > len(failed) + (process is not None):
            if process is not None:
                process.join()
                failed.append(process.exitcode != 0)
            address = rank.reports[-1].rid
            process = fork(replace_rank, address, victim, "" if failed else changed)
        elif process is not None and process.exitcode and changed == ENDS and not failed:
            failed.append(True)
            process = fork(replace_rank, address, victim, "")
        assert process is None or not process.exitcode or (changed and not failed)
    for _ in range(HEALED - 1):
        rank.make_pass(group.rank)
    if process is not None:
        process.join()
        failed.append(process.exitcode != 0)
    reports = [report.status for report in rank.reports]
    leave()
    return reports, failed


@pytest.mark.parametrize(("victim", "changed"), [(3, ""), (0, ""), (2, "w2_weight"), (1, ENDS)])
def test_a_new_process_replaces_a_dead_rank(victim: int, changed: str) -> None:
    """It loads and calls its layers alone. One with other weights is refused.

    If it ends while it loads, another one joins at the same meeting.
    """
    one_is_dead, hub = [rank != victim for rank in range(4)], 1 if victim == 0 else 0
    reports = [one_is_dead] * (2 if changed == "w2_weight" else 1) + [[True] * 4]
    failed = [True, False] if changed else [False]
    results = run(heal, victim, changed, ranks=4)
    for rank, result in enumerate(results):
        expected = None if rank == victim else (reports, failed if rank == hub else [])
        assert result == expected, f"rank {rank}"


def test_weights_of_ranks_are_compared(standin: Any) -> None:
    """Experts by logical id, wherever their replicas are, and all other tensors by name."""

    def describe(rank: int, offset: int, change: str = "") -> dict[str, Any]:
        model, locations = torch.nn.Module(), standin.STATE.places
        model.experts = torch.nn.Module()
        vars(model.experts)["layer_id"] = 0
        for owner, name, size in ((model, "norm", 3), (model, "scale", 0), (model.experts, "w", 2)):
            values = torch.arange(12.0).reshape(4, 3)[offset : offset + 2] if name == "w" else None
            tensor = torch.ones((size,) if size else ()) if values is None else values.bfloat16()
            if name == change:
                tensor += 1
            elif change == f"{name}, flipped":
                tensor = tensor.flip(-1)
            owner.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        return describe_weights(model, [model.experts], locations, rank)

    standin.place(torch.tensor([[0, 1, 2, 3, 0, 1]]), 3, 4, True)
    ranks = [describe(0, 0), describe(1, 2), describe(2, 0)]
    check_weights_equal(ranks)
    for change, text in (
        ("norm", "norm differs between rank 0 and rank 2"),
        ("scale", "scale differs between rank 0 and rank 2"),
        ("w", r"w of expert 0 of layer 0 differs between rank 0 and rank 2 \(-?\d+ and -?\d+\)"),
        ("w, flipped", "w of expert 0 of layer 0 differs between rank 0 and rank 2"),
    ):
        with pytest.raises(SetupError, match=text):
            check_weights_equal([*ranks[:2], describe(2, 0, change)])
    standin.place(torch.tensor([[0, 1, 2, 3, 1, 0]]), 3, 4, True)
    with pytest.raises(SetupError, match="the placement of experts differs"):
        check_weights_equal([*ranks[:2], describe(2, 0)])


class Process:
    """A process of the controller."""

    def __init__(self) -> None:
        self.pid, self.events, self.exitcode = 4711, list[str](), None
        self.kill, self.join = (partial(self.events.append, e) for e in ("kill", "join"))

    def is_alive(self) -> bool:
        return self.exitcode is None


class Controller:
    """The controller's part of healing, with processes of its own."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replacements, self.now = healing.Replacements(), 0.0
        self.processes: list[Any] = [Process() for _ in range(ranks)]
        self.started = list[tuple[int, str]]()
        monkeypatch.setitem(
            sys.modules,
            "sglang.srt.managers.data_parallel_controller",
            SimpleNamespace(mp=SimpleNamespace(Pipe=lambda duplex: (Pipe(), Pipe()))),
        )
        monkeypatch.setattr(self.replacements, "_watch", lambda *args: None)
        monkeypatch.setattr(healing, "time", SimpleNamespace(monotonic=lambda: self.now))
        for rank in range(ranks):
            launch: Any = SimpleNamespace(start=partial(self.start, rank))
            self.replacements.launches[rank] = launch

    def start(self, rank: int, address: str, writer: Any) -> Process:
        self.started.append((rank, address))
        return Process()

    def update(self, active: list[bool], address: str | None) -> None:
        self.replacements.update(self.processes, active, address)

    def end(self, rank: int, address: str) -> None:
        """End the process of a rank, as its watching thread sees it."""
        process = self.processes[rank]
        process.exitcode = 1
        self.replacements.restart(rank, address, self.processes, process)


class Pipe:
    def close(self) -> None:
        pass


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    return Controller(3, monkeypatch)


def test_the_controller_starts_one_process_for_each_dead_rank_and_meeting(
    controller: Controller,
) -> None:
    before, started = list(controller.processes), controller.started
    controller.update([True, True, False], None)  # healing is disabled
    controller.update([True] * 3, "0-a")
    assert (controller.processes, started) == (before, [])
    for _ in range(3):  # each survivor reports, and SGLang reports after each batch
        controller.update([True, True, False], "0-a")
        controller.update([True, True, False], None)
    assert started == [(2, "0-a")]
    assert before[2].events == ["kill", "join"]
    waiting = controller.processes[2]
    controller.update([False, True, False], "1-b")  # rank 2 has not joined yet
    controller.update([True, True, False], "0-a")  # a late report
    assert started[1:] == [(0, "1-b"), (2, "1-b")]
    assert waiting.events == ["kill", "join"]
    assert before[1].events == []


@pytest.mark.parametrize("joins", [False, True])
def test_the_controller_gives_a_rank_up(
    joins: bool, controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    """Its replacements fail to join, or die soon after they have."""
    controller.update([True, True, False], "0-first")
    for attempt in range(healing.MAX_FAILURES + 2):
        controller.now += healing.STABLE_SECONDS / 2
        controller.update([True, True, joins], None)
        controller.now += healing.STABLE_SECONDS / 4
        controller.processes[2].exitcode = 1
        controller.update([True, True, False], f"0-{attempt}")
    assert len(controller.started) == healing.MAX_FAILURES
    assert "3 replacements of rank 2 have failed: the server continues without" in caplog.text
    controller.now += healing.STABLE_SECONDS
    controller.update([True, True, False], "0-later")
    assert (2, "0-later") not in controller.started  # it has not served since


def test_a_rank_that_has_served_long_is_replaced_again(controller: Controller) -> None:
    for attempt in range(2 * healing.MAX_FAILURES):
        controller.update([True, True, False], f"0-{attempt}")
        controller.update([True] * 3, None)
        controller.now += healing.STABLE_SECONDS
    assert len(controller.started) == 2 * healing.MAX_FAILURES


def test_a_replacement_that_fails_to_load_is_started_again(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    """At the same meeting, where others may wait for it."""
    controller.update([True, False, False], "0-a")
    waiting = controller.processes[2]
    for failures in range(1, healing.MAX_FAILURES + 1):
        assert controller.started == [(1, "0-a"), (2, "0-a"), *[(1, "0-a")] * (failures - 1)]
        assert waiting.events == []
        controller.end(1, "0-a")
        assert "process 4711 ended before it could replace rank 1: its log says" in caplog.text
    assert "3 replacements of rank 1 have failed: the server continues without rank 1, 2" in (
        caplog.text
    )
    assert waiting.events == ["kill"]
    controller.end(2, "0-a")
    controller.update([True, False, False], "0-b")
    assert len(controller.started) == healing.MAX_FAILURES + 1


def test_a_replacement_that_does_not_load_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    replacements, context = healing.Replacements(), multiprocessing.get_context("spawn")
    replacements.load_limit = 0.01
    replacements._failures[0] = healing.MAX_FAILURES - 1
    process, (reader, _writer) = context.Process(target=time.sleep, args=(600,)), context.Pipe()
    process.start()
    replacements._joining[0] = process
    replacements._watch(0, "0-a", [process], process, reader)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert f"process {process.pid} has not loaded within 0 s and is killed" in caplog.text
    assert "the server continues without rank 0" in caplog.text


def test_a_failure_to_join_counts_once(controller: Controller) -> None:
    """The end of the process and the survivors' next meeting arrive in either order."""
    controller.update([True, False, True], "0-0")
    for attempt in range(1, healing.MAX_FAILURES):
        failed = controller.processes[1]
        failed.exitcode = 1
        if attempt % 2:
            controller.end(1, f"0-{attempt - 1}")
        controller.update([True, False, True], f"0-{attempt}")
        controller.replacements.restart(1, f"0-{attempt - 1}", controller.processes, failed)
    assert controller.started[-1] == (1, f"0-{healing.MAX_FAILURES - 1}")
    assert controller.processes[1].is_alive()


def test_collectives_of_a_replacement_raise_once_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it starts, SGLang reduces sizes over all ranks and waits for them."""
    monkeypatch.setattr(healing.LoneProcessGroup, "is_sealed", False)
    group, x = healing._create_process_group(2, 4), torch.ones(1)
    assert group.allreduce([x]).wait()
    assert group.barrier().wait()
    with pytest.raises(OutOfOrder, match="SGLang called broadcast"):
        group.broadcast([x])
    healing.LoneProcessGroup.seal()
    for name, collective in (("all_reduce", group.allreduce), ("barrier", group.barrier)):
        with pytest.raises(OutOfOrder, match=f"SGLang called {name} of torch"):
            collective([x])


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
