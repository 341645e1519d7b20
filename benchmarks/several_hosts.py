# SPDX-License-Identifier: Apache-2.0
"""Compare a round over several hosts of CPU ranks with a bare exchange and an all-gather.

Hosts are network namespaces of this machine (tests/hosts/network.py; needs root). The four are
timed in turns in one run:

    round       dispatch and combine of weft.AllToAll, without experts
    two_parts   the same in two operators of half the tokens, by split_phase: rows of one part cross
                the network while the other part is exchanged within its host
    bare        two all_to_all_single of the bytes that the round sends between hosts
    all_gather  dispatch by all-gather and combine by reduce-scatter, over all ranks

`load` is the load average after each. Ranks spin while they wait within their host, so times are
valid only if the load is below the number of cores.

Usage: python benchmarks/several_hosts.py OUT.json [--rate 1gbit] [--rounds 10]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
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
from weft.bench.collectives import CollectiveAllToAll
from weft.bench.machine import describe_machine
from weft.cli.namespaces import Namespaces, run_ip

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
    """Return the milliseconds of each call on the slowest rank."""
    call()
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return [max(each) for each in zip(*group.all_gather(times), strict=True)]


def measure(group: weft.Group, _folder: Path, which: str, rounds: int) -> list[float]:
    """Time one of the four on this rank."""
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
        operators = [
            weft.AllToAll(group, timeout=60.0, split_phase=True, **sizes) for _ in range(2)
        ]
        parts = [slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS)]
        outs = [torch.empty_like(x[part]) for part in parts]

        def call() -> None:
            for a2a, part in zip(operators, parts, strict=True):
                a2a.dispatch_send(x[part], ids[part], weights[part])
            for a2a in operators:
                a2a.dispatch_recv()
            for a2a in operators:
                a2a.combine_send()
            for a2a, out in zip(operators, outs, strict=True):
                a2a.combine_recv(out=out)

        times = timed(group, call, rounds)
        for a2a in operators:
            a2a.close()
        return times
    if which == "bare":
        sent = torch.zeros((group.hosts, TOKENS * ROW), dtype=torch.uint8)
        received = torch.empty_like(sent)

        def call() -> None:
            for _ in range(2):
                dist.all_to_all_single(received, sent, group=group.rail)

        return timed(group, call, rounds)
    exchange = CollectiveAllToAll(group, **SIZES)

    def call() -> None:
        exchange.dispatch((x,), ids, weights)
        exchange.combine()

    return timed(group, call, rounds)


def limit_links(spaces: Namespaces, hosts: int, rate: str) -> None:
    """Limit the rate at which each host sends and receives, such as "1gbit"."""
    for host in range(hosts):
        for namespace, link in (("switch", f"port{host}"), (host, "eth0")):
            tc = ["tc", "-n", spaces.get_name(namespace), "qdisc", "replace", "dev", link, "root"]
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            subprocess.run([*tc, *shape], check=True)


def read_sent_bytes(spaces: Namespaces, host: int) -> int:
    link = json.loads(run_ip("-n", spaces.get_name(host), "-s", "-j", "link", "show", "eth0"))[0]
    return int(link["stats64"]["tx"]["bytes"])


def run(hosts: int, rate: str | None, rounds: int) -> dict[str, Any]:
    """Run all four between hosts, and count the bytes that a host sent per round."""
    results: dict[str, Any] = {"hosts": hosts, "ranks_a_host": RANKS, "rate": rate}
    with Network(hosts) as network:
        if network.namespaces is None:
            raise SystemExit("no network namespaces here: run as root, with CAP_NET_ADMIN")
        if rate is not None:
            limit_links(network.namespaces, hosts, rate)
        for which in (*EACH, *reversed(EACH)):
            before = read_sent_bytes(network.namespaces, 0)
            times = network.run(RANKS, f"{MODULE}:measure", which, rounds)[0]
            sent = read_sent_bytes(network.namespaces, 0) - before
            each = sent / (1 + rounds) / RANKS / (hosts - 1)
            part = results.setdefault(which, {"ms": [], "load": [], "sent_rows_of_max_tokens": []})
            part["ms"] += times
            part["load"].append(os.getloadavg()[0])
            part["sent_rows_of_max_tokens"].append(each / (TOKENS * ROW))
    for which in EACH:
        results[which]["median_ms"] = statistics.median(results[which]["ms"])
    round_ms = results["round"]["median_ms"]
    results["round_over_bare"] = round_ms / results["bare"]["median_ms"]
    results["round_over_two_parts"] = round_ms / results["two_parts"]["median_ms"]
    results["round_over_all_gather"] = round_ms / results["all_gather"]["median_ms"]
    return results


MODULE = "benchmarks.several_hosts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", action="append", help="rate of every link for tc; default: all")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    results = [run(hosts, rate, args.rounds) for hosts in (2, 3) for rate in (args.rate or [None])]
    for each in results:
        print({k: v for k, v in each.items() if not isinstance(v, dict)})
    sizes = SIZES | {"dtype": "bfloat16", "ranks_a_host": RANKS}
    report = {
        "machine": describe_machine([]),
        "sizes": sizes,
        "results": results,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
