# SPDX-License-Identifier: Apache-2.0
"""Isolation of weft's results from the caller's torch.autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


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
