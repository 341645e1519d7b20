"""Messages between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AbortReq:
    """An end."""

    rid: str
    finished_reason: dict[str, Any] | None = None


@dataclass
class ActiveRanksOutput:
    """Who is alive."""

    status: list[bool]


@dataclass
class TokenizedGenerateReqInput:
    """A request."""

    rid: str
    routed_dp_rank: int | None = None


@dataclass
class TokenizedEmbeddingReqInput:
    """Another."""

    rid: str
    routed_dp_rank: int | None = None


@dataclass
class BatchTokenizedGenerateReqInput:
    """Several."""

    batch: list[TokenizedGenerateReqInput] = field(default_factory=list)

    def __iter__(self) -> Any:
        return iter(self.batch)


@dataclass
class BatchTokenizedEmbeddingReqInput:
    """Several others."""

    batch: list[TokenizedEmbeddingReqInput] = field(default_factory=list)

    def __iter__(self) -> Any:
        return iter(self.batch)
