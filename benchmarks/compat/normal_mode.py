"""Time of deep_ep's normal mode as weft serves it: dispatch and combine, each checked first.

Usage: normal_mode.py OUT.json [--device cpu|cuda] [--ranks N] [--tokens N] [--hidden N] [--top-k N]
                      [--experts N] [--samples N]

With a handle, with a bound of rows, and combine: CUDA graphs of 50 calls; with new counts, for
which the host waits: eager. The median of a call on each rank, and the slowest rank's. On CPU ranks
the host's clock.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weft
from weft.bench.clock import Calls, measure
from weft.bench.machine import describe_code, describe_machine, machine_line
from weft.bench.routing import make_ids
from weft.compat.deep_ep import Buffer

# us, deep_ep v1 with 24 SMs at 4096 tokens, hidden 7168, top 8 of 256 experts, bfloat16, on 8 x
# H200 (2026-11-20, torch 2.11): graphs of 50 calls, median of a call, maximum over ranks.
RECORDED = {
    ("perfect", "dispatch, with a handle"): 1542.5,
    ("perfect", "combine"): 1367.5,
    ("uniform", "dispatch, with a handle"): 995.8,
    ("uniform", "combine"): 981.6,
}
GPU = "NVIDIA H200"


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes and routing of one measurement; `weft.bench.routing` says what the routings are."""

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    routing: str
    seed: int = 1

    def is_recorded(self, gpus: list[str]) -> bool:
        """Was deep_ep measured at these sizes, on GPUs like these?"""
        sizes = (self.ranks, self.tokens, self.hidden, self.top_k, self.experts)
        return sizes == (8, 4096, 7168, 8, 256) and set(gpus) == {GPU}

    def rows(self, rank: int, device: torch.device) -> torch.Tensor:
        """bfloat16 `[tokens, hidden]` of a rank, the same wherever they are drawn."""
        generator = torch.Generator(device).manual_seed(self.seed * 1000 + rank)
        size = (self.tokens, self.hidden)
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    def ids(self, rank: int, device: torch.device) -> torch.Tensor:
        """int64 `[tokens, top_k]` of a rank."""
        return make_ids(self, self.tokens, rank).long().to(device)


def fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and one float32 scale for 128 columns."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scales = blocks.abs().amax(dim=-1).clamp(min=1e-4) / 448
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2), scales


def times(group: weft.Group, cases: list[Case], samples: int) -> list[dict[str, Any]]:
    """Medians of this rank's calls, in us."""
    buffer = Buffer(group, explicitly_destroy=True)
    found = [row for case in cases for row in timed(group, buffer, case, samples)]
    buffer.check()
    group.barrier()
    buffer.destroy()
    return found


