# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4."""

from __future__ import annotations

from typing import Any


class Mxfp4MoEMethod:
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.changed = True
