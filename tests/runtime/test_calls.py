# SPDX-License-Identifier: Apache-2.0
"""Ranks with different calls all detect it in that call; refusals are raised by close or check.

None returns a wrong result. With WEFT_DEBUG=1 every round raises its refusals.
"""

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.ranks import on_ranks
from weft.errors import BadExpertId, GeometryMismatch, GroupError, InvalidArgument
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing
from weft.runtime import library
from weft.runtime.check import build_tensors_key
from weft.runtime.identity import FLAG_MASK, MAX_ROUNDS, make_allreduce_record, make_dispatch_record

HIDDEN, TOKENS, TOP_K, EXPERTS = 64, 4, 2, 6
SIZES: dict[str, Any] = {
    **{"max_tokens": TOKENS, "top_k": TOP_K, "num_experts": EXPERTS, "hidden": HIDDEN}
}
CONFIG = MoEConfig(hidden=HIDDEN, intermediate=32, routing=Routing(EXPERTS, TOP_K))


def open_kind(group, kind, *, lease=False, seed=0, **options):
    """Open an operator, or a layer of experts from a seed; kind: a class, and a layer's mode."""
    name, _, mode = kind.partition(", ")
    args: tuple[Any, ...] = ()
    if name == "MoE":

        def weights(local: tuple[int, ...]) -> ExpertWeights:
            experts = [Expert.seeded(CONFIG, seed + e) for e in local]
            return ExpertWeights.stack(CONFIG, experts, group.device)

        args = CONFIG, weights
        options |= {"max_tokens": TOKENS} | ({"mode": mode} if mode else {})
    elif name == "AllReduce":
        options |= {"max_tokens": TOKENS, "hidden": HIDDEN}
    else:
        options |= SIZES | ({"quantize": None} if name == "LowLatencyAllToAll" else {})
    cls = getattr(weft, name)
    return weft.lease(group, cls, *args, **options) if lease else cls(group, *args, **options)


def call(op, x, ids, *, factor=1, rows=None, eps=1e-06):
    """Run one round or sum; experts of an exchange multiply their rows by `factor`."""
    weights = torch.ones(ids.shape, device=x.device)
    match getattr(op, "operator", op):
        case weft.AllToAll() as a2a:
            y = weft.reference.identity_experts(a2a.dispatch(x, ids, rows=rows), x.dtype)
            return a2a.combine(y * factor)
        case weft.LowLatencyAllToAll() as low:
            got = low.dispatch(x, ids, weights)
            return low.combine(got.x * factor, ids, weights, got.handle)
        case weft.AllReduce() as reduce:
            return reduce.fused(x, weight=torch.ones_like(x[0]), eps=eps).norm
        case layer:
            return layer(x, topk_ids=ids, topk_weights=weights, rows=rows)


LIMITS: dict[str, Any] = {"timeout": 20.0, "first_timeout": 60.0}
RANKS, IDS = 3, torch.tensor([[0, 3], [2, 5]])
OPERATORS = ("AllToAll", "LowLatencyAllToAll", "AllReduce")
Call = tuple[int, int]  # the lease that calls, and its argument


def draw_program(chance: random.Random, kind: str) -> list[Call]:
    """Draw eight calls, with no two neighbours equal."""
    same = kind in ("LowLatencyAllToAll", "operators")  # the former takes no argument
    program: list[Call] = []
    while len(program) < 8:
        call = chance.randrange(3), 2 if same else chance.randrange(2, 13)
        if kind == "AllToAll":
            call = call[0], min(call[1], TOKENS)
        if not program or call != program[-1]:
            program.append(call)
    return program


def disturb(chance: random.Random, program: list[Call], how: str) -> tuple[int, list[Call]]:
    """Return the first differing call, and the program of the rank that is out of step."""
    at, other = chance.randrange(1, 6), list(program)
    if how == "skip":
        del other[at]
    elif how == "swap":
        other[at : at + 2] = other[at + 1 : at - 1 : -1]
    elif how == "repeat":
        other.insert(at, other[at - 1])
    else:
        lease, argument = other[at]
        other[at] = lease, argument - 1 if argument > 2 else argument + 1
    return at, other