def timed(group: weft.Group, buffer: Buffer, case: Case, samples: int) -> list[dict[str, Any]]:
    """Medians of one case."""
    device = group.device
    x, ids = case.rows(group.rank, device), case.ids(group.rank, device)
    weights = torch.rand(ids.shape, dtype=torch.float32, device=device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, case.experts)
    layout: dict[str, Any] = {
        **{"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank},
        **{"num_tokens_per_expert": per_expert, "topk_idx": ids, "topk_weights": weights},
    }
    bound = case.ranks * case.tokens
    got, _, _, _, handle, _ = buffer.dispatch(x, **layout)
    assert handle is not None
    assert isinstance(got, torch.Tensor)
    check_rows(group, case, got, lambda rows: rows)
    out, _, _ = buffer.combine(got, handle)
    copies = in_rank.sum(1, keepdim=True)
    if not torch.equal(out, (x.float() * copies + 0.0).bfloat16()):
        raise RuntimeError(f"rank {group.rank}: combine returned other sums than torch's")
    q = fp8(x)
    got_q = buffer.dispatch(q, handle=handle)[0]
    check_rows(group, case, got_q[0].view(torch.uint8), lambda rows: fp8(rows)[0].view(torch.uint8))
    check_rows(group, case, got_q[1], lambda rows: fp8(rows)[1])
    calls: dict[tuple[str, str], tuple[Callable[[], object], bool]] = {
        ("bf16", "layout"): (lambda: buffer.get_dispatch_layout(ids, case.experts), True)
    }
    for dtype, sent in (("bf16", x), ("fp8", q)):
        calls |= {
            (dtype, "dispatch, with a handle"): (
                lambda sent=sent: buffer.dispatch(sent, handle=handle),
                True,
            ),
            (dtype, "dispatch, with a bound of rows"): (
                lambda sent=sent: buffer.dispatch(sent, **layout, num_worst_tokens=bound),
                True,
            ),
            (dtype, "dispatch, with new counts"): (
                lambda sent=sent: buffer.dispatch(sent, **layout),
                False,
            ),
        }
    calls["bf16", "combine"] = (lambda: buffer.combine(got, handle), True)
    rows = []
    for (dtype, call), (step, graph) in calls.items():
        taken = measure(group, Calls.of(step, graph=graph), samples=samples, graph=True)
        us = statistics.median(taken.us["call"])
        row = {"routing": case.routing, "dtype": dtype, "call": call, "us": us}
        rows.append({**row, "rows": len(got), "method": taken.method})
    return rows


def check_rows(
    group: weft.Group,
    case: Case,
    got: torch.Tensor,
    sent: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Require what all ranks sent here, in the order of rank and token. Raises RuntimeError."""
    at, local = 0, case.experts // case.ranks
    for rank in range(case.ranks):
        here = (case.ids(rank, group.device) // local == group.rank).any(dim=1)
        want = sent(case.rows(rank, group.device))[here]
        if not torch.equal(got[at : at + len(want)], want):
            raise RuntimeError(f"rank {group.rank} received other rows than rank {rank} sent")
        at += len(want)
    if at != len(got):
        raise RuntimeError(f"rank {group.rank} received {len(got)} rows, and {at} were sent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs, or 2 CPU ranks")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=11)
    asked = parser.parse_args()
    on_gpus = asked.device == "cuda"
    ranks = asked.ranks or (torch.cuda.device_count() if on_gpus else 2)
    sizes = (ranks, asked.tokens, asked.hidden, asked.top_k, asked.experts)
    cases = [Case(*sizes, routing) for routing in ("perfect", "uniform")]
    of_rank = weft.launch(
        times, cases, asked.samples, ranks=ranks, device=asked.device, timeout=1500.0
    )
    gpus = [torch.cuda.get_device_name(rank) for rank in range(ranks)] if on_gpus else []
    rows = []
    for same in zip(*of_rank, strict=True):
        slowest = max(same, key=lambda row: row["us"])
        recorded = None
        if slowest["dtype"] == "bf16" and cases[0].is_recorded(gpus):
            recorded = RECORDED.get((slowest["routing"], slowest["call"]))
        rows.append({**slowest, "us_of_rank": [row["us"] for row in same], "deep_ep_us": recorded})
    machine = describe_machine(gpus)
    record = {
        "what": __doc__.split("\n")[0],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "code": describe_code(),
        **dict(zip(("ranks", "tokens", "hidden", "top_k", "experts"), sizes, strict=True)),
        "rows": rows,
    }
    asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(machine_line(machine))
    print(f"{ranks} ranks, {asked.tokens} tokens, hidden {asked.hidden}, "
          f"top {asked.top_k} of {asked.experts}; us, slowest rank")  # fmt: skip
    for row in rows:
        text = f"{row['routing']:8} {row['dtype']:5} {row['call']:31} {row['us']:10.1f}"
        beside = row["deep_ep_us"]
        print(text if beside is None else f"{text}   deep_ep {beside}, {beside / row['us']:.2f}x")


if __name__ == "__main__":
    main()
