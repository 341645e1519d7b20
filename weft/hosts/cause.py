# SPDX-License-Identifier: Apache-2.0
"""The first error of a group's exchanges, which ranks of other hosts learn through the store.

A rank that leaves has no connection to most ranks of other hosts. They read the store while they
wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.group import Group
from weft.group.torch_groups import BoundedStore


class FirstCause:
    """The text of the first error of a group's exchanges, equal for all ranks that read it."""

    def __init__(self, group: Group) -> None:
        self._group, self._store = group, BoundedStore()
        self._key = f"weft/first-cause/{group.token}"

    def report_wait(self, hosts: Sequence[int]) -> None:
        """Record that this rank has waited for `hosts` longer than its deadline."""
        self._store.set(f"{self._key}/{self._group.rank}", " ".join(map(str, hosts)))

    def find_culprits(self, hosts: Sequence[int]) -> list[int]:
        """Return the hosts that cause this rank's wait for `hosts`.

        They are those that wait for no other host, among `hosts` and the hosts that these wait for.
        If all wait for each other, the link is gone, and the result is `hosts`. No single rank can
        be named, because a rank that is waited for may wait for another rank of its host.
        """
        ranks = self._group.host_ranks
        texts = self._store.get([f"{self._key}/{rank}" for rank in range(self._group.size)])
        if texts is None:
            return list(hosts)
        waits = {
            host: {int(word) for rank in ranks[host] for word in texts[rank].split()}
            for host in range(len(ranks))
        }
        reached, pending = set[int](), list(hosts)
        while pending:
            host = pending.pop()
            if host not in reached:
                reached.add(host)
                pending += waits[host]
        return sorted(host for host in reached if not waits[host]) or list(hosts)

    def report(self, text: str) -> None:
        """Record an error unless there is one."""
        self._store.set_first(self._key, text)

    def read(self) -> str:
        """Return the first error; "" if there is none or the store does not answer."""
        values = self._store.get([self._key])
        return values[0] if values else ""
