# SPDX-License-Identifier: Apache-2.0
"""Messages between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AbortReq:
    rid: str
    finished_reason: dict[str, Any] | None = None


@dataclass
class ActiveRanksOutput:
    status: list[bool]


@dataclass
class TokenizedGenerateReqInput:
    rid: str
    routed_dp_rank: int | None = None


@dataclass
class TokenizedEmbeddingReqInput:
    rid: str
    routed_dp_rank: int | None = None


@dataclass
class BatchTokenizedGenerateReqInput:
    batch: list[TokenizedGenerateReqInput] = field(default_factory=list)

    def __iter__(self) -> Any:
        return iter(self.batch)


@dataclass
class BatchTokenizedEmbeddingReqInput:
    batch: list[TokenizedEmbeddingReqInput] = field(default_factory=list)

    def __iter__(self) -> Any:
        return iter(self.batch)
