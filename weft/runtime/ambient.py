# SPDX-License-Identifier: Apache-2.0
"""Isolation of weft from the caller's torch state: autocast, inference mode, stream capture."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

import torch

from weft.cuda.driver import relaxed_capture
from weft.group import Group

P = ParamSpec("P")
R = TypeVar("R")
Init = TypeVar("Init", bound=Callable[..., None])


def is_autocast_enabled() -> bool:
    """Whether torch.autocast is enabled for CPUs or GPUs."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def disable_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that it runs with torch.autocast disabled.

    Outside of autocast the overhead is two reads of thread-local state.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_autocast_enabled():
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def disable_inference_mode() -> Iterator[None]:
    """Leave inference mode inside the context.

    Tensors that are created in inference mode must not be written outside of it, but objects that
    are created or first called there may later be used elsewhere.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def allow_during_capture(init: Init) -> Init:
    """Decorate a constructor so that it can run during captures and in inference mode.

    Its first argument is the group.
    """

    @functools.wraps(init)
    def wrapped(self: Any, group: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(group, Group):  # the constructor raises InvalidArgument
            init(self, group, *args, **kwargs)
            return
        with relaxed_capture(group.device), disable_inference_mode():
            init(self, group, *args, **kwargs)

    return cast("Init", wrapped)


def records_creation(init: Init) -> Init:
    """Decorate a constructor: allow captures, and record it for ranks that join later."""

    @allow_during_capture
    @functools.wraps(init)
    def wrapped(self: Any, group: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(group, Group):
            init(self, group, *args, **kwargs)
            return
        with group.creation() as creation:
            creation.add(self)
            init(self, group, *args, **kwargs)

    return cast("Init", wrapped)
