# SPDX-License-Identifier: Apache-2.0
"""The trained model under load, whole blocks by weft; under_load.py says what is looked at."""

from __future__ import annotations

import sys
from typing import Any

import under_load
from job import chosen
from server import arguments, begin, of_trained
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT


def about(ids: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """A request of SGLang's."""
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return "/generate", {"input_ids": ids, "sampling_params": greedy, "stream": True}


def count(lines: list[dict[str, Any]]) -> int:
    """Tokens of an answer: every line says how many there are by then."""
    return int(lines[-1]["meta_info"]["completion_tokens"]) if lines else 0


API = under_load.Api(about, count, "sglang::scheduler")


def main() -> int:
    """One server for each variant."""
    parser = arguments(f"{under_load.__doc__}\n{__doc__}", str(CHECKPOINT), ["weft"])
    under_load.add_arguments(parser)
    given = parser.parse_args()
    job = of_trained(given, given.gpus)
    under_load.in_each(job, given, chosen(given.variants, VARIANTS), begin, API)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
