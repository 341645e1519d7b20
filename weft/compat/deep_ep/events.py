# SPDX-License-Identifier: Apache-2.0
"""Events that calls return and wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.arguments import check_instance


class EventOverlap:
    """The end of a call. Calls run in the caller's stream, so waiting for it costs nothing.

    `extra_tensors` are kept alive as long as this object.
    """

    def __init__(
        self,
        event: torch.cuda.Event | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the call."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


def record_event(*, enabled: bool) -> EventOverlap:
    """Return an event of the current CUDA stream, or a completed one if not enabled."""
    if not enabled:
        return EventOverlap()
    make: Callable[[], torch.cuda.Event] = torch.cuda.Event
    event = make()
    event.record()
    return EventOverlap(event)


def wait_for(event: EventOverlap | None) -> None:
    """Let the current stream wait for `previous_event`."""
    if event is not None:
        check_instance("previous_event", event, EventOverlap).current_stream_wait()
