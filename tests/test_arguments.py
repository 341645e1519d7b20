# SPDX-License-Identifier: Apache-2.0
"""Every argument of every operator call, with every value that it must refuse."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.hostile import (
    AMOUNT,
    ANY_DTYPE,
    CALLED,
    COUNT,
    DTYPE,
    FLAG,
    REAL,
    SECONDS,
    TENSOR,
    TEXT,
    THING,
    WHOLE,
    WORD,
    Kind,
    Row,
    Stranger,
    assert_complete,
    assert_refusals,
    kind_of_values,
)
from weft.errors import InvalidArgument

pytestmark = [  # torch's own, of the tensors that are refused here
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
]
BF16, HIDDEN, TOKENS = torch.bfloat16, 128, 3
SIZES: dict[str, Any] = {"max_tokens": 8, "top_k": 2, "num_experts": 4, "hidden": HIDDEN}
PAYLOAD = weft.Payload((8,), BF16)


def named(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


MAP = kind_of_values(
    *("0011", b"0011", 7, [0, 1], [0, 0, 1, 2], [0, 0, 1, -1], [0, 0, 1, 1.0], [True] * 4),
    *(["0"] * 4, {0: 1}, torch.zeros(4), torch.zeros((2, 2), dtype=torch.int32), np.zeros(4)),
    *(torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int32, device="meta")),
    *([[0], [0], [1], [1]], [0, 0, 1, None]),
).optional()
ROWS = kind_of_values(
    *("x", 7, [], PAYLOAD, ["x"], [None], [PAYLOAD] * 9, [weft.Payload((0,), BF16)]),
    *([weft.Payload([8], BF16)], [weft.Payload((8.0,), BF16)]),  # type: ignore[arg-type]
    *([weft.Payload((8,), "bfloat16")], [weft.Payload((8,), torch.quint8)]),  # type: ignore[arg-type]
).optional()
SMS = kind_of_values(*WHOLE, 0, -1, 4).optional()  # a CPU group has none to give
RANK = kind_of_values(*WHOLE, -1, 2).optional()
GROUP = THING
X = Kind(lambda good: [*TENSOR.values(good), [good, good], [None], [good.tolist()]])
WORDS = named(WORD.optional(), "quantize combine_dtype")
ROUTED = {"top_k": kind_of_values(*WHOLE, 0, -1, 33, 5), "dtype": DTYPE, "expert_map": MAP}
A2A = {
    **{"group": GROUP, "max_tokens": COUNT, "payloads": ROWS, **ROUTED},
    "num_experts": kind_of_values(*WHOLE, 0, -1, 1, 1 << 17),
    "hidden": kind_of_values(*WHOLE, 0, -1, 12, 1 << 21),
}
WIRES = {**WORDS, "combine": WORD.optional(), "reduce": WORD, "stats": AMOUNT}
LOW = {
    **{**WORDS, **ROUTED, "scale": WORD, "reduce": WORD.optional(), "combine": WORD},
    "max_tokens": kind_of_values(*WHOLE, 0, -1, 8193),
    "hidden": kind_of_values(*WHOLE, 0, -1, 100, 1 << 17),
    "num_experts": kind_of_values(*WHOLE, 0, -1, 1, 4097),
    "group_size": kind_of_values(*WHOLE, 0, -1, 16, 256),
    "slots": kind_of_values(*WHOLE, 0, -1, 3),
    "profile": FLAG,
}
TIMES = named(SECONDS, "timeout first_timeout")
LAUNCHED = {"num_sms": SMS, "programmatic_launch": FLAG}


def inputs(group: weft.Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn((TOKENS, HIDDEN), generator=generator).to(BF16)
    ids = torch.tensor([[0, 3], [2, -1], [1, 2]], dtype=torch.int32)
    return x, ids, torch.rand((TOKENS, 2), generator=generator)


@contextmanager
def unchanged(call: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Assert that refusals leave a round's result as it was."""
    before = call()
    yield
    assert torch.equal(call(), before)


def tried(row: Row) -> None:
    assert_complete(row)
    assert assert_refusals(row) > 0


