# SPDX-License-Identifier: Apache-2.0
"""A layer of experts of transformers' shape with weft, without importing a model."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
import weft.plugins.transformers as plugin
from tests.plugins.standins import run_each
from weft.errors import InvalidArgument, OutOfOrder, PeerLeft

pytest.importorskip("transformers", minversion="5.23")

HIDDEN, EXPERTS, TOP_K, MAX_TOKENS = 64, 8, 3, 16
HALF_UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
ROWS = (0, 1, 7, 3 * MAX_TOKENS + 5, 2)


class Experts(torch.nn.Module):
    """One matrix per expert; the id after the last one is unused, as in transformers."""

    def __init__(self, local: range, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / 8
        self.num_experts = len(local)
        self.matrices = whole[local.start : local.stop].to(device, dtype)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("th,ehf->tef", x.float(), self.matrices.float())
        ends = each.new_zeros(len(x), 1, each.shape[2])
        chosen = torch.cat((each, ends), 1).gather(1, ids[..., None].expand(-1, -1, each.shape[2]))
        return (chosen * weights[..., None]).sum(1).to(x.dtype)


def layer(
    group: weft.Group,
    *,
    replicas: int = 1,
    dtype: torch.dtype = torch.float32,
    experts: Any = None,
    timeout: float = 600.0,
) -> Any:
    """Return the layer of a model whose ranks form replicas, each with a batch of its own."""
    from weft.plugins.transformers.experts import ExpertParallel

    group.process_group()
    from torch.distributed.device_mesh import init_device_mesh

    size, kind = group.size, group.device.type
    dense = init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=("fsdp", "tp"))
    expert = init_device_mesh(kind, (1, size), mesh_dim_names=("efsdp", "ep"))
    own = range(EXPERTS * group.rank // size, EXPERTS * (group.rank + 1) // size)
    module = experts or Experts(own, group.device, dtype)
    return ExpertParallel(module, expert["ep"], dense["tp"], max_tokens=MAX_TOKENS, timeout=timeout)


def batch(tokens: int, seed: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return x, ids and float32 weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(like)
    weights, ids = torch.rand(tokens, EXPERTS, generator=generator).softmax(1).topk(TOP_K)
    return x, ids.to(like.device), weights.to(like.device)


def mapped() -> int:
    """Return the number of shares of symmetric memory that are mapped in this process."""
    return Path("/proc/self/maps").read_text().count("weft-share")


def check(got: torch.Tensor, x: torch.Tensor, *routing: torch.Tensor) -> None:
    """Compare with one process: a rank's sum and the total are rounded once each.

    The distance is in half units of the largest output; experts add in another order.
    """
    want = Experts(range(EXPERTS), x.device, x.dtype)(x.float(), *routing)
    assert got.shape == want.shape
    if want.numel():
        worst = (got.float() - want).abs().max() / want.abs().max()
        assert worst / HALF_UNIT[x.dtype] <= 8


def run_sizes(group: weft.Group, replicas: int, dtype: torch.dtype) -> None:
    """Run batches from none to more than a round; replicas have unequal numbers of rows."""
    called = layer(group, replicas=replicas, dtype=dtype)
    replica = group.rank * replicas // group.size
    like = torch.zeros(0, dtype=dtype, device=group.device)
    for tokens in ROWS:
        args = batch(max(0, tokens - 20 * replica), tokens + replica, like)
        with torch.inference_mode(tokens == 1):
            check(called(*args), *args)
    plugin.check()
    plugin.close()
    assert mapped() == 0


def compile_layer(group: weft.Group, replicas: int) -> None:
    """Compile: a shared batch is one graph without a break."""
    called, whole = layer(group, replicas=replicas), replicas == 1
    traced = torch.compile(called.__call__, fullgraph=whole, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        called(*batch(1, 0, torch.zeros(0)))  # makes the all-reduce, which a graph cannot
        for tokens in (5, MAX_TOKENS + 5, 5):
            args = batch(tokens, tokens, torch.zeros(0))
            check(traced(*args), *args)
    plugin.close()


def replay(group: weft.Group) -> None:
    """Replay graphs of two sizes between eager calls, with other tokens and routing."""
    called, graphs = layer(group, dtype=torch.bfloat16), []
    like = torch.zeros(0, dtype=torch.bfloat16, device=group.device)
    with torch.no_grad():
        for tokens in (3, 2 * MAX_TOKENS + 1):
            args = batch(tokens, 0, like)
            called(*args)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = called(*args)
            graphs.append((graph, args, out))
        for seed in range(1, 20):
            graph, args, out = graphs[seed % 2]
            for own, fresh in zip(args, batch(len(args[0]), seed, like), strict=True):
                own.copy_(fresh)
            graph.replay()
            check(out, *args)
            check(called(*args), *args)
    plugin.check()
    plugin.close()


def refuse_capture(group: weft.Group) -> None:
    called = layer(group, replicas=2)
    args = batch(4, 1, torch.zeros(0, device=group.device))
    called(*args)
    torch.cuda.synchronize()
    refused = pytest.raises(InvalidArgument, match="ep_size == tp_size")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), refused:
        called(*args)


SERVED: list[tuple[Any, ...]] = [
    (run_sizes, replicas, dtype) for dtype in HALF_UNIT for replicas in (1, 2)
]
ALSO: dict[str, list[tuple[Any, ...]]] = {
    "cpu": [(compile_layer, 1), (compile_layer, 2)],
    "cuda": [(replay,), (refuse_capture,)],
}


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_every_batch_shared_or_not(ranks: Any, device: str) -> None:
    ranks(2, device)(run_each, [*SERVED, *ALSO[device]])


def misuse(group: weft.Group) -> None:
    """Every refusal names its fix."""
    called = layer(group, replicas=2)
    x, ids, weights = batch(4, 1, torch.zeros(0))
    trained = x.clone().requires_grad_()
    with pytest.raises(InvalidArgument, match=r"torch\.no_grad\(\)"):
        called(trained, ids, weights)
    with torch.no_grad():
        check(called(trained, ids, weights), x, ids, weights)
    later = layer(group, replicas=2)  # another model; its second layer gets more than the first
    own = Experts(range(EXPERTS // 2), group.device, torch.float32)
    sizes: dict[str, Any] = {"max_tokens": MAX_TOKENS, "timeout": 600.0}
    again = type(called)(own, later.ep_mesh, later.tp_mesh, **sizes)
    later(x[:1], ids[:1], weights[:1])
    with pytest.raises(InvalidArgument, match="4 rows.*at most 1 on"):
        again(x, ids, weights)
    plugin.close()
    plugin.close()
    with pytest.raises(OutOfOrder, match="reload the model"):
        called(x, ids, weights)
    assert mapped() == 0


class Failing(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room for the experts")


def fail(group: weft.Group, replicas: int) -> None:
    """An error of rank 1's experts raises on rank 0, too."""
    own = range(EXPERTS // 2 * group.rank, EXPERTS // 2 * (group.rank + 1))
    kind = Failing if group.rank else Experts
    called = layer(group, replicas=replicas, experts=kind(own, group.device, torch.float32))
    args = batch(4, 1, torch.zeros(0))
    error: tuple[type[Exception], str] = (PeerLeft, "MemoryError: no room for the experts")
    if group.rank:
        error = MemoryError, "no room for the experts"
    with pytest.raises(error[0], match=error[1]):
        called(*args)
    with pytest.raises(OutOfOrder):
        called(*args)


def load_another(group: weft.Group) -> None:
    """Rank 0 drops the first model; rank 1 still has it when the next one is made."""
    first = layer(group)
    args = batch(4, 1, torch.zeros(0))
    first(*args)
    if group.rank == 0:
        del first
        gc.collect()
    assert (mapped() > 0) == (group.rank == 1)
    second = layer(group)
    check(second(*args), *args)
    if group.rank:
        del first
    del second
    gc.collect()
    assert mapped() == 0


KEPT: list[Any] = []


def leave_alive(group: weft.Group) -> None:
    """The rank's process ends while its model is alive."""
    KEPT.append(layer(group))
    KEPT[0](*batch(4, 1, torch.zeros(0)))


def test_refusals_and_ends(ranks: Any) -> None:
    calls = [(misuse,), (load_another,), (fail, 1), (fail, 2), (leave_alive,)]
    ranks(2, "cpu")(run_each, calls)
