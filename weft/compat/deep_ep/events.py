# SPDX-License-Identifier: Apache-2.0
"""CUDA events that calls of `Buffer` return and wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.arguments import check_instance


class EventOverlap:
    """Event at the end of a call. Calls run in the caller's stream, so waiting costs nothing.

    This object holds a reference to `extra_tensors`.
    """

    def __init__(
        self,
        event: torch.cuda.Event | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


def record_event(*, enabled: bool) -> EventOverlap:
    """Record an event in the current CUDA stream; without `enabled`, return a completed one."""
    if not enabled:
        return EventOverlap()
    create_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
    event = create_event()
    event.record()
    return EventOverlap(event)


def wait_for_event(event: EventOverlap | None) -> None:
    """Make the current stream wait for `previous_event`, unless it is None."""
    if event is not None:
        check_instance("previous_event", event, EventOverlap).current_stream_wait()
