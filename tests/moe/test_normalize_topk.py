# SPDX-License-Identifier: Apache-2.0
"""Routings of callers: every form is converted to dispatch's, equally on all devices."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from weft.moe import Replicas, Routed, normalize_topk
from weft.moe.routing.kernels import DTYPES, NormalizeArgs
from weft.moe.routing.kernels import NORMALIZE_THREADS as THREADS
from weft.placement import NO_SUCH_EXPERT

EXPERTS, TOKENS, TOP_K = 6, 53, 3  # 159 entries: two CTAs, the second not full
REPLICAS = Replicas((0, 1, 2, 3, 4, 5, 0, 0, 5, 2), ranks=2)
Cases = list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]


def table(device: str) -> torch.Tensor:
    counts, physical = REPLICAS.table(torch.device(device))
    return torch.cat([counts[:, None], physical], dim=1).contiguous()


def cases(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, EXPERTS, (TOKENS, TOP_K), generator=generator)
    weights = torch.rand(ids.shape, generator=generator)
    weights[::4, 1] = 0.0
    odd = ids.clone()
    odd[5] = torch.tensor([2**31 - 1, -(2**31), 2**32 + 3])
    odd[6] = torch.tensor([-2, EXPERTS, -(2**63)])
    odd[7] = torch.tensor([2**63 - 1, 2**31, EXPERTS + 1])
    some = torch.tensor([TOKENS - 9], dtype=torch.int32)
    for inputs, more in (
        (ids.int(), {"padding_id": 4}),
        (ids, {"padding_id": EXPERTS, "skip_zero_weights": True}),
        (odd, {"num_tokens": some}),
        (odd, {"replicas": table(device)}),
        (odd, {"replicas": table(device), "rank": 5, "padding_id": EXPERTS}),
        (ids.int(), {"num_tokens": torch.tensor([-1], dtype=torch.int32)}),
        (ids[:0], {"padding_id": 4}),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            reported = {
                k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in more.items()
            }
            yield inputs.to(device), weights[: len(inputs)].to(device, dtype), reported


def wanted(ids: torch.Tensor, weights: torch.Tensor, options: dict[str, Any]) -> Routed:
    out_ids, out = ids.tolist(), weights.float().tolist()
    count = int(options.get("num_tokens", torch.tensor([TOKENS])))
    for t, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            none = expert in (-1, options.get("padding_id", -1)) or t >= count
            if none or (options.get("skip_zero_weights") and out[t][k] == 0):
                out_ids[t][k], out[t][k] = -1, 0.0
            elif "replicas" in options:
                valid = 0 <= expert < EXPERTS
                slots = REPLICAS.physical_on()[expert] if valid else (NO_SUCH_EXPERT,)
                out_ids[t][k] = slots[(t + options.get("rank", 0)) % len(slots)]
            elif not -(2**31) <= expert < 2**31:
                out_ids[t][k] = NO_SUCH_EXPERT
    shape = (len(ids), TOP_K)
    result = torch.tensor(out_ids, dtype=torch.int32).view(shape)
    return Routed(result, torch.tensor(out, dtype=torch.float32).view(shape))


def hold(run: Callable[..., Routed], device: str) -> None:
    for ids, weights, options in cases(device):
        result, right = run(ids, weights, **options), wanted(ids.cpu(), weights.cpu(), options)
        assert torch.equal(result.ids.cpu().int(), right.ids), options
        assert torch.equal(result.weights.cpu(), right.weights), options


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_form(device):
    hold(normalize_topk, device)


@pytest.mark.slow
def test_the_kernel_on_a_cpu():
    text = "#include <weft/moe/routing/normalize_topk.cuh>\n" + entry(
        "normalize", "NormalizeArgs", "normalize_topk", ranks=None
    )
    kernels = Emulated(build_library(emulated_tree(), text))

    def run(ids: torch.Tensor, weights: torch.Tensor, **options: Any) -> Routed:
        result = torch.full(ids.shape, -77, dtype=torch.int32)
        out = torch.full(ids.shape, -77.0)
        tensors = {name: options.get(name) for name in ("num_tokens", "replicas")}
        replicas = tensors["replicas"]
        args = NormalizeArgs(
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            out_ids=result.data_ptr(),
            out_weights=out.data_ptr(),
            padding_id=options.get("padding_id", -1),
            entries=ids.numel(),
            top_k=TOP_K,
            ids_bytes=ids.itemsize,
            dtype=DTYPES[weights.dtype],
            experts=0 if replicas is None else len(replicas),
            width=0 if replicas is None else replicas.shape[1],
            rank=options.get("rank", 0),
            skips_zeros=options.get("skip_zero_weights", False),
            **{name: 0 if t is None else t.data_ptr() for name, t in tensors.items()},
        )
        if args.entries:
            kernels.launch("normalize", args, -(-args.entries // THREADS), THREADS)
        return Routed(result, out)

    hold(run, "cpu")


def test_a_normalised_routing_is_returned_unchanged():
    ids, weights = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
    result = normalize_topk(ids, weights)
    assert result.ids is ids
    assert result.weights is weights
