# SPDX-License-Identifier: Apache-2.0
"""Random arguments of every public call raise weft's usage errors or work, and break no group.

There are two kinds of draws. `refused` reads the tables of hostile arguments, makes one to four
arguments of a call hostile at a time, and expects a refusal. `free` replaces arguments by any
value, valid ones included: a call may then work, and the round continues with its result.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests import hostile, objects, test_arguments
from tests.compat import test_arguments as compat_arguments
from tests.hostile import Row, refusal_text
from tests.moe import test_arguments as moe_arguments
from tests.objects import CONFIG, EXPERTS, HIDDEN, MOST, TOP_K, random_rows, tokens
from tests.public import MODES
from weft.compat import deep_ep, flashinfer
from weft.errors import BadExpertId, UsageError

pytestmark = test_arguments.pytestmark
BF16 = torch.bfloat16
DTYPES = (BF16, torch.float32, torch.float16, torch.int32, torch.int64, torch.bool, torch.uint8)
Arguments = Mapping[str, Any]


class Count:
    """Number of draws of all ranks."""

    def __init__(self) -> None:
        self.drawn = 0


def refused(seed: int, per_row: int, count: Count) -> Callable[[Row], int]:
    """Draw hostile values for several arguments at a time, for `hostile.assert_refusals`."""

    def attempt(row: Row) -> int:
        chance = random.Random(f"{seed} {row.call.__qualname__}")
        values = {name: list(kind.hostile(row.good.get(name))) for name, kind in row.kinds.items()}
        names = [name for name, choices in values.items() if choices]
        for _ in range(per_row):
            chosen = chance.sample(names, min(len(names), chance.randrange(1, 5)))
            wrong = {name: chance.choice(values[name]) for name in chosen}
            if chance.random() < 0.1:
                wrong["unheard_of"] = 1
            refusal_text(row, wrong)
        count.drawn += per_row
        return per_row

    return attempt


def any_tensor(chance: random.Random, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that differs from `like` in at most one respect."""
    way = chance.randrange(12)
    dims = [chance.choice((0, 1, 2, 3, 8, HIDDEN)) for _ in range(chance.randrange(4))]
    source = torch.Generator().manual_seed(chance.randrange(1 << 30))
    if way == 0:
        return torch.randn(dims, generator=source).to(chance.choice(DTYPES))
    if way == 1:
        return like.to(chance.choice(DTYPES))
    if way == 2:
        return like[: chance.randrange(len(like) + 1)] if like.dim() else like
    if way == 3:
        return like.t() if like.dim() == 2 else like.unsqueeze(0)
    if way == 4:
        return like[:1].expand(like.shape) if like.dim() and len(like) else like
    if way == 5:
        return torch.cat([like, like]) if like.dim() else like
    if way == 6:
        return like[..., : chance.randrange(like.shape[-1] + 1)] if like.dim() else like
    if way == 7 and not like.is_floating_point():
        spread = torch.randint(-9, 99, like.shape, generator=source)
        return spread.to(like.dtype)
    if way == 8 and like.is_floating_point():
        return torch.full_like(like, chance.choice((float("nan"), -448.0, 0.0)))
    if way == 9:
        return like.to("meta")
    if way == 10 and like.is_floating_point():
        return like.detach().clone().requires_grad_()
    return like.clone()


def any_value(chance: random.Random, good: Any) -> Any:
    """Return a value in place of `good`, usually of the same kind."""
    if isinstance(good, torch.Tensor) and chance.random() < 0.8:
        return any_tensor(chance, good)
    if isinstance(good, list | tuple) and chance.random() < 0.8:
        values = [any_value(chance, each) if chance.random() < 0.3 else each for each in good]
        return values[: chance.randrange(len(values) + 2)]
    if isinstance(good, int) and not isinstance(good, bool) and chance.random() < 0.6:
        return good + chance.randrange(-2, 3)
    return chance.choice(
        (
            *(None, True, False, 0, 1, -1, 3, 8, 128, 1 << 31, -(1 << 63), 10**30, 0.5),
            *(float("nan"), float("inf"), "", "fp8", "auto", "none", b"x", [], (), {}, object()),
            *(np.int64(3), np.zeros(2), torch.zeros(2), torch.zeros(()), BF16, torch.float64),
            *([0] * EXPERTS, range(3), print, CONFIG, torch.device("cpu"), 1j),
        )
    )


@dataclass(frozen=True)
class Step:
    """A call of a round.

    arguments: valid ones, made from what the earlier steps returned.
    fixed: names that stay valid, because later rounds must repeat what this one passes.
    """

    call: Callable[..., Any]
    arguments: Callable[[list[Any]], dict[str, Any]]
    fixed: tuple[str, ...] = ()


