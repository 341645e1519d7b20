# SPDX-License-Identifier: Apache-2.0
"""Ranks that outlive each other: in step whenever one dies, and what SGLang is told of it."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.plugins.sglang.server import STANDIN, Server, enter, find, leave
from weft.errors import PeerDied, RendezvousFailed, SetupError
from weft.plugins.sglang import elastic

PASSES, FATAL = 4, 8  # a server does not end: so no one dies in the last of 16 meetings


class Dead(BaseException):
    """Ends the thread of a rank."""


class Room:
    """Where the threads of a job meet.

    deaths: number of a meeting -> (who dies in it, which of the others see its end).
    """

    def __init__(self, ranks: int, deaths: dict[int, tuple[int, set[int]]]) -> None:
        self.living, self.deaths = set(range(ranks)), deaths
        self.changed = threading.Condition()
        self.here: dict[int, Any] = {}
        self.meetings, self.broken = 0, False
        self.outcome: dict[int, list[Any] | None] = {}

    def meet(self, rank: int, kind: str, value: Any) -> list[Any] | None:
        """What all living ranks brought; None where one died in this meeting or before it."""
        with self.changed:
            if self.broken and kind != "recover":
                return None
            if kind == "recover":
                kind = f"recover {len(self.living)}"
            self.here[rank] = (kind, value)
            self.outcome.pop(rank, None)
            self._settle()
            while rank not in self.outcome:
                assert self.changed.wait(30), (rank, kind, self.here)
            if rank not in self.living:
                raise Dead
            return self.outcome[rank]

    def _settle(self) -> None:
        recovering = all(kind.startswith("recover") for kind, _ in self.here.values())
        if self.broken and not recovering:  # the others leave what they wait in
            self._end({r for r, (kind, _) in self.here.items() if kind[:7] != "recover"}, None)
            return
        if set(self.here) != self.living:
            return
        kinds = {kind for kind, _ in self.here.values()}
        assert len(kinds) == 1, f"ranks are at different places: {self.here}"
        said = [self.here[r][1] if r in self.here else None for r in range(4)]
        self.meetings += 1
        victim, seeing = self.deaths.pop(self.meetings, (None, set()))
        self.broken = False
        if victim in self.living:
            self.living.discard(victim)
            self.broken = True
            self._end({victim} | (self.living - seeing), None)
            self._end(self.living & seeing, said)
        else:
            self._end(set(self.living), said)

    def _end(self, ranks: set[int], said: list[Any] | None) -> None:
        for rank in ranks:
            self.here.pop(rank, None)
            self.outcome[rank] = said
        self.changed.notify_all()


class Member:
    """A rank's place in the room, with the methods of weft.Group that are used."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, 4

    def all_gather(self, value: Any, kind: str = "message") -> list[Any]:
        said = self.room.meet(self.rank, kind, value)
        if said is None:
            raise RendezvousFailed("a rank died")
        return said

    def barrier(self) -> None:
        self.all_gather(None, "barrier")

    def recover(self, *, timeout: float) -> Any:
        while (said := self.room.meet(self.rank, "recover", True)) is None:
            pass
        living = tuple(rank for rank in range(4) if said[rank])
        dead = tuple(rank for rank in range(4) if not said[rank])
        return SimpleNamespace(dead=dead, living=living, seconds=0.0)

    def layer(self, number: int, value: Any) -> list[Any]:
        """A MoE layer's round."""
        said = self.room.meet(self.rank, f"layer {number}", value)
        if said is None:
            raise PeerDied("a rank died")
        return said


def serve_room(deaths: dict[int, tuple[int, set[int]]]) -> tuple[Room, dict[int, list[Any]]]:
    """A few exchanges and passes of four ranks; what each living one had."""
    room, found = Room(4, dict(deaths)), {}
    failed: list[BaseException] = []

    def body(rank: int) -> None:
        group = Member(room, rank)
        survivors = elastic.Survivors(group, lambda dead: None)  # type: ignore[arg-type]
        mine: list[Any] = []

        def step(number: int) -> list[Any]:
            return [group.layer(layer, (number, rank)) for layer in (2 * number, 2 * number + 1)]

        try:
            for number in range(PASSES):
                rows = survivors.exchange([number, rank])
                mine.append((rows, survivors.run(functools.partial(step, number))))
            found[rank] = mine
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
    return room, found


def check_room(deaths: dict[int, tuple[int, set[int]]]) -> int:
    """Survivors have the same, of the same pass; how often they met."""
    room, found = serve_room(deaths)
    assert set(found) == room.living
    first = next(iter(found.values()))
    assert all(each == first for each in found.values()), deaths
    for number, (rows, layers) in enumerate(first):
        for said in (rows, *layers):
            assert [each for each in said if each is not None and list(each)[0] != number] == []
            assert all(said[rank] is not None for rank in room.living)
    return room.meetings


