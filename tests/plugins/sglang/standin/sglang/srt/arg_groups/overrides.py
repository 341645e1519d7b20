# SPDX-License-Identifier: Apache-2.0
"""What one flag makes of another."""

from __future__ import annotations

from typing import Any

_FLASHINFER_ALLREDUCE_FUSION_ARCHS = frozenset({"Fusing"})
_SPANNING = frozenset({"deepep", "flashinfer"})


def resolved_view(server_args: Any) -> Any:
    """All are resolved when they are parsed."""
    return server_args


def _a2a_ep_size(view: Any) -> dict[str, Any]:
    return {"ep_size": view.tp_size} if view.moe_a2a_backend in _SPANNING else {}


def _a2a_fusion_adjustments(view: Any) -> dict[str, Any]:
    return {}
