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
    """Whether torch.autocast would change the dtype of products on CPUs or GPUs."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
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
def plain_tensors() -> Iterator[None]:
    """Make torch create tensors inside the context that any later call may write.

    Tensors of inference mode may not be written outside of it. Objects that are made or first
    called there are also used elsewhere.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def in_relaxed_mode(init: Init) -> Init:
    """Decorate a constructor on a group to run it within `relaxed_capture` and `plain_tensors`.

    It may then allocate during a capture and be called in inference mode.
    """

    @functools.wraps(init)
    def wrapped(self: Any, group: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(group, Group):  # for the constructor to refuse
            init(self, group, *args, **kwargs)
            return
        with relaxed_capture(group.device), plain_tensors():
            init(self, group, *args, **kwargs)

    return cast("Init", wrapped)


def as_creation(init: Init) -> Init:
    """Decorate a constructor as `in_relaxed_mode` does, and record it for ranks that join later."""

    @in_relaxed_mode
    @functools.wraps(init)
    def wrapped(self: Any, group: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(group, Group):
            init(self, group, *args, **kwargs)
            return
        with group.creation() as creation:
            creation.add(self)
            init(self, group, *args, **kwargs)

    return cast("Init", wrapped)