def sized_alltoall(group: weft.Group) -> None:
    built = {**TIMES, **LAUNCHED, "split_phase": FLAG, "profile": FLAG}
    tried(Row(weft.AllToAll, {"group": group, **SIZES}, {**A2A, **WIRES, **built}))
    sizes = {"ranks": kind_of_values(*WHOLE, 0, -1, 73), **A2A, **WIRES}
    kinds = {name: kind for name, kind in sizes.items() if name != "group"}
    tried(Row(weft.AllToAll.memory_bytes, {"ranks": 2, **SIZES}, kinds))
    weft.AllToAll(group, **{**SIZES, "max_tokens": np.int64(8)}).close()


def called_alltoall(group: weft.Group) -> None:
    x, ids, weights = inputs(group)
    stats, count = torch.zeros(2, dtype=torch.int32), torch.tensor([TOKENS], dtype=torch.int32)
    options = {**SIZES, "split_phase": True, "stats": 2}
    with weft.AllToAll(group, **options) as a2a:

        def whole() -> torch.Tensor:
            got = a2a.dispatch(x, ids, weights, stats=stats)
            a2a.output().copy_(weft.reference.identity_experts(got, x.dtype))
            return a2a.combine().clone()

        with unchanged(whole):
            good = {"x": x, "topk_ids": ids, "topk_weights": weights}
            kinds: dict[str, Kind] = {
                **{"x": X, **named(TENSOR, "topk_ids stats")},
                **named(TENSOR.optional(), "topk_weights num_tokens"),
                "rows": kind_of_values(*WHOLE, 0, -1, TOKENS - 1, 9).optional(),
            }
            kwargs = {**good, "num_tokens": count, "stats": stats}
            tried(Row(a2a.dispatch, kwargs, kinds))
            tried(Row(a2a.dispatch_send, kwargs, kinds))
            tried(Row(a2a.output, {}, {"rows": kind_of_values(*WHOLE, 0, -1, 9).optional()}))
            tried(Row(a2a.global_ids, {"local_ids": ids}, {"local_ids": THING}))
            tried(Row(a2a.history, {"rank": 0}, {"rank": RANK}))
            tried(Row(a2a.timeline, {"rank": 0}, {"rank": RANK}))
            a2a.dispatch(**kwargs)
            result = {"y": a2a.output().clone(), "out": torch.zeros_like(x), "add": x}
            back = {name: TENSOR.optional() for name in result}
            tried(Row(a2a.combine, result, back))
            tried(Row(a2a.combine_send, {"y": result["y"]}, {"y": TENSOR.optional()}))
            a2a.combine_send()
            del back["y"], result["y"]
            tried(Row(a2a.combine_recv, result, back))
            a2a.combine_recv()
            a2a.check()
        group.barrier()


def sized_low_latency(group: weft.Group) -> None:
    kinds = {"group": GROUP, **LOW, **TIMES, **LAUNCHED, "split_phase": FLAG}
    tried(Row(weft.LowLatencyAllToAll, {"group": group, **SIZES}, kinds))
    sizes = {"ranks": kind_of_values(*WHOLE, 0, -1, 73), **LOW}
    tried(Row(weft.LowLatencyAllToAll.memory_bytes, {"ranks": 2, **SIZES}, sizes))


def called_low_latency(group: weft.Group) -> None:
    x, ids, weights = inputs(group)
    with weft.LowLatencyAllToAll(
        group, **SIZES, quantize=None, split_phase=True, profile=True
    ) as a2a:
        size = (a2a.num_local_experts, a2a.ep_size * a2a.max_tokens, HIDDEN)
        y = torch.ones(size, dtype=BF16)

        def whole() -> torch.Tensor:
            got = a2a.dispatch(x, ids, weights)
            return a2a.combine(got.x.clone(), ids, weights, got.handle)

        with unchanged(whole):
            good = {"x": x, "topk_ids": ids, "topk_weights": weights}
            kinds = {"x": TENSOR, "topk_ids": TENSOR, "topk_weights": TENSOR.optional()}
            tried(Row(a2a.dispatch, good, kinds))
            tried(Row(a2a.dispatch_send, good, kinds))
            tried(Row(a2a.history, {"rank": 0}, {"rank": RANK}))
            paths = kind_of_values(7, True, [], b"x", torch.zeros(2))
            tried(Row(a2a.dump_trace, {"path": "trace.json"}, {"path": paths}))
            handle = a2a.dispatch(x, ids, weights).handle
            kwargs = {
                **{"y": y, "topk_ids": ids, "topk_weights": weights, "handle": handle},
                **{"out": torch.zeros_like(x), "add": x},
            }
            back = {
                **{"handle": THING, **named(TENSOR, "y topk_ids")},
                **named(TENSOR.optional(), "topk_weights out add"),
            }
            tried(Row(a2a.combine, kwargs, back))
            tried(Row(a2a.combine_send, kwargs, back))
            a2a.combine(**kwargs)
            a2a.check()
        group.barrier()


