# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of both engines' plug-ins: stand-ins, launches, logs."""

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

import weft
from weft.errors import SetupError
from weft.plugins.engine_api import Engine

CLOSE = 2e-5  # of float32 sums in another order
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 3, 128, 128
GET_VERSION, CHECK = Engine.get_version, Engine.check


class Finder(MetaPathFinder, Loader):
    """Makes every module of an engine its stand-in, where each name is once."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, part = name.rpartition(".")
        is_name = part[:1].isupper() or getattr(self.root, part, self.root) is not self.root
        ours = package.partition(".")[0] == self.root.__name__
        return ModuleSpec(name, self) if ours and not is_name else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.root

    def exec_module(self, module: ModuleType) -> None:
        pass


def refuse(*args: Any) -> None:
    """Stand-in of Engine.check for an engine that is not supported."""
    raise SetupError("it differs")


def install_standin(engine: str, release: str) -> Any:
    """Make `import <engine>` load the stand-in, and weft take it for this release."""
    if engine not in sys.modules:
        place = Path(__file__).parent / engine / "standin.py"
        spec = importlib.util.spec_from_file_location(engine, place)
        assert spec is not None
        assert spec.loader is not None
        root = sys.modules[engine] = importlib.util.module_from_spec(spec)
        root.__path__ = []
        sys.meta_path.append(Finder(root))
        spec.loader.exec_module(root)
        setattr(Engine, "get_version", lambda self: release)  # noqa: B010
        setattr(Engine, "check", lambda self, entries: None)  # noqa: B010
    return sys.modules[engine]


def remove_standin(engine: str, module: str) -> None:
    """Remove an engine's stand-in and settings, and weft's own `module`, which derives from it."""
    setattr(Engine, "get_version", GET_VERSION)  # noqa: B010
    setattr(Engine, "check", CHECK)  # noqa: B010
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, Finder)]
    for name in [n for n in sys.modules if n.split(".")[0] == engine]:
        del sys.modules[name]
    plugin = f"weft.plugins.{engine}"
    if sys.modules.pop(f"{plugin}.{module}", None):
        delattr(sys.modules[plugin], module)
    for name in [n for n in os.environ if n.startswith(f"WEFT_{engine.upper()}")]:
        del os.environ[name]


def run_each(
    group: weft.Group, calls: tuple[tuple[Any, ...], ...], leave: Callable[[], object] = int
) -> list[Any]:
    """Return the results of several bodies, with `leave` after each; an error names its body."""
    results = []
    for body, *args in calls:
        try:
            results.append(body(group, *args))
            group.barrier()  # no rank ends, and none goes on, while another one needs it
        except BaseException as error:
            error.add_note(f"in {body} of {args}")
            raise
        finally:
            leave()
    return results


def launch_each(
    leave: Callable[[], None], ranks: Any, count: int, *calls: tuple[Any, ...]
) -> list[list[Any]]:
    """Run several (body, *args) in one launch; return the ranks' results of each."""
    return [list(each) for each in zip(*ranks(count, "cpu")(run_each, calls, leave), strict=True)]


class Kept(logging.Handler):
    """Log lines of weft."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("weft").addHandler(self)
        logging.getLogger("weft").setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def error_of(call: Callable[..., Any], *args: Any) -> str:
    """Return the weft error that a call raises, or ""."""
    try:
        call(*args)
    except weft.errors.WeftError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers that are equal on every rank."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values / math.sqrt(shape[-1])).to(dtype)


def tokens(count: int, seed: int) -> torch.Tensor:
    return drawn((count, HIDDEN), 1 << 20 | seed) * 8


def expert_weights(layer: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return gate and up, and down, of all experts, and their biases."""
    first, up = 1000 * layer, 2 * INTERMEDIATE
    wide = drawn((EXPERTS, up, HIDDEN), first, dtype)
    narrow = drawn((EXPERTS, HIDDEN, INTERMEDIATE), first + 1, dtype)
    return wide, narrow, drawn((EXPERTS, up), first + 2), drawn((EXPERTS, HIDDEN), first + 3)


def gate_weight(layer: int) -> torch.Tensor:
    return drawn((EXPERTS, HIDDEN), 1000 * layer + 4)


def alone(
    x: torch.Tensor,
    *,
    layers: int = 2,
    shift: int = 0,
    real: int | None = None,
    scale: float = 1.0,
    shared: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    gating: Any = None,
    activation: Any = None,
) -> torch.Tensor:
    """Return what layers of experts compute from x in one process, in plain torch.

    real: rows from there on go to no expert; shift: added to the layer of the weights; activation:
    of experts without a gate, whose up rows are the first of `expert_weights`.
    """
    for layer in range(layers):
        logits = functional.linear(x.float(), gate_weight(layer))
        chosen, ids = logits.softmax(1).topk(TOP_K)
        if real is not None:
            ids[real:] = -1
        *weights, wide_bias, narrow_bias = expert_weights(layer + shift, x.dtype)
        more: dict[str, Any] = {"shared": shared(layer, x)} if shared else {}
        if gating:
            more |= {"gate_up_bias": wide_bias, "down_bias": narrow_bias, "gating": gating}
        if activation:
            weights[0], more["activation"] = weights[0][:, :INTERMEDIATE], activation
        x = x + weft.reference.moe_layer(x, ids, chosen * scale, *weights, **more)
    return x


def clamped_swiglu(limit: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return GPT-OSS's activation."""

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    return gated


def max_relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max()) if want.numel() else 0.0
