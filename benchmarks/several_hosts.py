# SPDX-License-Identifier: Apache-2.0
"""A round over several hosts on CPU ranks, beside a bare exchange of its bytes and an all-gather.

Hosts are network namespaces of this machine (tests/hosts/network.py; needs root). All four are
timed in turn in one run:

    round       dispatch and combine of weft.AllToAll, without experts
    two_parts   the same in two operators of half the tokens, by split_phase: the rows of one part
                cross while the other is inside its host, out and home
    bare        two all_to_all_single of the bytes that the round sends between hosts
    all_gather  dispatch by all-gather, combine by reduce-scatter, over all ranks

`load` is the load average after each. Ranks spin while they wait on their host, so figures
are worth something only where it is below the number of cores.

Usage: python benchmarks/several_hosts.py OUT.json [--rate 1gbit] [--rounds 10]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from tests.hosts.network import Network
from weft.bench.gathered import Gathered
from weft.bench.machine import describe_machine

TOKENS, HIDDEN, TOP_K, EXPERTS, RANKS = 512, 7168, 8, 64, 2
ROW = 2 * HIDDEN  # bytes, bfloat16
EACH = ("bare", "round", "two_parts", "all_gather")
SIZES: dict[str, Any] = {
    "max_tokens": TOKENS,
    "hidden": HIDDEN,
    "top_k": TOP_K,
    "num_experts": EXPERTS,
}


def timed(group: weft.Group, call: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each call, the slowest rank's."""
    call()
    times = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return [max(each) for each in zip(*group.all_gather(times), strict=True)]


def measure(group: weft.Group, _folder: Path, which: str, rounds: int) -> list[float]:
    """One of the four on this rank."""
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn((TOKENS, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand((TOKENS, EXPERTS), generator=generator).topk(TOP_K, dim=1).indices.int()
    weights = torch.rand((TOKENS, TOP_K), generator=generator)
    if which == "round":
        with weft.AllToAll(group, timeout=60.0, **SIZES) as a2a:
            out = torch.empty_like(x)

            def call() -> None:
                a2a.dispatch(x, ids, weights)
                a2a.combine(out=out)

            return timed(group, call, rounds)
    if which == "two_parts":
        sizes = SIZES | {"max_tokens": TOKENS // 2}
        made = [weft.AllToAll(group, timeout=60.0, split_phase=True, **sizes) for _ in range(2)]
        parts = [slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS)]
        outs = [torch.empty_like(x[part]) for part in parts]

        def call() -> None:
            for a2a, part in zip(made, parts, strict=True):
                a2a.dispatch_send(x[part], ids[part], weights[part])
            for a2a in made:
                a2a.dispatch_recv()
            for a2a in made:
                a2a.combine_send()
            for a2a, out in zip(made, outs, strict=True):
                a2a.combine_recv(out=out)

        times = timed(group, call, rounds)
        for a2a in made:
            a2a.close()
        return times
    if which == "bare":
        sent = torch.zeros((group.hosts, TOKENS * ROW), dtype=torch.uint8)
        came = torch.empty_like(sent)

        def call() -> None:
            for _ in range(2):
                dist.all_to_all_single(came, sent, group=group.rail)

        return timed(group, call, rounds)
    exchange = Gathered(group, **SIZES)

    def call() -> None:
        exchange.dispatch((x,), ids, weights)
        exchange.combine()

    return timed(group, call, rounds)


def run(hosts: int, rate: str | None, rounds: int) -> dict[str, Any]:
    """All four between so many hosts, and the bytes that a host sent in a round."""
    found: dict[str, Any] = {"hosts": hosts, "ranks_a_host": RANKS, "rate": rate}
    with Network(hosts) as network:
        if network.namespaces is None:
            raise SystemExit("no network namespaces here: run as root, with CAP_NET_ADMIN")
        if rate is not None:
            network.limit(rate)
        for which in (*EACH, *reversed(EACH)):
            before = network.sent(0)
            times = network.run(RANKS, f"{MODULE}:measure", which, rounds)[0]
            each = (network.sent(0) - before) / (1 + rounds) / RANKS / (hosts - 1)
            part = found.setdefault(which, {"ms": [], "load": [], "sent_rows_of_max_tokens": []})
            part["ms"] += times
            part["load"].append(os.getloadavg()[0])
            part["sent_rows_of_max_tokens"].append(each / (TOKENS * ROW))
    for which in EACH:
        found[which]["median_ms"] = statistics.median(found[which]["ms"])
    took = found["round"]["median_ms"]
    found["round_over_bare"] = took / found["bare"]["median_ms"]
    found["round_over_two_parts"] = took / found["two_parts"]["median_ms"]
    found["round_over_all_gather"] = took / found["all_gather"]["median_ms"]
    return found


MODULE = "benchmarks.several_hosts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", action="append", help="of every link, as tc says it; default all")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    results = [
        run(hosts, rate, given.rounds) for hosts in (2, 3) for rate in (given.rate or [None])
    ]
    for each in results:
        print({k: v for k, v in each.items() if not isinstance(v, dict)})
    sizes = SIZES | {"dtype": "bfloat16", "ranks_a_host": RANKS}
    report = {
        "machine": describe_machine([]),
        "sizes": sizes,
        "results": results,
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