def attempt(call: Callable[..., Any], arguments: Arguments, changed: Arguments) -> Any:
    """Return the result of a call, or its UsageError; any other error fails the test."""
    try:
        return call(**{**arguments, **changed})
    except UsageError as error:
        return error
    except Exception as error:
        where = ", ".join(f"{name}={value!r}"[:120] for name, value in changed.items())
        raise AssertionError(f"{call.__qualname__}({where}): {type(error).__name__}") from error


def free(chance: random.Random, steps: list[Step], count: int) -> int:
    """Play rounds until `count` calls are drawn. A refused call is followed by a valid one."""
    drawn = 0
    while drawn < count:
        results: list[Any] = []
        for step in steps:
            good = step.arguments(results)
            changing = sorted(set(good) - set(step.fixed))
            for _ in range(chance.randrange(4)):
                names = chance.sample(changing, min(len(changing), chance.randrange(1, 4)))
                result = attempt(
                    step.call, good, {name: any_value(chance, good[name]) for name in names}
                )
                drawn += 1
                if not isinstance(result, UsageError):
                    break
            else:
                result = step.call(**good)
            results.append(result)
    return drawn


def steps_of(group: weft.Group, name: str, op: Any) -> list[Step]:
    """Return the calls of one round of an object, with valid arguments."""
    x, ids, weights = (each[:5] for each in tokens(group))
    rows: dict[str, Any] = {"rows": MOST, "num_tokens": None}
    routed: dict[str, Any] = {"topk_ids": ids, "topk_weights": weights}
    outs: dict[str, Any] = {"out": None, "add": None}
    space = (EXPERTS // 2, 2 * MOST, HIDDEN)

    def returned(results: list[Any]) -> dict[str, Any]:
        handle = results[0].handle
        sent = op.result_buffers[handle.slot].sent_weights
        back = weights[: handle.tokens] if sent is None else sent
        again = {"topk_ids": ids[: handle.tokens], "topk_weights": back}
        return {"y": torch.zeros(space).bfloat16(), **again, "handle": handle, **outs}

    def deep_returned(results: list[Any]) -> dict[str, Any]:
        numbers, _, ticket, _, _ = results[0]
        x = torch.zeros((numbers[0] if isinstance(numbers, tuple) else numbers).shape)
        return {"x": x.bfloat16(), "handle": ticket, "out": None, **deep(ticket)}

    def deep(ticket: Any) -> dict[str, Any]:
        count = ticket.operator_handle.tokens
        return {"topk_idx": ids[:count], "topk_weights": weights[:count]}

    if isinstance(op, weft.AllToAll):
        sent = {"x": x, **routed, **rows}
        return [Step(op.dispatch, lambda _: sent), Step(op.combine, lambda _: {"y": None, **outs})]
    if isinstance(op, weft.LowLatencyAllToAll):
        return [Step(op.dispatch, lambda _: {"x": x, **routed}), Step(op.combine, returned)]
    if isinstance(op, weft.AllReduce):
        weight, residual = torch.ones(HIDDEN).bfloat16(), torch.ones_like(x)
        fused = {
            **{"x": x, "residual": residual, "weight": weight, "eps": 1e-6, "weight_bias": 0.0},
            **{"quant": weft.FP8Group(128), "prologue": None, "backend": "auto"},
            **dict.fromkeys(("out", "residual_out", "norm_out", "quant_out", "scale_out")),
        }
        return [Step(op.fused, lambda _: fused)]
    if isinstance(op, weft.MoE):
        logits = random_rows(group, 5, EXPERTS, seed=2)
        call = {"x": x, "logits": logits, **dict.fromkeys(routed), **rows, "out": None}
        return [Step(op.__call__, lambda _: call)]
    if isinstance(op, deep_ep.Buffer):
        sent = {
            **{"x": x, "topk_idx": ids, "num_max_dispatch_tokens_per_rank": MOST},
            **{"num_experts": EXPERTS, "use_fp8": False, "round_scale": False},
        }
        return [
            Step(op.low_latency_dispatch, lambda _: sent),
            Step(op.low_latency_combine, deep_returned),
        ]
    assert isinstance(op, flashinfer.MoeAlltoAll), name
    sent = {
        **{"token_selected_experts": ids.int(), "input_payloads": [x, ids.int(), weights]},
        **{"runtime_max_tokens_per_rank": MOST, "invalid_token_expert_id": None},
    }

    def payload(results: list[Any]) -> dict[str, Any]:
        limit = results[0][0].shape[1]
        rows = torch.zeros(2, limit, HIDDEN).bfloat16()
        return {"payload": rows, "runtime_max_tokens_per_rank": limit, "output": None}

    return [Step(op.dispatch, lambda _: sent), Step(op.combine, payload, fixed=("payload",))]


OBJECTS = (
    *("AllToAll pull", "AllToAll push", "LowLatency plain", "LowLatency sender"),
    *("AllReduce twoshot", "MoE rank none", "MoE expert none", "MoeAlltoAll", "Buffer"),
)


def calls_of(group: weft.Group, name: str, seed: int, count: int) -> int:
    """Run rounds with any arguments; a valid round must then give its earlier bits."""
    made = MODES[name](group)
    before = made.call()[-1]  # the round's result; received rows beyond the counts are undefined
    chance = random.Random(f"{seed} {name}")
    drawn = free(chance, steps_of(group, name, made.what), count)
    if hasattr(made.what, "check"):
        with contextlib.suppress(BadExpertId):  # of ids that were drawn out of range
            made.what.check()
    assert torch.equal(made.call()[-1], before), (name, seed)
    group.barrier()
    made.give_back()
    return drawn


SIZES = {"max_tokens": MOST, "top_k": TOP_K, "num_experts": EXPERTS, "hidden": HIDDEN}


def constructors(group: weft.Group) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Return the constructors of collective objects with valid arguments."""
    map_of_experts = {"expert_map": [0] * (EXPERTS // 2) + [1] * (EXPERTS // 2)}
    yield weft.AllToAll, {"group": group, **SIZES, **map_of_experts, "quantize": None}
    yield weft.LowLatencyAllToAll, {"group": group, **SIZES, **map_of_experts, "slots": 2}
    yield weft.AllReduce, {"group": group, "max_tokens": MOST, "hidden": HIDDEN, "dtype": BF16}
    weights = objects.experts(group, fp8=False)
    sizes = {"max_tokens": MOST, "expert_map": None, "mode": "throughput", "overlap": "none"}
    yield weft.MoE, {"group": group, "config": CONFIG, "weights": weights, **sizes}
    yield weft.Heap.create, {"group": group, "size": 1 << 16}
    yield deep_ep.Buffer, {"group": group, "low_latency_mode": True, "enable_shrink": False}


def constructed(group: weft.Group, seed: int, count: int) -> int:
    """Construct objects from any arguments, and close those that were constructed."""
    chance, drawn = random.Random(seed), 0
    for make, good in constructors(group):

        def made(make: Callable[..., Any] = make, **arguments: Any) -> None:
            result = make(**arguments)
            (result.destroy if isinstance(result, deep_ep.Buffer) else result.close)()

        for _ in range(count):
            names = chance.sample(sorted(good), min(len(good), chance.randrange(1, 4)))
            attempt(made, good, {name: any_value(chance, good[name]) for name in names})
            drawn += 1
    with weft.AllReduce(group, max_tokens=2, hidden=HIDDEN) as op:
        total = op.fused(torch.ones(2, HIDDEN).bfloat16()).out
        assert total is not None
        assert (total == group.size).all()
    return drawn


def functions(seed: int, count: int) -> int:
    """Return public functions of a rank's own values."""
    chance, drawn = random.Random(seed), 0
    rows = [row for make in moe_arguments.TABLES.values() for row in make()]
    for row in rows:
        # They start or meet processes; the last one stores at addresses, which are the caller's.
        if row.call.__name__ in ("launched", "from_torch", "pushed"):
            continue
        for _ in range(count if row.good else 0):
            names = chance.sample(sorted(row.good), min(len(row.good), chance.randrange(1, 4)))
            changed = {name: any_value(chance, row.good[name]) for name in names}
            attempt(row.call, row.good, changed)
            drawn += 1
    return drawn


def layers(group: weft.Group) -> None:
    moe_arguments.layers(group, {"mode": "throughput", "overlap": "none", "gemm": "torch"})


REFUSED: dict[str, Callable[[weft.Group], None]] = {
    **test_arguments.BODIES,
    **{f"compat {body.__name__}": body for body in compat_arguments.BODIES},
    "moe layers": layers,
}
# The short form draws the same arguments in every run, the long one others.
LONG = 80
LENGTHS = [pytest.param(8, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.slow)]


def seed_of(draws: int) -> int:
    seed = random.randrange(1 << 32) if draws == LONG else 1
    print("seed", seed)
    return seed


@pytest.mark.parametrize("draws", LENGTHS)
@pytest.mark.parametrize("name", REFUSED)
def test_several_hostile_arguments_are_refused(ranks, monkeypatch, name, draws):
    count = Count()
    monkeypatch.setattr(hostile, "fuzz", refused(seed_of(draws), draws, count))
    ranks(1 if "sizes" in name else 2, "threads")(REFUSED[name])
    assert count.drawn >= draws


@pytest.mark.parametrize("draws", LENGTHS)
@pytest.mark.parametrize("name", OBJECTS)
def test_calls_with_any_arguments_leave_the_group_right(ranks, name, draws):
    ranks(2, "threads")(calls_of, name, seed_of(draws), 4 * draws)


@pytest.mark.parametrize("draws", LENGTHS)
def test_constructors_with_any_arguments_leave_the_group_right(ranks, draws):
    ranks(2, "threads")(constructed, seed_of(draws), draws)


@pytest.mark.parametrize("draws", LENGTHS)
def test_functions_take_any_arguments(draws):
    functions(seed_of(draws), 2 * draws)
