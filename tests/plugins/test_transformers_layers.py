# SPDX-License-Identifier: Apache-2.0
"""A layer of experts by weft: batches of every size, who may call it, and how it ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import weft
import weft.plugins.transformers as plugin
from tests.plugins.layers import EXPERTS, HIDDEN, MAX_TOKENS, Experts, batch, layer
from weft.errors import InvalidArgument, OutOfOrder, PeerLeft

pytest.importorskip("transformers", minversion="5.23")

HALF_UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
ROWS = (0, 1, 7, 3 * MAX_TOKENS + 5, 2)


def raised(call: Callable[..., Any], *args: Any) -> tuple[str, str]:
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def mapped() -> int:
    """Shares of symmetric memory that are mapped in this process."""
    return Path("/proc/self/maps").read_text().count("weft-share")


def far(got: torch.Tensor, x: torch.Tensor, *routing: torch.Tensor) -> float:
    """How far a result is from one process's, in half units of the largest output."""
    alone = Experts(range(EXPERTS), x.device, x.dtype)
    want = alone(x.float(), *routing)
    assert got.shape == want.shape
    if not want.numel():
        return 0.0
    worst = (got.float() - want).abs().max() / want.abs().max()
    return float(worst / HALF_UNIT[x.dtype])


def sizes(group: weft.Group, replicas: int, dtype: torch.dtype) -> list[float]:
    """Batches from none to more than a round holds; replicas have unequal numbers of rows."""
    called, found = layer(group, replicas=replicas, dtype=dtype), []
    replica = group.rank * replicas // group.size
    like = torch.zeros(0, dtype=dtype, device=group.device)
    for tokens in ROWS:
        given = batch(max(0, tokens - 20 * replica), tokens + replica, like)
        with torch.inference_mode(tokens == 1):
            found.append(far(called(*given), *given))
    plugin.check()
    plugin.close()
    assert mapped() == 0
    return found


def economy(group: weft.Group, replicas: int) -> int:
    """Rows that this rank's experts are given, of two tokens on every rank."""
    called = layer(group, replicas=replicas)
    x, _, weights = batch(2, 1, torch.zeros(0))
    ids = torch.tensor([[0, 1, 2], [3, 2, 1]]) + EXPERTS // 2  # all of them live on rank 1
    module = called.experts_forward.__self__
    called(x, ids, weights)
    plugin.close()
    return int(module.rows)


