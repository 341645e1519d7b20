# SPDX-License-Identifier: Apache-2.0
"""Cache of checked calls, which engines repeat at other addresses.

A key covers everything that the full check of a call reads except for the addresses. A cached state
therefore serves an equal call whose outputs overlap no other tensor; any other call takes the full
check, which raises the errors. States hold no tensors, so they keep no caller's memory alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from weft.runtime.check import OverlapRule, find_overlap

MAX_CALLS = 512  # states in one cache; each takes 2 to 3 KiB


class CallState(Protocol):
    """The state that calls with equal keys share."""

    @property
    def overlap_rules(self) -> Sequence[OverlapRule]:
        """Outputs and the tensors that they must not overlap."""


S = TypeVar("S", bound=CallState)


class CallCache(Generic[S]):
    """States of the latest MAX_CALLS kinds of calls, not thread-safe."""

    def __init__(self) -> None:
        self._states: dict[object, S] = {}

    def __len__(self) -> int:
        return len(self._states)

    def find(self, key: object, addresses: Sequence[int]) -> S | None:
        """Return the state of an equal call, or None if the full check is needed.

        Args:
            key: Key of the call; None if its arguments have none.
            addresses: Addresses of the tensors, to which the state's rules refer.
        """
        try:
            state = None if key is None else self._states.get(key)
        except TypeError:  # an unhashable argument is invalid: the check raises
            return None
        if state is None or find_overlap(addresses, state.overlap_rules) is not None:
            return None
        return state

    def store(self, key: object, state: S) -> None:
        """Store the state of a checked call, and evict the oldest if there are too many."""
        if key is not None:
            if len(self._states) >= MAX_CALLS:
                del self._states[next(iter(self._states))]
            self._states[key] = state
