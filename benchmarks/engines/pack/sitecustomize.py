# SPDX-License-Identifier: Apache-2.0
"""Stubs for Python packages that SGLang imports and these runs never call.

ENGINE_STUBS lists their top-level names, comma-separated. An installed package takes precedence.
Calling a stub raises. Python imports a module with this name at startup.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

NAMES = set(filter(None, os.environ.get("ENGINE_STUBS", "").split(",")))


class _Anything(type):
    """A class usable in annotations, as a base class and as a decorator."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(f"{cls.__name__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _anything(name: str) -> Any:
    def new(cls: Any, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]  # as a decorator
        raise RuntimeError(f"{name} is not part of this run, but something calls it")

    def schema(cls: Any, source: Any, handler: Any) -> Any:
        """Return a schema for pydantic fields of this type."""
        from pydantic_core import core_schema

        return core_schema.any_schema()

    space = {
        "__new__": new,
        "__module__": name,
        "__init_subclass__": classmethod(lambda cls, **options: None),
        "__get_pydantic_core_schema__": classmethod(schema),
    }
    return _Anything(name.split(".")[-1], (), space)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = _anything(f"{self.__name__}.{name}")
        setattr(self, name, stub)
        return stub


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        module.__version__ = "0"


if NAMES:
    sys.meta_path.append(_Finder())  # last, so that installed packages take precedence
