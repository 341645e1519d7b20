"""A second stream, in which the shared expert runs beside dispatch and the routed experts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A stream beside the caller's; on CPU ranks there is one stream only, and this is it.

    Memory that is allocated within and used by the caller after `join` is not handed out again
    before the caller has used it: all later use of the stream begins behind the caller's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._busy = device, False
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """What is enqueued within `after_mark` comes after all that the caller's stream holds."""
        if self._stream is not None:
            self._mark.record(torch.cuda.current_stream(self._device))

    @property
    def busy(self) -> bool:
        """Has something been enqueued here since the last `join`? Never on CPU ranks."""
        return self._busy

    def after_mark(self) -> AbstractContextManager[object]:
        """Enqueue here what may run beside all that the caller has enqueued since `mark`."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(self._mark)
        self._busy = True
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The caller's stream goes on after all that was enqueued here since the last `join`.

        Nothing was: then there is nothing to wait for, which a capture would even refuse.
        """
        if self._stream is not None and self._busy:
            self._busy = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
