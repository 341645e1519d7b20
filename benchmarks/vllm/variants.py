"""The variants of vLLM that are compared: arguments and environment that each adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SERVED = "MoE layers of vLLM on"  # what weft logs when it has taken a model's layers
DEEP_GEMM = "Using DEEPGEMM Fp8 MoE backend"


@dataclass(frozen=True)
class Variant:
    """One way of serving. All load the same random weights.

    engine: arguments of vLLM's EngineArgs.   says: what its log must hold.
    """

    name: str
    what: str
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    says: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """For the record."""
        return tuple(f"{name}={value}" for name, value in self.engine.items())


def _weft(name: str, what: str, **settings: str) -> Variant:
    more = {f"WEFT_VLLM_{key.upper()}": value for key, value in settings.items() if key != "form"}
    engine = {"moe_backend": "triton"} if settings["form"] == "exchange" else {}
    return Variant(name, what, engine, {"WEFT_VLLM": settings["form"], **more}, SERVED)


VARIANTS = {
    v.name: v
    for v in (
        Variant("stock", "vLLM, Triton experts", {"moe_backend": "triton"}),
        Variant("deep_gemm", "vLLM, DeepGEMM experts", {"moe_backend": "deep_gemm"}, {}, DEEP_GEMM),
        _weft("block", "whole MoE blocks by weft", form="block"),
        _weft("exchange", "weft moves tokens; vLLM's Triton experts", form="exchange"),
    )
}
