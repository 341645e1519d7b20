# SPDX-License-Identifier: Apache-2.0
"""Kinds of ranks that one test body runs on."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest

CPU, THREADS = "cpu", "threads"
CUDA: Any = pytest.param("cuda", marks=pytest.mark.gpu)
EMULATED: Any = pytest.param("emulated", marks=pytest.mark.slow)
ANY = (THREADS, CUDA)


def on_ranks(
    count: int, kinds: Sequence[Any] = ANY, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a body to run as a test on every rank, once for each kind of ranks.

    The body's first parameter is the group; pytest gives the others, which may be picklable
    parameters or fixtures, and also `count` if a test has it as a parameter. options: of `ranks`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @pytest.mark.parametrize("kind", kinds)
        @functools.wraps(body)
        def test(*, ranks: Any, kind: str, **inputs: Any) -> None:
            ranks(count, kind)(body, *inputs.values(), **options)

        names = [*inspect.signature(body).parameters][1:]
        parameter = inspect.Parameter
        made: Any = test
        made.__signature__ = inspect.Signature(
            [parameter(name, parameter.KEYWORD_ONLY) for name in ("ranks", "kind", *names)]
        )
        # Processes find the body by this name.
        made.body, body.__qualname__ = body, f"{body.__name__}.body"
        return test  # type: ignore[no-any-return]

    return decorate
