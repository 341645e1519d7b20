# SPDX-License-Identifier: Apache-2.0
"""The trained model under load, whole blocks by weft; under_load.py says what is looked at."""

from __future__ import annotations

import functools
import sys
from typing import Any

import under_load
from asking import arguments, begin_server, job_of, of_trained
from job import chosen
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT


def about(ids: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """A request of OpenAI's."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}


def count(lines: list[dict[str, Any]]) -> int:
    """Tokens of an answer: the last line says so, but where the server ended before."""
    return int(lines[-1].get("usage", {}).get("completion_tokens", 0)) if lines else 0


API = under_load.Api(about, count, "VLLM::")


def main() -> int:
    """One server for each variant."""
    parser = arguments(f"{under_load.__doc__}\n{__doc__}", str(CHECKPOINT), ["block"])
    parser.add_argument("--ranks", type=int, default=1, help="data- and expert-parallel ones")
    under_load.add_arguments(parser)
    given = parser.parse_args()
    engine = of_trained(given, given.ranks, max_model_len=1024, data_parallel_size=given.ranks)
    job = job_of(given, engine, gpus=given.ranks)
    start = functools.partial(begin_server, engine)
    under_load.in_each(job, given, chosen(given.variants, VARIANTS), start, API)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