def misuse(group: weft.Group) -> dict[str, Any]:
    called = layer(group, replicas=2)
    x, ids, weights = batch(4, 1, torch.zeros(0))
    trained = x.clone().requires_grad_()
    said: dict[str, Any] = {"training": raised(called, trained, ids, weights)}
    with torch.no_grad():
        said["served after it"] = far(called(trained, ids, weights), x, ids, weights)
    later = layer(group, replicas=2)  # another model; its second layer is given more than the first
    again = type(called)(
        Experts(range(EXPERTS // 2), group.device, torch.float32),
        later.ep_mesh,
        later.tp_mesh,
        max_tokens=MAX_TOKENS,
        timeout=600.0,
    )
    later(x[:1], ids[:1], weights[:1])
    said["more than the first"] = raised(again, x, ids, weights)
    plugin.close()
    plugin.close()
    said["closed"] = raised(called, x, ids, weights)
    said["mapped"] = mapped()
    return said


class Failing(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room for the experts")


def fail(group: weft.Group, replicas: int) -> tuple[str, str]:
    mine = range(EXPERTS // 2 * group.rank, EXPERTS // 2 * (group.rank + 1))
    kind = Failing if group.rank else Experts
    called = layer(group, replicas=replicas, experts=kind(mine, group.device, torch.float32))
    given = batch(4, 1, torch.zeros(0))
    said = raised(called, *given)
    assert raised(called, *given)[0] == "OutOfOrder"
    return said


def one_after_another(group: weft.Group) -> tuple[int, float, int]:
    """Rank 0 drops the first model, rank 1 still has it when the next one is made."""
    first = layer(group)
    given = batch(4, 1, torch.zeros(0))
    first(*given)
    if group.rank == 0:
        del first
        gc.collect()
    left, second = mapped(), layer(group)
    found = far(second(*given), *given)
    if group.rank:
        del first
    del second
    gc.collect()
    return left, found, mapped()


def compiled(group: weft.Group, replicas: int) -> list[float]:
    """A shared batch is one graph without a break. No choice is left out of what is multiplied."""
    called, whole = layer(group, replicas=replicas), replicas == 1
    traced = torch.compile(called.__call__, fullgraph=whole, backend="aot_eager", dynamic=False)
    found = []
    with torch.no_grad():
        called(*batch(1, 0, torch.zeros(0)))  # makes the all-reduce, which a graph cannot
        for tokens in (5, MAX_TOKENS + 5, 5):
            given = batch(tokens, tokens, torch.zeros(0))
            found.append(far(traced(*given), *given))
    plugin.close()
    return found


def in_turn(group: weft.Group, *calls: tuple[Any, ...]) -> list[Any]:
    """What several bodies return: a rank's imports take longer than all of them."""
    return [body(group, *given) for body, *given in calls]


@pytest.mark.slow
def test_every_batch_is_served_whoever_shares_it(ranks: Any) -> None:
    served = [(sizes, replicas, dtype) for dtype in HALF_UNIT for replicas in (1, 2)]
    calls = [*served, (compiled, 1), (compiled, 2), (economy, 1), (economy, 2)]
    rows = []
    for *found, shared, own in ranks(2, "cpu")(in_turn, *calls):
        for call, each in zip(calls, found, strict=False):
            # A rank's sum and the total are rounded once each, and experts add in another order.
            assert max(each) <= 8, call
        rows.append((shared, own))
    assert rows == [(0, 0), (6, 12)]  # one for each choice of a local expert


def test_refusals_and_ends(ranks: Any) -> None:
    calls = ((misuse,), (one_after_another,), (fail, 1), (fail, 2))
    (first, dropped, *heard), (second, kept, *failed) = ranks(2, "cpu")(in_turn, *calls)
    for said in (first, second):
        check_misuse(said)
    assert (dropped[0], kept[0] > 0) == (0, True)
    for _, far_off, left in (dropped, kept):
        assert far_off <= 8
        assert left == 0
    assert failed == [("MemoryError", "no room for the experts")] * 2
    for name, text in heard:
        assert name == PeerLeft.__name__
        assert "MemoryError: no room for the experts" in text


def check_misuse(said: dict[str, Any]) -> None:
    """Every refusal says how to mend it."""
    name, text = said["training"]
    assert name == InvalidArgument.__name__
    assert "torch.no_grad()" in text
    assert said["served after it"] <= 8
    name, text = said["more than the first"]
    assert (name, "4 rows" in text, "at most 1 on" in text) == ("InvalidArgument", True, True)
    assert said["closed"][0] == OutOfOrder.__name__
    assert "load the model anew" in said["closed"][1]
    assert said["mapped"] == 0


def replayed(group: weft.Group) -> list[float]:
    """Graphs of two sizes, replayed between eager calls with other tokens and routing."""
    called = layer(group, dtype=torch.bfloat16)
    like = torch.zeros(0, dtype=torch.bfloat16, device=group.device)
    graphs, found = [], []
    with torch.no_grad():
        for tokens in (3, 2 * MAX_TOKENS + 1):
            given = batch(tokens, 0, like)
            called(*given)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = called(*given)
            graphs.append((graph, given, out))
        for seed in range(1, 20):
            graph, given, out = graphs[seed % 2]
            for mine, fresh in zip(given, batch(len(given[0]), seed, like), strict=True):
                mine.copy_(fresh)
            graph.replay()
            found.append(far(out, *given))
            found.append(far(called(*given), *given))
    plugin.check()
    plugin.close()
    return found


@pytest.mark.gpu
def test_a_shared_batch_replays_in_cuda_graphs(ranks: Any) -> None:
    assert all(far <= 8 for one in ranks(2, "cuda")(replayed) for far in one)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_gpus_serve_every_batch(ranks: Any, replicas: int, dtype: torch.dtype) -> None:
    assert all(far <= 8 for one in ranks(2, "cuda")(sizes, replicas, dtype) for far in one)


def refuse_capture(group: weft.Group) -> tuple[str, str]:
    called = layer(group, replicas=2)
    given = batch(4, 1, torch.zeros(0, device=group.device))
    called(*given)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        return raised(called, *given)


@pytest.mark.gpu
def test_own_batches_are_not_captured(ranks: Any) -> None:
    for name, text in ranks(2, "cuda")(refuse_capture):
        assert name == InvalidArgument.__name__
        assert "ep_size == tp_size" in text


def end_unclosed() -> None:
    """A rank of a program that neither closes nor destroys anything."""
    torch.distributed.init_process_group("gloo")
    group = weft.Group.from_torch(device="cpu")
    called = layer(group)
    print(called(*batch(4, 1, torch.zeros(0))).shape == (4, HIDDEN))


def test_a_process_may_end_with_its_model_alive() -> None:
    program = f"from {__name__} import end_unclosed as end; end()"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ends = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program],
            env={**os.environ, **torchrun, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    for each in ends:
        out, error = each.communicate()
        assert (each.returncode, out, error) == (0, "True\n", "")
