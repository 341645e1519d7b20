# SPDX-License-Identifier: Apache-2.0
"""Parameters that constructors of operators share, with their defaults and checks.

Constructors keep explicit signatures, and pass `locals()` to `from_arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from weft.arguments import check_bools, check_seconds
from weft.runtime.kernels import Build
from weft.runtime.timeline import DEFINE


class Parameters:
    """Base class of frozen dataclasses of parameters."""

    __slots__ = ()

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], **extra: Any) -> Self:
        """Select the fields from a constructor's arguments, and add those in `extra`."""
        names = {field.name for field in fields(cls)} & arguments.keys()  # type: ignore[arg-type]
        return cls(**{name: arguments[name] for name in names}, **extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(Parameters):
    """Options of waits and launches, which may differ between ranks; see `AllToAll`."""

    timeout: float = 2.0
    first_timeout: float = 120.0
    num_sms: int | None = None
    programmatic_launch: bool = True
    profile: bool = False

    def check(self) -> None:
        """Raise InvalidArgument for an option that is invalid on every device."""
        check_seconds("timeout", self.timeout)
        check_seconds("first_timeout", self.first_timeout)
        check_bools(programmatic_launch=self.programmatic_launch, profile=self.profile)

    def build(self, *, split_phase: bool = False, defines: Sequence[str] = ()) -> Build:
        """Return the build options of the kernels."""
        check_bools(split_phase=split_phase)
        defines = (*defines, *((DEFINE,) if self.profile else ()))
        return Build(self.num_sms, self.programmatic_launch, split_phase, defines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSpec(Parameters):
    """Parameters that both all-to-alls share, equal on all ranks; see `AllToAll`.

    Attributes:
        ranks: Number of ranks of one host.
    """

    ranks: int
    max_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    expert_map: Sequence[int] | torch.Tensor | None = None
    quantize: str | None = None
    combine: str | None = None
    combine_dtype: str | None = None

    def sizes(self) -> dict[str, int]:
        """Return the sizes by their names in the kernels' shapes."""
        return {
            "ranks": self.ranks,
            "tokens": self.max_tokens,
            "top_k": self.top_k,
            "experts": self.num_experts,
            "hidden": self.hidden,
        }
