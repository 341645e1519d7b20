# SPDX-License-Identifier: Apache-2.0
"""No object of weft depends on torch's default device, dtype or modes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import weft
from tests.moe import layers
from tests.public import CONFIG, CPU, EXPERTS, FAMILIES, MODES, TOP_K, Results, clone_all, tokens
from weft.errors import Aborted
from weft.lowlatency import reference as reference_lowlatency
from weft.moe import Expert, ExpertWeights, FP8Expert, route, router_logits

DTYPES = [torch.float64, torch.bfloat16]


@dataclass
class Alone:
    rank: int
    device: torch.device = CPU


@contextmanager
def setting(get: Callable[[], Any], change: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    # torch.device() is what torch.set_default_device does, for as long.
    with setting(torch.get_default_dtype, torch.set_default_dtype, dtype), torch.device(device):
        yield


DETERMINISTIC = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
# State of a caller that may surround any call.
STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "deterministic algorithms": lambda: setting(*DETERMINISTIC, True),
    "two threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, 2),
}


def flat(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def differ(got: Results, want: Results) -> list[int]:
    """Return the indices of results that differ in bits, shape, dtype or device."""
    assert len(got) == len(want) > 0
    kinds = [[(t.shape, t.dtype, t.device) for t in each] for each in (got, want)]
    same = [
        a == b and torch.equal(flat(x), flat(y))
        for a, b, x, y in zip(*kinds, got, want, strict=True)
    ]
    return [number for number, equal in enumerate(same) if not equal]


def differing(group: weft.Group, names: list[str], device: str) -> dict[str, list[list[int]]]:
    result: dict[str, list[list[int]]] = {}
    for name in names:
        plain = MODES[name](group)
        want = plain.call()
        result[name] = []
        for state in STATES.values():
            with state():
                result[name].append(differ(plain.call(), want))
        plain.give_back()
        with torch.autocast("cpu", torch.bfloat16):
            made = MODES[name](group)
            result[name].append(differ(made.call(), want))
        made.give_back()
        for dtype in DTYPES:
            with defaults(device, dtype):
                made = MODES[name](group)
                got = made.call()
                made.give_back()
            result[name].append(differ(got, want))
        with torch.inference_mode():
            made = MODES[name](group)
            first = made.call()
        result[name] += [differ(first, want), differ(made.call(), want)]
        made.give_back()
    return result


def meet_and_abort(group: weft.Group) -> tuple[list[Any], str]:
    """Make a group over torch.distributed and abort it; the abort uses a tensor."""
    with defaults("meta", torch.float64):
        other = weft.Group.from_torch(group.process_group())
        met = other.all_gather([group.rank, "x" * group.rank])
        other.close()
        made = MODES["AllToAll pull"](group)
        made.call()
        if group.rank == 0:
            made.what.abort()
        group.barrier()
        with pytest.raises(Aborted) as reported:
            made.call()
        group.barrier()
        made.give_back()
    return met, str(reported.value)


def test_groups_and_aborts_do_not_depend_on_torchs_defaults(ranks: Callable[..., Any]) -> None:
    for rank, (met, reported) in enumerate(ranks(2, "cpu")(meet_and_abort)):
        assert met == [[0, ""], [1, "x"]]
        assert ("rank 0" in reported) if rank else ("this rank, 0" in reported)


def meanings() -> Results:
    """Return the results of all plain-torch code: references, router, experts, weights."""
    group: Any = Alone
    everyone = [tokens(group(rank)) for rank in range(2)]
    xs, ids, weights = ([each[i] for each in everyone] for i in range(3))
    placement = weft.Placement.blocks(EXPERTS, 2)
    payloads = [(x,) for x in xs]
    received = weft.reference.dispatch(
        payloads, ids, [weights[0], None], placement, rank=1, max_tokens=8
    )
    loads = weft.reference.expert_load(ids[0], EXPERTS)
    y = weft.reference.identity_experts(received, torch.bfloat16).nan_to_num()
    returned = weft.reference.identity_round_trip(
        xs[0], ids[0], None, placement, ranks=2, combine_dtype="fp8"
    )
    result = [received.x, received.ids, received.weights, received.counts, loads, y, returned]
    for word in ("fp8", "mxfp8"):
        result += weft.reference.quantize(xs[0], word)
    for scale in ("fp32_row", "ue8m0"):
        low = reference_lowlatency.dispatch(xs, ids, placement, rank=0, max_tokens=8, scale=scale)
        result += clone_all(low.x, low.scales, low.counts, low.source, low.ranges)
    rows = xs[0][:, None].expand(-1, TOP_K, -1)
    for reduce in ("receiver", "sender"):
        result.append(reference_lowlatency.combine(rows, ids[0], None, placement, reduce=reduce))
    size = min(map(len, xs))
    parts, weight = [x[:size] for x in xs], xs[1][0].abs()
    for quant in (None, weft.FP8Token(), weft.FP8Group(128), weft.FP8Group(128, scale="ue8m0")):
        sums = weft.reference.allreduce_fused(parts, parts[0], weight, quant=quant)
        result += clone_all(sums.out, sums.residual, sums.norm, sums.quant, sums.scale)
    result.append(weft.reference.finalize_moe(weft.MoEFinalize(xs[0], ids[1].int() % size)))
    made = [Expert.seeded(CONFIG, e) for e in range(EXPERTS)]
    stacked = ExpertWeights.stack(CONFIG, made)
    blocks = stacked.to_fp8()
    result += clone_all(blocks.gate_up, blocks.down, blocks.gate_up_scale, blocks.down_scale)
    shared = FP8Expert.from_expert(made[0])(xs[0])
    result.append(
        weft.reference.moe_layer(
            xs[0], ids[0], weights[0], stacked.gate_up, stacked.down, shared=shared,
            placement=placement,
        )
    )  # fmt: skip
    for name in sorted(layers.CONFIGS):
        routing = layers.CONFIGS[name].routing
        correction = torch.ones(EXPERTS, dtype=torch.float32, device=CPU) * 0.1
        logits = router_logits(
            xs[0][:, :EXPERTS], torch.eye(EXPERTS, dtype=torch.float32, device=CPU)
        )
        few = torch.tensor([3], dtype=torch.int32, device=CPU)
        inputs = correction if routing.correction else None
        result += route(routing, logits, correction=inputs, num_tokens=few)
    return result


def test_no_result_depends_on_the_callers_state_or_torchs_defaults() -> None:
    want = meanings()
    others: list[Any] = [partial(defaults, "meta", dtype) for dtype in DTYPES]
    for state in (*STATES.values(), *others):
        with state():
            assert differ(meanings(), want) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("device", "default"), [("cpu", "meta"), pytest.param("cuda", "cuda", marks=pytest.mark.gpu(2))]
)
def test_no_object_depends_on_torchs_defaults_or_inference_mode(
    ranks: Callable[..., Any], family: str, device: str, default: str
) -> None:
    names = [name for name in MODES if name.split()[0] == family]
    for result in ranks(2, device)(differing, names, default, timeout=900.0):
        assert result == {name: [[]] * (len(STATES) + 1 + len(DTYPES) + 2) for name in names}
