"""What bodies of deep_ep's tests have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import weft
from weft.compat.deep_ep import Buffer

P = ParamSpec("P")
T = TypeVar("T")
Body = Callable[Concatenate[weft.Group, Buffer, P], T]


def buffered(**options: Any) -> Callable[[Body[P, T]], Callable[Concatenate[weft.Group, P], T]]:
    """A body that gets a Buffer of these options, which is checked and given back after it."""

    def decorate(body: Body[P, T]) -> Callable[Concatenate[weft.Group, P], T]:
        @functools.wraps(body)
        def run(group: weft.Group, /, *args: P.args, **given: P.kwargs) -> T:
            buffer = Buffer(group, **options)
            found = body(group, buffer, *args, **given)
            buffer.check()
            group.barrier()
            buffer.destroy()
            return found

        return run

    return decorate