def test_every_death_leaves_the_others_in_step() -> None:
    """In every meeting, seen to its end by every part of the others."""
    meetings = check_room({})
    assert meetings == 4 * PASSES
    for number, victim in itertools.product(range(1, FATAL + 1), (0, 3)):
        others = [rank for rank in range(4) if rank != victim]
        for count in range(4):
            for seeing in itertools.combinations(others, count):
                assert check_room({number: (victim, set(seeing))}) > meetings


def test_a_second_death_also_in_the_recovery_of_the_first() -> None:
    """The meetings in which survivors recover are among those in which the second one dies."""
    draw = random.Random(5)
    for _ in range(150):
        victims = draw.sample(range(4), 2)
        first = draw.randint(1, FATAL)
        numbers = (first, first + draw.randint(1, 4))
        deaths = {
            number: (victim, {rank for rank in range(4) if draw.random() < 0.5 and rank != victim})
            for number, victim in zip(numbers, victims, strict=True)
        }
        check_room(deaths)


def test_an_error_without_a_death_is_raised() -> None:
    """Nobody is gone, so making it again would fail again."""

    class Late(Member):
        def recover(self, *, timeout: float) -> Any:
            return SimpleNamespace(dead=(), living=(0, 1, 2, 3), seconds=0.0)

    room = Room(4, {})
    room.broken = True
    survivors = elastic.Survivors(Late(room, 0), lambda dead: None)  # type: ignore[arg-type]
    with pytest.raises(RendezvousFailed, match="a rank died"):
        survivors.exchange(1)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The stand-in of 0.5.23: `sglang("models.qwen3_moe")` imports a module of it."""
    monkeypatch.syspath_prepend(STANDIN)
    enter("0.5.23")
    yield lambda name: importlib.import_module(f"sglang.srt.{name}")
    leave()


def placed(sglang: Callable[[str], Any], row: list[int], *, static: bool = True) -> Any:
    location = sglang("eplb.expert_location")
    location.place(torch.tensor([row, row[::-1]]), 4, 4, static)
    return location.get_global_expert_location_metadata()


@pytest.mark.parametrize("static", [True, False])
def test_tokens_go_to_living_replicas(sglang: Callable[[str], Any], static: bool) -> None:
    """In place; a rank's own replica first."""
    places = placed(sglang, [0, 1, 2, 3, 0, 1, 2, 3], static=static)
    tables = [places.logical_to_all_physical_map, places.logical_to_all_physical_map_cpu]
    elastic.route_around(places, {2}, rank=0)
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
    elastic.route_around(places, {2, 1}, rank=3)
    assert places.logical_to_all_physical_map[0, :, :2].tolist() == [[0, -1], [1, -1]] + [
        [6, -1],
        [7, -1],
    ]


def test_ranks_without_a_replica_share_those_of_others(
    sglang: Callable[[str], Any],
) -> None:
    """Ranks 1 and 3 have no expert 0: with replicas on 0 and 2, not all of them may take one."""
    chosen = []
    for rank in range(4):
        places = placed(sglang, [0, 1, 2, 3, 0, 1, 2, 3])
        elastic.route_around(places, set(), rank=rank)
        chosen.append(places.logical_to_rank_dispatch_physical_map[0].tolist())
    assert chosen == [[0, 1, 2, 3], [4, 5, 2, 3], [4, 5, 2, 3], [4, 5, 6, 7]]
    places = placed(sglang, [0, 0, 0, 1, 2, 3, 1, 2])  # three replicas on ranks 0 and 1
    elastic.route_around(places, set(), rank=3)
    assert places.logical_to_rank_dispatch_physical_map[0, 0] == 0


