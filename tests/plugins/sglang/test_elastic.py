# SPDX-License-Identifier: Apache-2.0
"""Surviving ranks stay in step, and SGLang routes around the dead ones."""

import functools
import itertools
import random
import threading
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.plugins.sglang.server import RELEASE, Server, enter, launch_cases, leave
from tests.plugins.standins import error_of, install_standin
from weft.errors import PeerDied, RendezvousFailed, SetupError
from weft.plugins.sglang import elastic

PASSES, FATAL = 4, 8  # no rank dies in the last of 16 meetings, because a server does not end


class Dead(BaseException):
    """Ends the thread of a rank."""


class Room:
    """The meeting point of a job's threads.

    deaths: number of a meeting -> (who dies in it, which of the others see its end).
    """

    def __init__(self, ranks: int, deaths: dict[int, tuple[int, set[int]]]) -> None:
        self.living, self.deaths = set(range(ranks)), deaths
        self.changed = threading.Condition()
        self.waiting: dict[int, Any] = {}
        self.meetings, self.broken = 0, False
        self.outcome: dict[int, list[Any] | None] = {}

    def meet(self, rank: int, kind: str, value: Any) -> list[Any] | None:
        """Return all living ranks' values; None for a rank that died in this meeting or before."""
        with self.changed:
            if self.broken and kind != "recover":
                return None
            if kind == "recover":
                kind = f"recover {len(self.living)}"
            self.waiting[rank] = (kind, value)
            self.outcome.pop(rank, None)
            self._settle()
            while rank not in self.outcome:
                assert self.changed.wait(30), (rank, kind, self.waiting)
            if rank not in self.living:
                raise Dead
            return self.outcome[rank]

    def _settle(self) -> None:
        recovering = all(kind.startswith("recover") for kind, _ in self.waiting.values())
        if self.broken and not recovering:  # the others leave what they wait in
            self._end({r for r, (kind, _) in self.waiting.items() if kind[:7] != "recover"}, None)
            return
        if set(self.waiting) != self.living:
            return
        kinds = {kind for kind, _ in self.waiting.values()}
        assert len(kinds) == 1, f"ranks are at different places: {self.waiting}"
        values = [self.waiting[r][1] if r in self.waiting else None for r in range(4)]
        self.meetings += 1
        victim, seeing = self.deaths.pop(self.meetings, (None, set()))
        self.broken = victim in self.living
        if victim in self.living:
            self.living.discard(victim)
            self._end({victim} | (self.living - seeing), None)
            self._end(self.living & seeing, values)
        else:
            self._end(set(self.living), values)

    def _end(self, ranks: set[int], values: list[Any] | None) -> None:
        for rank in ranks:
            self.waiting.pop(rank, None)
            self.outcome[rank] = values
        self.changed.notify_all()


