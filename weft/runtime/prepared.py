# SPDX-License-Identifier: Apache-2.0
"""Cache of checked calls, which engines repeat at other addresses.

A key contains everything that the full check of a call reads except the addresses. A cached state
is therefore valid for an equal call whose outputs do not overlap other tensors. All other calls run
the full check, which raises the errors. States hold no tensors, so they do not keep memory alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from weft.runtime.check import OverlapRule, find_overlap

MAX_CALLS = 512  # states in one cache; each needs 2 to 3 KiB


class CallState(Protocol):
    """State that calls with equal keys share."""

    @property
    def overlap_rules(self) -> Sequence[OverlapRule]:
        """Outputs and the tensors that they must not overlap."""


S = TypeVar("S", bound=CallState)


class CallCache(Generic[S]):
    """Cache of the states of up to MAX_CALLS calls; not thread-safe."""

    def __init__(self) -> None:
        self._states: dict[object, S] = {}

    def __len__(self) -> int:
        return len(self._states)

    def find(self, key: object, addresses: Sequence[int]) -> S | None:
        """Return the state of an equal call, or None if the full check is needed.

        Args:
            key: Key of the call, or None if it cannot be cached.
            addresses: Addresses of the tensors, in the order of the overlap rules.
        """
        try:
            state = None if key is None else self._states.get(key)
        except TypeError:  # an unhashable argument is invalid: the check raises
            return None
        if state is None or find_overlap(addresses, state.overlap_rules) is not None:
            return None
        return state

    def store(self, key: object, state: S) -> None:
        """Store the state of a checked call, and evict the oldest state if the cache is full."""
        if key is not None:
            if len(self._states) >= MAX_CALLS:
                del self._states[next(iter(self._states))]
            self._states[key] = state
