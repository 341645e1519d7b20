# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of both engines' plug-ins: stand-ins, launches, logs."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

import weft
from weft.plugins.engine_api import get_unbound_function, select_signatures

CLOSE = 2e-5  # of float32 sums in another order
HERE = Path(__file__).parent


def signature_of(parameters: str) -> inspect.Signature:
    """Return a signature in the form of the tables: "self, x, *, scale="."""
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = []
    for each in parameters.split(", ") if parameters else ():
        if each == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            default = None if each.endswith("=") else inspect.Parameter.empty
            listed.append(inspect.Parameter(each.rstrip("="), kind, default=default))
    return inspect.Signature(listed)


def module_of(name: str) -> ModuleType:
    """Return a submodule of a stand-in and create its parents."""
    for end in [i for i, c in enumerate(name) if c == "."]:
        sys.modules.setdefault(name[:end], ModuleType(name[:end]))
    return sys.modules.setdefault(name, ModuleType(name))


def bind_standin(root: Any, target: str, parameters: str | None) -> None:
    """Bind the stand-in's object under the engine's name, with the engine's signature.

    What it has not, no test uses.
    """
    engine, *parts = target.split(".")
    own = [i for i, part in enumerate(parts) if hasattr(root, part)]
    upper = [i for i, part in enumerate(parts) if part[0].isupper()]
    first = (own or upper or [len(parts) - 1])[0]
    owner: Any = module_of(".".join([engine, *parts[:first]]))
    for part in parts[first:-1]:
        if part not in vars(owner):
            setattr(owner, part, getattr(root, part, None) or type(part, (), {}))
        owner = getattr(owner, part)
    name = parts[-1]
    if isinstance(owner, ModuleType):
        if not hasattr(owner, name):
            result = getattr(root, name, None)
            made = type(name, (), {}) if name[0].isupper() else lambda: None
            setattr(owner, name, made if result is None else result)
    elif name not in vars(owner):
        inherited = getattr(owner, name, None)
        if isinstance(inherited, FunctionType):  # whose signature may be another one's
            code = inherited.__code__, inherited.__globals__, name, inherited.__defaults__
            inherited = FunctionType(*code, inherited.__closure__)
            inherited.__kwdefaults__ = getattr(owner, name).__kwdefaults__
        setattr(owner, name, inherited or (lambda: None))
    if parameters is not None:
        get_unbound_function(getattr(owner, name)).__signature__ = signature_of(parameters)


def install_standin(engine: str, release: str) -> Any:
    """Make `import <engine>` load the stand-in as this release, with its package metadata."""
    if engine in sys.modules:
        return sys.modules[engine]
    sys.path.insert(0, str(HERE / "metadata" / f"{engine}-{release}"))
    spec = importlib.util.spec_from_file_location(engine, HERE / engine / "standin.py")
    assert spec is not None
    assert spec.loader is not None
    root: Any = importlib.util.module_from_spec(spec)
    sys.modules[engine] = root
    spec.loader.exec_module(root)
    for line in root.MODULES.strip().splitlines():
        path, *names = line.split()
        for each in names:
            setattr(module_of(f"{engine}.{path}"), each, getattr(root, each))
    for entry, parameters in select_signatures(root.ENTRIES, release):
        bind_standin(root, entry.target, parameters)
    return root


def remove_standin(engine: str, module: str) -> None:
    """Remove an engine's stand-in and settings, and weft's own `module`, which derives from it."""
    sys.path[:] = [each for each in sys.path if not each.startswith(str(HERE / "metadata"))]
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


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