class Member:
    """A rank's view of the room, with the used methods of weft.Group."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, 4

    def all_gather(
        self, value: Any, kind: str = "message", lost: type[Exception] = RendezvousFailed
    ) -> list[Any]:
        values = self.room.meet(self.rank, kind, value)
        if values is None:
            raise lost("a rank died")
        return values

    def barrier(self) -> None:
        self.all_gather(None, "barrier")

    def recover(self, *, timeout: float) -> Any:
        while (values := self.room.meet(self.rank, "recover", True)) is None:
            pass
        living = tuple(rank for rank in range(4) if values[rank])
        dead = tuple(rank for rank in range(4) if not values[rank])
        return SimpleNamespace(dead=dead, living=living, seconds=0.0)


def check_room(deaths: dict[int, tuple[int, set[int]]]) -> int:
    """Run exchanges and passes of four ranks; return how often they met.

    Survivors must have the same results, of the same pass.
    """
    room, result = Room(4, dict(deaths)), {}
    failed: list[BaseException] = []

    def body(rank: int) -> None:
        group = Member(room, rank)
        survivors = elastic.Survivors(group, lambda dead: None)  # type: ignore[arg-type]
        results: list[Any] = []

        def step(number: int) -> list[Any]:
            layers = (2 * number, 2 * number + 1)
            return [group.all_gather((number, rank), f"layer {n}", PeerDied) for n in layers]

        try:
            for number in range(PASSES):
                rows = survivors.exchange([number, rank])
                results.append((rows, survivors.run(functools.partial(step, number))))
            result[rank] = results
        except Dead:
            pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not failed, (deaths, failed)
    assert set(result) == room.living
    first = next(iter(result.values()))
    assert all(each == first for each in result.values()), deaths
    for number, (rows, layers) in enumerate(first):
        for values in (rows, *layers):
            assert [each for each in values if each is not None and list(each)[0] != number] == []
            assert all(values[rank] is not None for rank in room.living)
    return room.meetings


def test_every_death_leaves_the_others_in_step() -> None:
    """A rank dies in each meeting, and any part of the others sees the meeting end."""
    meetings = check_room({})
    assert meetings == 4 * PASSES
    for number, victim in itertools.product(range(1, FATAL + 1), (0, 3)):
        others = [rank for rank in range(4) if rank != victim]
        for count in range(4):
            for seeing in itertools.combinations(others, count):
                assert check_room({number: (victim, set(seeing))}) > meetings


def test_a_second_death_also_in_the_recovery_of_the_first() -> None:
    draw = random.Random(5)
    for _ in range(60):
        victims = draw.sample(range(4), 2)
        first = draw.randint(1, FATAL)
        numbers = (first, first + draw.randint(1, 4))
        deaths = {
            number: (victim, {rank for rank in range(4) if draw.random() < 0.5 and rank != victim})
            for number, victim in zip(numbers, victims, strict=True)
        }
        check_room(deaths)


def test_an_error_without_a_death_is_raised() -> None:
    """No rank is dead, so a repeated call would fail again."""
    group: Any = Member(Room(4, {}), 0)
    group.room.broken = True
    group.recover = lambda *, timeout: SimpleNamespace(dead=(), living=(0, 1, 2, 3), seconds=0.0)
    survivors = elastic.Survivors(group, lambda dead: None)
    with pytest.raises(RendezvousFailed, match="a rank died"):
        survivors.exchange(1)


@pytest.fixture
def sglang() -> Iterator[Any]:
    yield enter()
    leave()


def placed(sglang: Any, row: list[int], *, static: bool = True) -> Any:
    sglang.place(torch.tensor([row, row[::-1]]), 4, 4, static)
    return sglang.STATE.places


@pytest.mark.parametrize("static", [True, False])
def test_tokens_go_to_living_replicas(sglang: Any, static: bool) -> None:
    """Tables change in place, and a rank prefers its own replica."""
    places = placed(sglang, [0, 1, 2, 3, 0, 1, 2, 3], static=static)
    tables = [places.logical_to_all_physical_map, places.logical_to_all_physical_map_cpu]
    elastic.reroute_experts(places, {2}, rank=0)
    assert places.logical_to_all_physical_map is tables[0]
    for table in tables:  # rank 2 had other replicas of 0 and 1; of 3 and 2 in layer 1
        assert table[0, :, :2].tolist() == [[0, -1], [1, -1], [2, 6], [3, 7]]
        assert table[1, :, :2].tolist() == [[3, 7], [2, 6], [1, -1], [0, -1]]
        assert (table[..., 2:] == -1).all()
    valid = [[1, 1, 2, 2], [2, 2, 1, 1]]
    assert places.logical_to_all_physical_map_num_valid.tolist() == valid
    single = places.logical_to_rank_dispatch_physical_map
    assert (single is not None) is static
    if static:
        assert single.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    elastic.reroute_experts(places, {2, 1}, rank=3)
    rows = [[0, -1], [1, -1], [6, -1], [7, -1]]
    assert places.logical_to_all_physical_map[0, :, :2].tolist() == rows


def test_ranks_without_a_replica_share_those_of_others(sglang: Any) -> None:
    """Ranks 1 and 3 have no expert 0: with replicas on 0 and 2, not all of them may take one."""
    chosen = []
    for rank in range(4):
        places = placed(sglang, [0, 1, 2, 3, 0, 1, 2, 3])
        elastic.reroute_experts(places, set(), rank=rank)
        chosen.append(places.logical_to_rank_dispatch_physical_map[0].tolist())
    assert chosen == [[0, 1, 2, 3], [4, 5, 2, 3], [4, 5, 2, 3], [4, 5, 6, 7]]
    places = placed(sglang, [0, 0, 0, 1, 2, 3, 1, 2])  # three replicas on ranks 0 and 1
    elastic.reroute_experts(places, set(), rank=3)
    assert places.logical_to_rank_dispatch_physical_map[0, 0] == 0


def test_a_repeated_pass_gets_the_unchanged_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, seen = SimpleNamespace(rows=3), []

    def run() -> str:
        seen.append(dict(vars(batch)))
        batch.rows, batch.padded = 4, True
        return "done"

    twice = SimpleNamespace(
        group=SimpleNamespace(device=torch.device("cpu")), run=lambda step: (step(), step())[1]
    )
    monkeypatch.setattr(elastic, "_survivors", twice)
    assert elastic.run_forward(run, lambda: None, batch) == "done"
    assert seen == [{"rows": 3}, {"rows": 3}]


def test_experts_without_a_replica_are_named(sglang: Any) -> None:
    places = placed(sglang, [0, 1, 2, 3, 0, 1, 2, 2])
    before = places.logical_to_all_physical_map.clone()
    with pytest.raises(SetupError, match=r"without rank 1, 1 experts have no replica: 3 of lay"):
        elastic.reroute_experts(places, {1}, rank=0)
    assert torch.equal(places.logical_to_all_physical_map, before)
    assert elastic.find_experts_without_replica(places, {1}) == [(0, 3)]
    assert elastic.find_experts_without_replica(places, {2}) == [(1, 3)]


def test_requests_of_a_dead_rank_are_aborted(sglang: Any) -> None:
    """Other requests continue, and new ones go to living ranks."""
    sglang.STATE.exec = SimpleNamespace(moe=SimpleNamespace(elastic_ep_backend="weft"))
    sglang.STATE.parallel.num_dp_ranks = 3
    request, sent = sglang.TokenizedGenerateReqInput, []
    aborted: list[Any] = []
    manager = SimpleNamespace(rid_to_state={}, fan_out=0, _handle_abort_req=aborted.append)
    manager.update_control_communicator_fan_out = lambda count: setattr(manager, "fan_out", count)

    def send(*objects: Any) -> None:
        for each in objects:
            manager.rid_to_state[getattr(each, "rid", None)] = SimpleNamespace()
            elastic.route_requests(lambda _, each: sent.append(each), manager, each)

    asked = [request(rid=str(number)) for number in range(4)]
    named = sglang.TokenizedEmbeddingReqInput(rid="named", routed_dp_rank=2)
    health = request(rid="HEALTH_CHECK 1")
    send(*asked, named, health)
    ranks = [each.routed_dp_rank for each in (*asked, named, health)]
    assert ranks == [1, 2, 0, 1, 2, None]
    dead = sglang.ActiveRanksOutput(status=[True, True, False])
    send(dead, dead)  # every survivor reports, after every batch
    assert [each.rid for each in aborted] == ["1", "named"]
    reason = aborted[0].finished_reason
    assert reason["status_code"] is HTTPStatus.SERVICE_UNAVAILABLE
    assert "rank 2, which processed this request, has died" in reason["message"]
    assert manager.fan_out == 2
    more = [request(rid=f"more {number}") for number in range(3)]
    batch = sglang.BatchTokenizedGenerateReqInput([request(rid="b") for _ in "12"])
    send(*more, batch)
    assert [each.routed_dp_rank for each in (*more, *batch)] == [0, 1, 0, 1, 0]
    late = request(rid="late", routed_dp_rank=2)
    with pytest.raises(ValueError, match="routed_dp_rank is 2, but this rank has died"):
        send(late)
    assert late not in sent
    sglang.STATE.exec.moe.elastic_ep_backend = None  # without the flag nothing is chosen
    stock = request(rid="1")
    send(stock)
    assert stock.routed_dp_rank is None


FLAGS: dict[str, Any] = {
    "elastic_ep_backend": "weft",
    "disable_overlap_schedule": True,
    "enable_dp_lm_head": True,
    "moe_dense_tp_size": 1,
    "enable_dp_attention_local_control_broadcast": True,
    "ep_dispatch_algorithm": "static",
}


def replicated(group: weft.Group, **flags: Any) -> Server:
    """Serve a model whose experts have two replicas each, on ranks two apart."""
    kwargs = FLAGS | flags
    static = kwargs["ep_dispatch_algorithm"] == "static"
    rows = (torch.arange(16) % 8).repeat(2, 1)
    install_standin("sglang", RELEASE).place(rows, group.size, 8, static)
    return Server(group, "qwen3", redundant=8, **kwargs)


def unfit(group: weft.Group, flags: dict[str, Any]) -> str:
    return error_of(functools.partial(replicated, group, **flags))


def test_flags_that_prevent_recovery_are_refused(ranks: Any) -> None:
    """One error lists all flags as they are written; other all-to-alls would wait for the dead."""
    wrong = {"disable_overlap_schedule": False, "moe_dense_tp_size": None, "max_ep_size": 8}
    calls = [(unfit, wrong | {"ep_dispatch_algorithm": None}), (unfit, {"backend": "none"})]
    flags, backend = launch_cases(ranks, 2, *calls)
    assert {each.split(": ")[1] for each in flags} == {
        "--elastic-ep-backend weft needs --disable-overlap-schedule, --moe-dense-tp-size 1, no "
        "--max-ep-size, --ep-dispatch-algorithm static or dynamic"
    }
    for error in backend:
        assert "--elastic-ep-backend weft needs --moe-a2a-backend weft" in error
