# SPDX-License-Identifier: Apache-2.0
"""Load test of the trained model with whole blocks by weft; see under_load.py."""

from __future__ import annotations

import sys
from typing import Any

import under_load
from job import select_variants
from server import arguments, begin, of_trained
from variants import VARIANTS

from weft.cli.demo import CHECKPOINT


def about(ids: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """Return a request for SGLang."""
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return "/generate", {"input_ids": ids, "sampling_params": greedy, "stream": True}


def count(lines: list[dict[str, Any]]) -> int:
    """Return the tokens of an answer: every line reports the number so far."""
    return int(lines[-1]["meta_info"]["completion_tokens"]) if lines else 0


API = under_load.Api(about, count, "sglang::scheduler")


def main() -> int:
    """Run one server per variant."""
    parser = arguments(f"{under_load.__doc__}\n{__doc__}", str(CHECKPOINT), ["weft"])
    under_load.add_arguments(parser)
    args = parser.parse_args()
    job = of_trained(args, args.gpus)
    under_load.in_each(job, args, select_variants(args.variants, VARIANTS), begin, API)
    return job.done()


if __name__ == "__main__":
    sys.exit(main())
