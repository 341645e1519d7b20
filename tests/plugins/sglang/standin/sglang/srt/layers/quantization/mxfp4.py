"""Weights in MXFP4."""

from __future__ import annotations

from typing import Any


class Mxfp4MoEMethod:
    """How they are loaded and multiplied."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """What the chosen kernels take."""
        layer.changed = True
