# SPDX-License-Identifier: Apache-2.0
"""Random arguments of operators' calls raise weft's usage errors or work, and break no group."""

import contextlib
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests import test_arguments
from tests.public import CONFIG, EXPERTS, HIDDEN, MODES, MOST, random_rows, tokens
from weft.compat import deep_ep, flashinfer
from weft.errors import BadExpertId, InvalidArgument, UsageError
from weft.gemm import grouped_gemm

pytestmark = test_arguments.pytestmark
BF16 = torch.bfloat16
DTYPES = (BF16, torch.float32, torch.float16, torch.int32, torch.int64, torch.bool, torch.uint8)
Arguments = Mapping[str, Any]


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
    outs: dict[str, Any] = {"out": torch.zeros_like(x), "add": x + 1}
    space = (EXPERTS // 2, 2 * MOST, HIDDEN)
    y = random_rows(group, *space, seed=4).bfloat16()
    weight, residual = torch.ones(HIDDEN).bfloat16(), torch.ones_like(x)
    made = {name: torch.zeros_like(x) for name in ("out", "residual_out", "norm_out")}

    def returned(results: list[Any]) -> dict[str, Any]:
        handle = results[0].handle
        sent = op.result_buffers[handle.slot].sent_weights
        back = weights[: handle.tokens] if sent is None else sent
        again = {"topk_ids": ids[: handle.tokens], "topk_weights": back}
        return {"y": y, **again, "handle": handle, **rows_of(handle.tokens)}

    def deep_returned(results: list[Any]) -> dict[str, Any]:
        received, _, ticket, _, _ = results[0]
        shape = (received[0] if isinstance(received, tuple) else received).shape
        y = random_rows(group, *shape, seed=4).bfloat16()
        count = ticket.operator_handle.tokens
        routed = {"topk_idx": ids[:count], "topk_weights": weights[:count]}
        return {"x": y, "handle": ticket, "out": outs["out"][:count], **routed}

    def rows_of(count: int) -> dict[str, Any]:
        return {name: each[:count] for name, each in outs.items()}

    if isinstance(op, weft.AllToAll):
        sent = {"x": x, **routed, **rows}

        def back(results: list[Any]) -> dict[str, Any]:
            y = random_rows(group, *results[0].x.shape, seed=4).bfloat16()
            return {"y": y, **rows_of(int(results[0].counts[group.rank]))}

        return [Step(op.dispatch, lambda _: sent), Step(op.combine, back)]
    if isinstance(op, weft.LowLatencyAllToAll):
        return [Step(op.dispatch, lambda _: {"x": x, **routed}), Step(op.combine, returned)]
    if isinstance(op, weft.AllReduce):
        fused = {
            **{"x": x, "residual": residual, "weight": weight, "eps": 1e-6, "weight_bias": 0.0},
            **{"quant": weft.FP8Group(128), "prologue": None, "backend": name.split()[1], **made},
            **{"quant_out": x.to(torch.float8_e4m3fn), "scale_out": torch.zeros(len(x), 2)},
        }
        return [Step(op.fused, lambda _: fused)]
    if isinstance(op, weft.MoE):
        logits = random_rows(group, 5, EXPERTS, seed=2)
        call = {"x": x, "logits": logits, **dict.fromkeys(routed), **rows, "out": made["out"]}
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
    if name == "allreduce_fusion":
        del made["out"]
        normed = {"residual_in": residual, "rms_gamma": weight}
        call = {"input": x, "workspace": op, "pattern": 1, **normed, **made}
        return [Step(flashinfer.allreduce_fusion, lambda _: call)]
    assert isinstance(op, flashinfer.MoeAlltoAll), name
    sent = {
        **{"token_selected_experts": ids.int(), "input_payloads": [x, ids.int(), weights]},
        **{"runtime_max_tokens_per_rank": MOST, "invalid_token_expert_id": None},
    }

    def payload(results: list[Any]) -> dict[str, Any]:
        limit = results[0][0].shape[1]
        rows = random_rows(group, 2, limit, HIDDEN, seed=4).bfloat16()
        sizes = {"runtime_max_tokens_per_rank": limit}
        return {"payload": rows, **sizes, "output": torch.zeros_like(x)}

    return [Step(op.dispatch, lambda _: sent), Step(op.combine, payload, fixed=("payload",))]


OBJECTS = (
    *("AllToAll pull", "AllToAll push", "LowLatency plain", "LowLatency sender"),
    *("AllReduce oneshot", "AllReduce twoshot", "MoE rank none", "MoE expert none", "MoeAlltoAll"),
    *("Buffer", "allreduce_fusion"),
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


def share(chance: random.Random, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return two tensors, one of them a result, placed in one block of memory."""
    first = chance.choice([name for name in sorted(tensors) if "out" in name])
    second = chance.choice([name for name in sorted(tensors) if name != first])
    sizes = [tensors[name].nbytes for name in (first, second)]
    reach = range(-sizes[1] // 16 * 16, sizes[0] + 16, 16)  # from end to end
    distance = chance.choice((0, reach[0], reach[-1], *chance.choices(reach, k=4)))
    start = max(0, -distance)
    block = torch.zeros(sum(sizes) + start + 64, dtype=torch.uint8)
    block = block[-block.data_ptr() % 16 :]
    laid = {}
    for name, offset, size in zip((first, second), (start, start + distance), sizes, strict=True):
        tensor = tensors[name]
        laid[name] = block[offset : offset + size].view(tensor.dtype).view(tensor.shape)
        laid[name].copy_(tensor)
    return laid


def aliased(chance: random.Random, steps: list[Step]) -> bool | None:
    """Play a round twice, with clones first; return whether results agree, None if refused."""
    state, outs, refused = chance.getstate(), [], False
    for clones in (True, False):
        chance.setstate(state)
        results: list[Any] = []
        for step in steps:
            good = step.arguments(results)
            tensors = {name: each for name, each in good.items() if torch.is_tensor(each)}
            laid = share(chance, tensors) if any("out" in name for name in tensors) else {}
            if clones:
                laid = {name: each.clone() for name, each in laid.items()}
            try:
                results.append(step.call(**{**good, **laid}))
            except InvalidArgument as error:
                if not re.search("overlaps|pass the same tensor to both", str(error)):
                    raise
                results.append(step.call(**good))
                refused = True
        outs.append([each.view(torch.uint8).clone() for each in tensors_of(results[-1])])
    assert outs[0]
    return None if refused else all(map(torch.equal, *outs))


def tensors_of(result: Any) -> list[torch.Tensor]:
    if is_dataclass(result):
        result = [getattr(result, each.name) for each in fields(result)]
    return [each for each in (result if isinstance(result, list | tuple) else [result])
            if torch.is_tensor(each)]  # fmt: skip


def aliases_of(group: weft.Group, name: str, seed: int, draws: int) -> None:
    chance, made = random.Random(f"{seed} {name}"), None
    if name == "grouped_gemm":
        a, b = random_rows(group, 8, 128).bfloat16(), random_rows(group, 2, 128, 128).bfloat16()
        counts = {"counts": torch.tensor([5, 3]).int(), "offsets": torch.tensor([0, 5, 8]).int()}
        good = {"a": a, "b": b, **counts, "bias": random_rows(group, 2, 128), "out": a + 1}
        steps = [Step(grouped_gemm, lambda _: good)]
    else:
        made = MODES[name](group)
        steps = steps_of(group, name, made.what)
    outcomes = [aliased(chance, steps) for _ in range(draws)]
    assert False not in outcomes, (seed, outcomes.index(False))
    assert True in outcomes
    # A MoeAlltoAll reads copies, so that its result may lie anywhere.
    assert None in outcomes or name == "MoeAlltoAll"
    group.barrier()
    if made is not None:
        made.give_back()


# The short form draws the same arguments in every run, the long one others.
LENGTHS = [pytest.param(8, id="short"), pytest.param(80, id="long", marks=pytest.mark.slow)]


def seed_of(draws: int) -> int:
    seed = random.randrange(1 << 32) if draws >= 80 else 1
    print("seed", seed)
    return seed


@pytest.mark.parametrize("draws", LENGTHS)
@pytest.mark.parametrize("name", OBJECTS)
def test_calls_with_any_arguments_leave_the_group_right(ranks, name, draws):
    ranks(2, "threads")(calls_of, name, seed_of(draws), 4 * draws)


@pytest.mark.parametrize("draws", [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*OBJECTS, "grouped_gemm"])
def test_shared_memory_is_refused_or_harmless(ranks, name, draws):
    ranks(2, "threads")(aliases_of, name, seed_of(draws), draws)