def run_program(group, kind, program, other, odd):
    """Call three leases of one workspace, or three operators; return the results and the error."""
    results: list[torch.Tensor] = []
    x = torch.full((2, HIDDEN), 1.0 + group.rank, device=group.device).bfloat16()
    with contextlib.suppress(GroupError), contextlib.ExitStack() as stack:
        if kind == "operators":
            limits: dict[str, Any] = {"timeout": 2.0, "first_timeout": 4.0}
            opened = [open_kind(group, name, **limits) for name in OPERATORS]
        else:
            opened = [open_kind(group, kind, lease=True, seed=10 * i, **LIMITS) for i in range(3)]
        ops = [stack.enter_context(each) for each in opened]
        try:
            for at, n in other if other is not None and group.rank == odd else program:
                out = call(ops[at], x, IDS.to(x.device), factor=at + 1, rows=n, eps=n * 1e-6)
                result = out.to("cpu", copy=True)  # a GPU reports the round's error afterwards
                ops[at].check()
                results.append(result)
        except GroupError as error:
            return results, type(error).__name__, str(error)
    return results, "", ""


@pytest.mark.parametrize("device", ["threads", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["skip", "swap", "repeat", "change"])
@pytest.mark.parametrize("kind", [*OPERATORS, "MoE, throughput", "MoE, low_latency", "operators"])
def test_a_rank_out_of_step_is_detected_by_all_in_that_call(ranks, kind, how, device):
    if kind in ("LowLatencyAllToAll", "operators") and how == "change":
        pytest.skip("no argument that ranks must agree on")
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    program, odd = draw_program(chance, kind), chance.randrange(RANKS)
    at, other = disturb(chance, program, how)
    right = ranks(RANKS, device)(run_program, kind, program, None, odd)
    assert [(len(results), error) for results, error, _ in right] == [(8, "")] * RANKS
    result = ranks(RANKS, device)(run_program, kind, program, other, odd)
    for (results, error, text), (expected, _, _) in zip(result, right, strict=True):
        assert error == GeometryMismatch.__name__, (error, text)
        assert len(results) == at, text
        assert "called with" in text or (kind == "operators" and f"rank {odd}" in text)
        assert all(map(torch.equal, results, expected[:at]))


@on_ranks(2, "threads")
def test_an_error_names_both_values(group: weft.Group) -> None:
    with open_kind(group, "AllReduce", **LIMITS) as op:
        values = (1e-5, 1e-6)
        theirs, own = values[1 - group.rank], values[group.rank]
        text = f"rank {1 - group.rank} called with .*eps {theirs}.*eps {own}"
        with pytest.raises(GeometryMismatch, match=text):
            call(op, torch.ones(2, HIDDEN).bfloat16(), IDS, eps=own)


@on_ranks(2, "threads")
def test_rows_have_a_bound(group: weft.Group) -> None:
    x = torch.ones(2, HIDDEN).bfloat16()
    with open_kind(group, "MoE", **LIMITS) as layer:
        with pytest.raises(InvalidArgument, match=rf"rows is .*\.{TOKENS * MAX_ROUNDS}"):
            call(layer, x, IDS, rows=TOKENS * MAX_ROUNDS + 1)
        assert torch.isfinite(call(layer, x, IDS, rows=2)).all()


@on_ranks(1, "threads")
def test_a_compiled_graph_of_other_sizes_is_another_graph(group: weft.Group) -> None:
    """Graphs stay on disk: another process may have other sizes under the same serial number."""
    owners = [weft.AllToAll(group, **(SIZES | {"max_tokens": most})) for most in (6, 6, 7)]
    names = [owner.library_handle >> library.SERIAL_BITS for owner in owners]
    assert len({owner.library_handle for owner in owners}) == 3
    for owner in owners:
        owner.close()
    assert names[0] == names[1] != names[2]


def test_hashes_of_calls_differ():
    """With 24 bits, the chance of a collision among 3,000 calls is one in four."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed).randrange
    calls = {(draw(1 << 24), draw(1 << 16), draw(1 << 20)) for _ in range(3000)}
    hashes = [make_dispatch_record(*each, 0).hash & FLAG_MASK for each in calls]
    assert len(set(hashes)) >= len(calls) - 4
    parts: dict[str, Any] = {"parts": (True, False, True), "coding": 0, "weight_bias": 0.0}
    words = {
        make_allreduce_record(7, 0, 5, "oneshot", eps=i * 1e-7, **parts).hash for i in range(3000)
    }
    assert len(words) == 3000


ONES = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
BAD, GOOD = torch.tensor([[0, 9], [1, 3]]), torch.tensor([[0, 2], [1, 3]])
CHECKED = pytest.mark.parametrize(
    ("kind", "lease"),
    [("AllToAll", False), ("LowLatencyAllToAll", False), ("MoE", False), ("MoE", True)],
)


@CHECKED
@on_ranks(2, "threads")
def test_close_raises_pending_refusals(group: weft.Group, kind: str, lease: bool) -> None:
    for how in ("close", "exit", "checked", "error"):
        op = open_kind(group, kind, lease=lease)
        call(op, ONES, BAD)
        if how == "close":
            with pytest.raises(BadExpertId):
                op.close()
        elif how == "exit":
            with pytest.raises(BadExpertId), op:
                pass
        elif how == "checked":
            with pytest.raises(BadExpertId):
                getattr(op, "operator", op).check()
        else:
            with pytest.raises(KeyError), op:
                raise KeyError("the caller's own")
        op.close()
    op = open_kind(group, kind, lease=lease)
    assert torch.isfinite(call(op, ONES, GOOD)).all()
    op.close()


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "1")


@pytest.mark.usefixtures("debug")
@CHECKED
@on_ranks(2, "threads")
def test_debug_mode_checks_every_call(group: weft.Group, kind: str, lease: bool) -> None:
    op = open_kind(group, kind, lease=lease)
    with pytest.raises(BadExpertId):
        call(op, ONES, BAD)
    group.barrier()
    assert torch.isfinite(call(op, ONES, GOOD)).all()
    if kind == "AllToAll":
        received = op.dispatch(ONES, GOOD)
        assert op.output().isnan().all()
        kept = received.x
        op.output().copy_(weft.reference.identity_experts(received, torch.bfloat16))
        op.combine()
        assert kept.isnan().all()
    op.close()


@pytest.mark.usefixtures("debug")
@on_ranks(2, "threads")
def test_debug_mode_compares_residuals(group: weft.Group) -> None:
    with open_kind(group, "AllReduce") as op:
        residual = torch.zeros_like(ONES)
        op.fused(ONES, residual=residual)
        residual[1, 3] = group.rank
        text = f"residual of rank {1 - group.rank} .digest "
        with pytest.raises(GeometryMismatch, match=text):
            op.fused(ONES, residual=residual)


@on_ranks(1, "threads")
def test_an_invalid_weft_debug_is_refused(group: weft.Group, monkeypatch: Any) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "yes")
    with pytest.raises(InvalidArgument, match="WEFT_DEBUG is 'yes'"):
        weft.AllToAll(group, **SIZES)


def dense() -> torch.Tensor:
    return torch.zeros(4, 8, dtype=torch.float16)


def shifted(elements: int) -> torch.Tensor:
    return torch.zeros(48, dtype=torch.float16)[elements : elements + 32].view(4, 8)


OTHERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "false": lambda: False,
    "shape": lambda: torch.zeros(8, 4, dtype=torch.float16),
    "rank": lambda: torch.zeros(32, dtype=torch.float16),
    "dtype": lambda: torch.zeros(4, 8, dtype=torch.bfloat16),
    "width": lambda: torch.zeros(4, 8, dtype=torch.int32),
    "strides": lambda: torch.zeros(8, 4, dtype=torch.float16).t(),
    "pitch": lambda: torch.zeros(4, 9, dtype=torch.float16)[:, :8],
    "alignment": lambda: shifted(1),
    "another alignment": lambda: shifted(4),
}


def test_equal_tensors_elsewhere_have_an_equal_key():
    first, second = dense(), dense()
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() % 16 == second.data_ptr() % 16
    assert build_tensors_key([first])[0] == build_tensors_key([second])[0]
    one, two = shifted(1), shifted(9)
    assert build_tensors_key([one, None])[0] == build_tensors_key([two, None])[0]


def test_each_difference_at_each_position_changes_the_key():
    keys = []
    for place, make in [(0, dense), *itertools.product(range(3), OTHERS.values())]:
        tensors: list[Any] = [dense() for _ in range(3)]
        tensors[place] = make()
        key, addresses = build_tensors_key(tensors)
        assert key is not None
        assert addresses == [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in tensors]
        keys.append(key)
    assert len(set(keys)) == len(keys)


@pytest.mark.gpu
def test_another_device_changes_the_key():
    assert build_tensors_key([dense()])[0] != build_tensors_key([dense().cuda()])[0]


def test_only_tensors_with_memory_and_without_gradient_have_a_key():
    empty, meta, sparse = torch.empty(0), torch.empty(2, device="meta"), torch.eye(2).to_sparse()
    inputs = torch.zeros(4, 8, dtype=torch.float16, requires_grad=True)
    for other in (1, 0, "x", empty, meta, sparse, inputs):
        assert build_tensors_key([dense(), other])[0] is None
    with torch.no_grad():
        assert build_tensors_key([inputs])[0] == build_tensors_key([dense()])[0]


@on_ranks(2, "cpu")
def test_ranks_with_other_code_create_nothing(group):
    """As a replacement would have that starts after an update of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.runtime.operator.header_digest", lambda: f"code {group.rank}")
        with pytest.raises(GeometryMismatch, match=r"weft's code differs: rank 0 has 'code 0' and"):
            open_kind(group, "AllReduce")
