"""What a rank said to the others while it made an object: said again for one that joins later."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.memory.group import Group

Step = Callable[["Group"], object]


class Creation:
    """The control messages of one constructor, and what it made: the object and its heaps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._made: list[weakref.ref[object]] = []

    def add(self, made: object) -> None:
        """Belongs to this creation."""
        self._made.append(weakref.ref(made))

    @property
    def exists(self) -> bool:
        """Is everything that was made still there, and open?"""
        found = [each() for each in self._made]
        return all(each is not None and not getattr(each, "closed", False) for each in found)
