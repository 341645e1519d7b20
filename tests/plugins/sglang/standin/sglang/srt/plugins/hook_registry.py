# SPDX-License-Identifier: Apache-2.0
"""Hooks on functions and methods, found by their dotted path."""

from __future__ import annotations

import functools
import logging
import pkgutil
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

logger = logging.getLogger(__name__)


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: dict[str, list[tuple[HookType, Callable[..., Any]]]] = {}
    _patched: set[str] = set()

    @classmethod
    def register(
        cls,
        target: str,
        hook: Callable[..., Any],
        hook_type: HookType = HookType.AFTER,
        *,
        source: Any = None,
    ) -> None:
        """Keep a hook until `apply_hooks`."""
        cls._hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        """Patch every target; what fails is logged."""
        for target in cls._hooks:
            if target not in cls._patched:
                try:
                    cls._apply(target)
                    cls._patched.add(target)
                except Exception:
                    logger.exception("Failed to apply hooks to %s", target)

    @classmethod
    def _apply(cls, target: str) -> None:
        owner_path, name = target.rsplit(".", 1)
        owner = pkgutil.resolve_name(owner_path)
        original = getattr(owner, name)
        bound = isinstance(owner, type) and isinstance(vars(owner).get(name), classmethod)
        function = original.__func__ if bound else original
        wrapped = function
        for kind, hook in cls._hooks[target]:
            wrapped = _wrapped(wrapped, kind, hook)
        setattr(owner, name, classmethod(wrapped) if bound else wrapped)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("sglang"):
                for key, value in list(vars(module).items()):
                    if value is function:
                        setattr(module, key, wrapped)


def _wrapped(
    function: Callable[..., Any], kind: HookType, hook: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(function, *args, **given)
        if kind is HookType.REPLACE:
            return hook(*args, **given)
        if kind is HookType.BEFORE:
            changed = hook(*args, **given)
            args, given = (args, given) if changed is None else changed
            return function(*args, **given)
        result = function(*args, **given)
        other = hook(result, *args, **given)
        return result if other is None else other

    return call
