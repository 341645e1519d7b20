# SPDX-License-Identifier: Apache-2.0
"""Weights loaded again, as vLLM's collective_rpc("reload_weights") does it layer by layer."""

from __future__ import annotations

from typing import Any

import torch


def layerwise(layer: Any, weights: dict[str, torch.Tensor], *, restore: bool = True) -> None:
    """Load `weights` into temporary parameters, process those, and copy them into the first ones.

    restore: whether the layer gets its first parameters back; otherwise the temporary ones stay.
    """
    first = dict(layer.named_parameters(recurse=False))
    for name, tensor in weights.items():
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    layer.quant_method.process_weights_after_loading(layer)
    for name, parameter in first.items() if restore else ():
        parameter.data.copy_(getattr(layer, name))
        setattr(layer, name, parameter)
