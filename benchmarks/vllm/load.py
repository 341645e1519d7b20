# SPDX-License-Identifier: Apache-2.0
"""Load test of the trained model with whole blocks by weft; see under_load.py."""

from __future__ import annotations

import functools
import sys
from typing import Any

import under_load
from asking import arguments, begin_server, job_of, of_trained
from job import select_variants
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT


def about(ids: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """Return a request for the OpenAI API."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}


def count(lines: list[dict[str, Any]]) -> int:
    """Return the tokens of an answer, from its last line; 0 if the server exited before."""
    return int(lines[-1].get("usage", {}).get("completion_tokens", 0)) if lines else 0


API = under_load.Api(about, count, "VLLM::")


def main() -> int:
    """Run one server per variant."""
    parser = arguments(f"{under_load.__doc__}\n{__doc__}", str(CHECKPOINT), ["block"])
    parser.add_argument("--ranks", type=int, default=1, help="data- and expert-parallel ones")
    under_load.add_arguments(parser)
    args = parser.parse_args()
    engine = of_trained(args, args.ranks, max_model_len=1024, data_parallel_size=args.ranks)
    job = job_of(args, engine, gpus=args.ranks)
    start = functools.partial(begin_server, engine)
    under_load.in_each(job, args, select_variants(args.variants, VARIANTS), start, API)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
