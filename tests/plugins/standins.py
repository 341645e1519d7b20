# SPDX-License-Identifier: Apache-2.0
"""What the tests of both engines' plug-ins take of their stand-ins."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

import weft

CLOSE = 2e-5  # of float32 sums in another order


class Kept(logging.Handler):
    """Keeps what weft logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("weft").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())


def forget(engine: str, folder: str, module: str) -> None:
    """No more find an engine's stand-in, nor what was imported of it, nor weft's own `module`."""
    sys.path[:] = [each for each in sys.path if not each.startswith(folder)]
    for name in [n for n in sys.modules if n.split(".")[0] == engine]:
        del sys.modules[name]
    plugin = f"weft.plugins.{engine}"
    if sys.modules.pop(f"{plugin}.{module}", None):
        delattr(sys.modules[plugin], module)


def told(call: Callable[..., Any], *args: Any) -> str:
    """The error of weft's that a call raises, or nothing."""
    try:
        call(*args)
    except weft.errors.WeftError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clamped(limit: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """GPT-OSS's activation."""

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    return gated


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, in parts of the largest number."""
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max()) if want.numel() else 0.0
