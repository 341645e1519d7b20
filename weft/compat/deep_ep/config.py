# SPDX-License-Identifier: Apache-2.0
"""`Config` of deep_ep's normal mode, and its hints of buffer sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weft.arguments import check_int, raise_invalid
from weft.compat.row_exchange import MAX_ROW_RANKS, compute_exchange_bytes
from weft.fields import max_value
from weft.shape import MAX_ROW_BYTES, Shape

MAX_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Config:
    """Chunk sizes of deep_ep's normal mode. weft's kernels have no chunks and ignore them.

    Raises:
        InvalidArgument: If num_sms is below 0 or a number of tokens below 1.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for index, field_ in enumerate(fields(self)):
            check_int(field_.name, getattr(self, field_.name), min(index, 1), MAX_CHUNK)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of symmetric memory for bfloat16 dispatches and combines.

        The estimate is for `num_sms / 2 * num_max_nvl_chunked_recv_tokens` tokens per rank. More
        tokens need more memory.

        Args:
            hidden_bytes: Bytes of a row, a multiple of 16.
            num_ranks: Number of ranks.
        """
        hidden_bytes = check_int("hidden_bytes", hidden_bytes, 16, MAX_ROW_BYTES)
        if hidden_bytes % 16:
            raise_invalid("hidden_bytes", hidden_bytes, "a multiple of 16")
        ranks = check_int("num_ranks", num_ranks, 1, MAX_ROW_RANKS)
        tokens = max(1, self.num_sms // 2) * self.num_max_nvl_chunked_recv_tokens
        tokens = min(tokens, max_value(Shape, "tokens"))
        return compute_exchange_bytes(ranks, tokens, hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: weft needs no RDMA buffer within an NVLink domain.

        Raises:
            InvalidArgument: If an argument is invalid.
        """
        check_int("hidden_bytes", hidden_bytes, 1, MAX_ROW_BYTES)
        check_int("num_ranks", num_ranks, 1, MAX_ROW_RANKS)
        return 0
