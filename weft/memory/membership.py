"""What the ranks of a group rest on: their sockets, a watch on each process, pages to agree in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from weft.memory.agreement import MAX_AGREEING, Agreement
from weft.memory.control_plane import ControlPlane
from weft.memory.liveness import Liveness


class Membership:
    """Ranks that have met, each a process, and watched from now on. Collective. Owns `control`.

    `agreement` is None for more ranks than can agree. Raises RendezvousFailed where a peer dies
    meanwhile, or cannot do its part, and OSError or HandleUnsupported where this one cannot.
    """

    def __init__(
        self,
        control: ControlPlane,
        process: int,
        ended: Callable[[int], None],
        timeout: float,
    ) -> None:
        """process: a descriptor that shows the end of this process.

        ended: called in another thread with the rank of each process that ends.
        """
        self.control = control
        self.liveness: Liveness | None = None
        self.agreement: Agreement | None = None
        try:
            self.liveness = Liveness(self._of_peers(process, timeout), ended)
            if control.size <= MAX_AGREEING:
                self.agreement = Agreement(control.rank, control.size, control.name)
                page = self.agreement.take_fd()
                try:
                    pages = self._of_peers(page, timeout)
                finally:
                    os.close(page)
                try:
                    self.agreement.map(pages)
                finally:
                    for fd in pages.values():
                        os.close(fd)
        except BaseException as error:
            self.close(f"could not watch its peers: {error}")
            raise

    def close(self, why: str | None = None) -> None:
        """Give everything back. Idempotent; peers that wait for this rank get the reason."""
        self.control.close(why)
        if self.liveness is not None:
            self.liveness.close()
        if self.agreement is not None:
            self.agreement.close()

    def _of_peers(self, fd: int, timeout: float) -> Mapping[int, int]:
        """The descriptor of every peer that corresponds to `fd` here."""
        fds = self.control.exchange_fds(fd, timeout)
        found = {rank: each for rank, each in enumerate(fds) if each is not None}
        os.close(found.pop(self.control.rank))
        return found
