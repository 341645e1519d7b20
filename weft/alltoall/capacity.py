# SPDX-License-Identifier: Apache-2.0
"""Computation of `max_tokens` from a server's settings."""

from __future__ import annotations

from weft.arguments import check_int

MAX_SETTING = 1 << 30  # limit of every setting


def tokens_per_rank(
    *,
    max_running_requests: int,
    prefill_tokens: int,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    speculative_tokens: int = 0,
    graph_batch_size: int = 0,
    multiple_of: int = 8,
) -> int:
    """Return `max_tokens` for an all-to-all from a server's settings.

    The result is `max(ceil(requests / data_parallel) * (1 + speculative), graph * (1 +
    speculative), prefill) / tensor_parallel`, rounded up to `multiple_of`.

    Args:
        max_running_requests: Sequences that the whole server decodes at once.
        prefill_tokens: Maximum prompt tokens in one step of one data-parallel rank (the chunked
            prefill size).
        data_parallel: Attention replicas that share the running requests.
        tensor_parallel: Attention ranks that split one replica's tokens before the MoE layer.
        speculative_tokens: Draft tokens verified beside each sequence's own token.
        graph_batch_size: Largest batch size that a CUDA graph is padded to, in sequences.
        multiple_of: Granularity of the result.

    Returns:
        Tokens per rank.

    Raises:
        InvalidArgument: a value is not an integer or out of range.
    """
    max_running_requests = check_int("max_running_requests", max_running_requests, 1, MAX_SETTING)
    prefill_tokens = check_int("prefill_tokens", prefill_tokens, 0, MAX_SETTING)
    data_parallel = check_int("data_parallel", data_parallel, 1, MAX_SETTING)
    tensor_parallel = check_int("tensor_parallel", tensor_parallel, 1, MAX_SETTING)
    speculative_tokens = check_int("speculative_tokens", speculative_tokens, 0, MAX_SETTING)
    graph_batch_size = check_int("graph_batch_size", graph_batch_size, 0, MAX_SETTING)
    multiple_of = check_int("multiple_of", multiple_of, 1, MAX_SETTING)
    per_sequence = 1 + speculative_tokens
    sequences = max(-(-max_running_requests // data_parallel), graph_batch_size)
    tokens = -(-max(sequences * per_sequence, prefill_tokens) // tensor_parallel)
    return -(-tokens // multiple_of) * multiple_of