def sized_all_reduce(group: weft.Group) -> None:
    kinds = {
        "group": GROUP,
        "max_tokens": COUNT,
        "hidden": kind_of_values(*WHOLE, 0, -1, 12, 1 << 20),
        "dtype": DTYPE,
        "backends": kind_of_values(
            "oneshot", 7, [], ["ring"], [3], [["twoshot"]], ["twoshot"] * 2
        ).optional(),
        "epilogue_at": WORD,
        "missing": WORD,
        **TIMES,
        "programmatic_launch": FLAG,
    }
    passed = {"group": group, "max_tokens": 8, "hidden": HIDDEN}
    tried(Row(weft.AllReduce, passed, kinds))
    names = ("max_tokens", "hidden", "dtype", "epilogue_at", "missing")
    sizes = {"ranks": kind_of_values(*WHOLE, 0, -1, 73), **{name: kinds[name] for name in names}}
    passed = {"ranks": 2, "max_tokens": 8, "hidden": HIDDEN}
    tried(Row(weft.AllReduce.memory_bytes, passed, sizes, {"ranks": "ranks"}))
    tried(
        Row(
            weft.FP8Group,
            {"size": 128, "scale": "fp32"},
            {"size": kind_of_values(*WHOLE, 0, -1, 64), "scale": WORD},
        )
    )


def called_all_reduce(group: weft.Group) -> None:
    x, _, _ = inputs(group)
    weight, residual = torch.ones(HIDDEN, dtype=BF16), torch.ones_like(x)
    with weft.AllReduce(group, max_tokens=8, hidden=HIDDEN) as reduce:

        def whole() -> torch.Tensor:
            result = reduce.fused(x, residual=residual, weight=weight).norm
            assert result is not None
            return result

        with unchanged(whole):
            expected = Kind(
                lambda good: [v for v in TENSOR.values(good) if v is not True], none=True
            )
            kinds: dict[str, Kind] = {
                **named(TENSOR, "x residual weight"),
                **named(THING.optional(), "quant prologue"),
                **named(expected, "out residual_out norm_out quant_out scale_out"),
                "eps": kind_of_values(*REAL.hostile(1e-6), -1e-6),
                "weight_bias": REAL,
                "backend": kind_of_values(
                    "nope", 3, True, ["auto"], {}, torch.zeros(2), None, "oneshot "
                ),
            }
            scale = weft.FP8Group(128)
            kwargs = {
                **{"x": x, "residual": residual, "weight": weight, "eps": 1e-6, "weight_bias": 0.0},
                **{"out": torch.zeros_like(x), "residual_out": torch.zeros_like(x)},
                **{"norm_out": torch.zeros_like(x), "quant": scale, "backend": "auto"},
                "quant_out": torch.zeros(x.shape, dtype=torch.float8_e4m3fn),
                "scale_out": torch.zeros((TOKENS, 1)),
            }
            reduce.fused(**kwargs)  # so that the repeated form of this call is kept
            row = Row(reduce.fused, kwargs, kinds)
            tried(row)
            for name in ("rows", "index", "scales", "shared"):
                parts = {
                    "rows": x.clone(),
                    "index": torch.zeros((TOKENS, 2), dtype=torch.int32),
                    "scales": torch.ones((TOKENS, 2)),
                    "shared": x,
                }
                for value in TENSOR.values(parts[name]):
                    with pytest.raises(InvalidArgument, match=rf"prologue\.{name}"):
                        reduce.fused(prologue=weft.MoEFinalize(**{**parts, name: value}))
            del parts["scales"]
            for value in (*REAL.hostile(1.0), 1e39):
                with pytest.raises(InvalidArgument, match=r"prologue\.routed_scaling_factor is"):
                    reduce.fused(prologue=weft.MoEFinalize(**parts, routed_scaling_factor=value))
            for value in TENSOR.values(torch.ones(1)):
                with pytest.raises(InvalidArgument, match=r"quant\.scale"):
                    reduce.fused(x, weight=weight, quant=weft.FP8Static(value))
            tokens = kind_of_values(*WHOLE[:-3], -1)
            explained = {"tokens": tokens, "norm": FLAG}
            tried(Row(reduce.explain, {"tokens": 3, "norm": True}, explained))
            tried(Row(reduce.history, {"rank": 0}, {"rank": RANK}))
            reduce.check()
        group.barrier()


