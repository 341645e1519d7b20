"""The trained model under load on one GPU, whole blocks by weft; under_load.py says what is seen.

One rank has no peer that could die, so none is killed.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from asking import ON_CPU, arguments, begin_server, job_of
from job import chosen, said, served
from under_load import Clients, load, named
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT


def about(ids: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """A request of OpenAI's."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}


def count(lines: list[dict[str, Any]]) -> int:
    """Tokens of an answer: the last line says so."""
    return int(lines[-1]["usage"]["completion_tokens"]) if lines else 0


def main() -> int:
    """One server for each variant."""
    parser = arguments(str(__doc__), str(CHECKPOINT), ["block"])
    parser.add_argument("--loaded", type=float, default=300.0, help="seconds under load")
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args()
    engine: dict[str, Any] = {"model": given.model, "dtype": "float16", "max_model_len": 1024}
    engine |= {"max_num_seqs": 64, "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.5}
    engine |= {"enable_prefix_caching": False} | (ON_CPU if given.cpu else {}) | given.more
    job = job_of(given, engine)
    for variant in chosen(given.variants, VARIANTS):
        if job.out_of_time(variant.name, given.loaded + 60):
            continue
        begin_server(job, variant, engine)
        with served(job, variant.name, 300, partial(said, text=variant.says)) as address:
            if address is not None:
                clients = Clients(address, about, count, partial(named, "VLLM::"))
                found = load(job, clients, given.loaded, given.clients)
                job.record(variant, found, clients=given.clients)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
