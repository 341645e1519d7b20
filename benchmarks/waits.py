# SPDX-License-Identifier: Apache-2.0
"""Cost of recorded waits: the same calls by two versions of weft, in turns.

    git archive BASE weft | tar -x -C build/base
    python benchmarks/waits.py build/base --ranks 4 --json waits.json
    python benchmarks/waits.py build/base --ranks 2 --threads --json waits.json

Prints the median and the shortest time of a round of each operator and size, and the ratios of the
two versions. Processes that share a GPU take turns on it, and show no cost below 1 %. With
--threads the ranks are threads of one process on one GPU: their kernels run at the same time, each
on its own part of the SMs. Peers are then as near as the GPU's own memory.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENS = (1, 8, 128)
REDUCED_TOKENS = (*TOKENS, 1024)  # of the all-reduce; the last is of its bulk kernel
REPLAYS, ROUNDS = 40, 50  # of a turn; of a graph
LIMITS = {"timeout": 10.0, "first_timeout": 30.0}
_capture_lock = threading.Lock()  # torch captures on one stream


def measure(
    group: Any, num_sms: int | None = None, *, only_all_reduce: bool = False
) -> dict[str, list[float]]:
    """Return the times of rounds in microseconds, by operator and tokens.

    num_sms: SMs that this rank may use; None for all.
    """
    import torch

    import weft
    from weft.bench import harness

    device, times = group.device, {}
    sizes = {"max_tokens": max(TOKENS), "top_k": 8, "num_experts": 256, "hidden": 7168}
    sizes |= {"num_sms": num_sms, **LIMITS}
    stream = torch.cuda.current_stream()

    def time_rounds(name: str, body: Any) -> None:
        def rounds() -> None:
            for _ in range(ROUNDS):
                body()

        body()
        stream.synchronize()
        group.barrier()
        with _capture_lock:
            graph = harness.capture(rounds)
        samples = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            group.barrier()
            start.record()
            graph.replay()
            end.record()
            stream.synchronize()
            samples.append(start.elapsed_time(end) * 1000 / ROUNDS)
        times[name] = samples[REPLAYS // 4 :]

    def measure_size(tokens: int, generator: torch.Generator) -> None:
        x = torch.ones(tokens, 7168, dtype=torch.bfloat16, device=device)
        ids = torch.rand(tokens, 256, generator=generator).topk(8).indices.to(device)
        weights = torch.full((tokens, 8), 0.125, device=device)
        for combine in ("pull", "push"):
            with weft.AllToAll(group, combine=combine, **sizes) as a2a:

                def exchange(a2a: Any = a2a) -> None:
                    a2a.dispatch(x, ids, weights)
                    a2a.combine()

                time_rounds(f"all-to-all, {combine}, {tokens}", exchange)
        with weft.LowLatencyAllToAll(group, reduce="receiver", **sizes) as low:
            shape = (256 // group.size, group.size * max(TOKENS), 7168)
            y = torch.zeros(shape, dtype=torch.bfloat16, device=device)

            def exchange_low_latency() -> None:
                low.combine(y, ids, weights, low.dispatch(x, ids, weights).handle)

            time_rounds(f"low latency, {tokens}", exchange_low_latency)

    def measure_all_reduce(tokens: int) -> None:
        if num_sms is not None and 2 * tokens > num_sms:
            return  # an all-reduce fills the GPU with CTAs that wait, two for each of these rows
        x = torch.ones(tokens, 7168, dtype=torch.bfloat16, device=device)
        capacity = max(*TOKENS, tokens)
        with weft.AllReduce(group, max_tokens=capacity, hidden=7168, **LIMITS) as reduce:
            time_rounds(f"all-reduce, {tokens}", lambda: reduce.fused(x, out=True))

    generator = torch.Generator().manual_seed(group.rank)
    for tokens in () if only_all_reduce else TOKENS:
        measure_size(tokens, generator)
    for tokens in REDUCED_TOKENS:
        measure_all_reduce(tokens)
    return times


def measure_in_threads(ranks: int, *, only_all_reduce: bool) -> dict[str, list[float]]:
    """Return the times of rank 0, with all ranks as threads of this process on one GPU."""
    import torch

    from weft.group import Group
    from weft.group.meeting import Meeting

    meeting, device = Meeting.open(), torch.device("cuda", 0)
    # Half of a rank's part is for its next kernel, which starts early.
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count // (2 * ranks)

    def run(rank: int) -> dict[str, list[float]]:
        torch.cuda.set_device(device)
        try:
            group = Group.from_meeting(
                meeting, rank=rank, size=ranks, device=device, timeout=60.0, threads=True
            )
            with group, torch.cuda.stream(torch.cuda.Stream()):
                return measure(group, num_sms, only_all_reduce=only_all_reduce)
        except BaseException:  # the other threads would wait for this one
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))[0]


def run_version(tree: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure one version in its own process."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, __file__, str(tree), "--ranks", str(options.ranks), "--measure"]
    for name in ("threads", "all_reduce"):
        command += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    if done.returncode != 0:
        raise SystemExit(f"{tree} failed:\n{done.stdout}\n{done.stderr}")
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    """Measure both versions in turns, and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path, help="folder with the package weft of the base version")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", action="store_true", help="ranks as threads on one GPU")
    parser.add_argument("--all-reduce", action="store_true", help="no other operator")
    parser.add_argument("--turns", type=int, default=3, help="of each version")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure and options.threads:
        times_of_rank = measure_in_threads(options.ranks, only_all_reduce=options.all_reduce)
        print(json.dumps(times_of_rank))
        return
    if options.measure:
        import weft

        body = functools.partial(measure, only_all_reduce=options.all_reduce)
        reports = weft.launch(body, ranks=options.ranks, device="cuda", timeout=300.0)
        print(json.dumps(reports[0]))
        return
    trees = {"base": options.base.resolve(), "new": ROOT}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for _ in range(options.turns):
        for name, tree in trees.items():
            result = run_version(tree, options)
            for case, samples in result.items():
                times[name].setdefault(case, []).extend(samples)
    print(f"{'case':24} {'base us':>9} {'new us':>9} {'ratio':>7}   shortest: base, new, ratio")
    for case in times["base"]:
        cells = []
        for statistic in (statistics.median, min):
            base, new = (statistic(times[name][case]) for name in trees)
            cells.append(f"{base:9.2f} {new:9.2f} {new / base:7.3f}")
        print(f"{case:24} {'   '.join(cells)}")
    if options.json is not None:
        record = {"ranks": options.ranks, "threads": options.threads, "samples": times}
        options.json.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