def groupings(group: weft.Group) -> None:
    x, ids, weights = inputs(group)
    whole = kind_of_values(*WHOLE, 0, -1)
    with weft.AllToAll(group, **SIZES, split_phase=True, combine="push") as a2a:
        kinds = {
            "a2a": THING,
            "max_rows": whole.optional(),
            "align": kind_of_values(*WHOLE, 0, -1, 1 << 17),
            "layout": WORD,
            "programmatic_launch": FLAG,
        }
        tried(Row(weft.ExpertGroups, {"a2a": a2a}, kinds))
        del kinds["programmatic_launch"]
        tried(Row(weft.ExpertGroups.memory_bytes, {"a2a": a2a}, kinds))
        groups = weft.ExpertGroups(a2a)

        def played() -> torch.Tensor:
            grouped = groups.gather(a2a.dispatch(x, ids, weights))
            groups.send(grouped.x)
            return a2a.combine_recv()

        with unchanged(played):
            received = a2a.dispatch(x, ids, weights)
            tried(Row(groups.gather, {"received": received}, {"received": THING}))
            y = groups.gather(received).x.clone()
            tried(Row(groups.scatter, {"y": y}, {"y": TENSOR}))
            tried(Row(groups.send, {"y": y}, {"y": TENSOR}))
            groups.send(y)
            a2a.combine_recv()
            a2a.check()
        groups.close()
        group.barrier()


def meetings(group: weft.Group) -> None:
    times = SECONDS.optional()
    values = kind_of_values({1, 2}, Stranger(), torch.zeros(2), {"a": {1, 2}})
    tried(Row(group.all_gather, {"value": 1}, {"value": values.optional(), "timeout": times}))
    tried(Row(group.barrier, {}, {"timeout": times}))
    wrong = kind_of_values("x", 7, True, [], InvalidArgument).optional()
    undo = CALLED.optional()
    voted = {"error": wrong, "action": TEXT, "undo": undo}
    tried(Row(group.vote, {"error": None, "action": "it"}, voted))
    tried(
        Row(group.run_collective, {"step": int, "action": "it"}, {"step": CALLED, "action": TEXT})
    )
    tried(
        Row(group.agree, {"value": 1, "label": "it"}, {"value": values.optional(), "label": TEXT})
    )
    fds = kind_of_values(*WHOLE, -1, 10**6)
    with open(os.devnull) as file:
        passed = {"fd": file.fileno()}
        tried(Row(group.exchange_fds, passed, {"fd": fds, "timeout": times}))
    tried(Row(group.abort, {"reason": "it"}, {"reason": TEXT}))
    sizes = kind_of_values(*WHOLE, 0, -1)
    tried(Row(weft.Heap.create, {"group": group, "size": 1 << 16}, {"group": THING, "size": sizes}))
    with weft.Heap.create(group, 1 << 16) as heap:
        tried(Row(heap.address, {"rank": 0}, {"rank": Kind(RANK.values)}))
        tried(Row(heap.header, {"rank": 0}, {"rank": RANK}))
        lists = kind_of_values("8", 7.0, [1.5], [True], [-8], {8: 1}, [1 << 40])
        kinds = {
            "shape": lists,
            "dtype": ANY_DTYPE,
            "offset": kind_of_values(*WHOLE, -1),
            "rank": RANK,
            "stride": kind_of_values("8", 7.0, [1.5], [True], [-8], [1, 1]).optional(),
        }
        passed = {"shape": (8,), "dtype": torch.int32, "offset": 0}
        tried(Row(heap.tensor, passed, kinds))
        assert heap.tensor((8,), torch.int32).tolist() == [0] * 8
        group.barrier()
    assert group.all_gather(group.rank) == list(range(group.size))


BODIES = (
    *(sized_alltoall, called_alltoall, sized_low_latency, called_low_latency),
    *(sized_all_reduce, called_all_reduce, groupings, meetings),
)


@pytest.mark.parametrize("body", BODIES)
def test_hostile_arguments_are_refused(ranks, body):
    ranks(2, "threads")(body)
