# SPDX-License-Identifier: Apache-2.0
"""The registry of layers that others put in the place of vLLM's."""

from __future__ import annotations

from typing import Any

import torch

op_registry_oot: dict[str, type] = {}


class PluggableLayer(torch.nn.Module):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_layer_cls: Any = None, name: str | None = None) -> Any:
        name = name or cls.__name__
        assert name not in op_registry_oot, f"Duplicate layer name: {name}"
        op_registry_oot[name] = _decorated_layer_cls
        return _decorated_layer_cls
