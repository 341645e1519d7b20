"""The trained model under load, whole blocks by weft; under_load.py says what is looked at."""

from __future__ import annotations

import sys
from typing import Any

import under_load
from arithmetic import CHECKPOINT
from job import OUT, chosen
from server import arguments, data_parallel, job_of, prefill_graphs, server
from under_load import Clients, load, named, without_a_rank
from variants import VARIANTS


def about(ids: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """A request of SGLang's."""
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return "/generate", {"input_ids": ids, "sampling_params": greedy, "stream": True}


def count(lines: list[dict[str, Any]]) -> int:
    """Tokens of an answer: every line says how many there are by then."""
    return int(lines[-1]["meta_info"]["completion_tokens"]) if lines else 0


def main() -> int:
    """One server."""
    parser = arguments(
        f"{under_load.__doc__}\nThe trained model, whole blocks by weft.", str(CHECKPOINT), ["weft"]
    )
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, in float32")
    parser.add_argument("--loaded", type=float, default=300.0, help="seconds under load")
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args()
    flags = (*data_parallel(given.gpus), "--cuda-graph-max-bs-decode", "64", "--dtype", "float16")
    flags += () if given.cpu else tuple(prefill_graphs(2048, served=True))
    job = job_of(given, *flags, dummy=False, cpu=given.cpu)
    for variant in chosen(given.variants, VARIANTS):
        if job.out_of_time(variant.name, given.loaded + 60):
            continue
        killed: dict[str, Any] = {}
        with server(job, variant, outlives=False) as address:
            if address is None:
                continue
            clients = Clients(address, about, count, lambda: named("sglang::scheduler"))
            result = load(job, clients, given.loaded, given.clients)
            job.record(variant, result, clients=given.clients)
            clients = Clients(address, about, count, clients.ranks)
            killed = without_a_rank(job, clients, OUT / f"{job.what}-{variant.name}.log")
            job.record(variant, killed)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