def test_a_pass_that_is_made_again_gets_the_batch_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed pass may have padded it, or added attributes that the next one would trust."""
    batch, seen = SimpleNamespace(rows=3), []

    def run() -> str:
        seen.append(dict(vars(batch)))
        batch.rows, batch.padded = 4, True
        return "done"

    class Twice:
        group = SimpleNamespace(device=torch.device("cpu"))

        def run(self, step: Callable[[], Any]) -> Any:
            step()
            return step()

    monkeypatch.setattr(elastic, "_survivors", Twice())
    assert elastic.forward(run, lambda: None, batch) == "done"
    assert seen == [{"rows": 3}, {"rows": 3}]


def test_experts_without_a_replica_are_named(sglang: Callable[[str], Any]) -> None:
    """And nothing is written."""
    places = placed(sglang, [0, 1, 2, 3, 0, 1, 2, 2])
    before = places.logical_to_all_physical_map.clone()
    with pytest.raises(SetupError, match=r"rank 1 gone no replica is left of 1 experts: 3 of lay"):
        elastic.route_around(places, {1}, rank=0)
    assert torch.equal(places.logical_to_all_physical_map, before)
    assert elastic.lacking(places, {1}) == [(0, 3)]
    assert elastic.lacking(places, {2}) == [(1, 3)]


def test_requests_of_a_dead_rank_are_answered_in_words(sglang: Callable[[str], Any]) -> None:
    """The others' go on, and new ones go to living ranks."""
    sglang("runtime_context").STATE.exec = SimpleNamespace(
        moe=SimpleNamespace(elastic_ep_backend="weft")
    )
    sglang("runtime_context").STATE.parallel.num_dp_ranks = 3
    io, manager = sglang("managers.io_struct"), sglang("managers.tokenizer_manager")
    tokenizer = manager.TokenizerManager()
    asked = [io.TokenizedGenerateReqInput(str(number)) for number in range(4)]
    named = io.TokenizedEmbeddingReqInput("named", routed_dp_rank=2)
    health = io.TokenizedGenerateReqInput("HEALTH_CHECK 1")
    tokenizer.ask(*asked, named, health)
    ranks = [each.routed_dp_rank for each in (*asked, named, health)]
    assert ranks == [1, 2, 0, 1, 2, None]
    for _ in range(2):  # every survivor tells, after every batch
        tokenizer._dispatch_to_scheduler(io.ActiveRanksOutput([True, True, False]))
    assert set(tokenizer.answers) == {"1", "named"}
    assert tokenizer.answers["1"]["status_code"] is HTTPStatus.SERVICE_UNAVAILABLE
    assert "rank 2, which served this request, has died" in tokenizer.answers["1"]["message"]
    assert tokenizer.fan_out == 2
    more = [io.TokenizedGenerateReqInput(f"more {number}") for number in range(3)]
    tokenizer.ask(*more)
    batch = io.BatchTokenizedGenerateReqInput([io.TokenizedGenerateReqInput("b") for _ in "12"])
    tokenizer._dispatch_to_scheduler(batch)
    assert [each.routed_dp_rank for each in (*more, *batch)] == [0, 1, 0, 1, 0]
    with pytest.raises(ValueError, match="routed_dp_rank is 2, which has died"):
        tokenizer.ask(io.TokenizedGenerateReqInput("late", routed_dp_rank=2))
    assert "late" not in [getattr(each, "rid", None) for each in tokenizer.sent]


def test_other_backends_route_as_sglang_does(sglang: Callable[[str], Any]) -> None:
    """Without the flag nothing is chosen."""
    sglang("runtime_context").STATE.exec = SimpleNamespace(
        moe=SimpleNamespace(elastic_ep_backend=None)
    )
    tokenizer = sglang("managers.tokenizer_manager").TokenizerManager()
    request = sglang("managers.io_struct").TokenizedGenerateReqInput("1")
    tokenizer.ask(request)
    assert request.routed_dp_rank is None


FLAGS: dict[str, Any] = {
    "elastic_ep_backend": "weft",
    "disable_overlap_schedule": True,
    "enable_dp_lm_head": True,
    "moe_dense_tp_size": 1,
    "enable_dp_attention_local_control_broadcast": True,
    "ep_dispatch_algorithm": "static",
}


def replicated(group: weft.Group, **flags: Any) -> Server:
    """A model whose experts have two replicas each, on ranks two apart."""
    given = FLAGS | flags
    find("0.5.23")
    from sglang.srt.eplb import expert_location

    static = given["ep_dispatch_algorithm"] == "static"
    expert_location.place((torch.arange(16) % 8).repeat(2, 1), group.size, 8, static)
    return Server(group, "qwen3", redundant=8, release="0.5.23", **given)


def unfit(group: weft.Group, wrong: dict[str, Any]) -> str:
    try:
        replicated(group, **wrong)
    except weft.errors.InvalidArgument as error:
        return str(error)
    finally:
        leave()
    return "served"


def test_flags_by_which_no_rank_is_outlived_are_refused(ranks: Any) -> None:
    """All at once, as they have to be written."""
    wrong = {"disable_overlap_schedule": False, "moe_dense_tp_size": None, "max_ep_size": 8}
    for said in ranks(2, "cpu")(unfit, wrong | {"ep_dispatch_algorithm": None}):
        assert said.startswith(
            "--elastic-ep-backend weft needs --disable-overlap-schedule, --moe-dense-tp-size 1, no "
            "--max-ep-size, --ep-dispatch-algorithm static or dynamic: "
        )


def test_ranks_of_another_all_to_all_are_not_outlived(ranks: Any) -> None:
    """Its layers would wait for the dead."""
    for said in ranks(2, "cpu")(unfit, {"flags": ()}):
        assert said.startswith("--elastic-ep-backend weft needs --moe-a2a-backend weft")
