# SPDX-License-Identifier: Apache-2.0
"""The first error of a group's exchanges, shared with ranks of other hosts through the store.

A rank that leaves has no connection to most ranks of other hosts, so they read the store while
they wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.group import Group
from weft.group.torch_groups import BoundedStore


class FirstErrorStore:
    """Store for the first error of a group's exchanges, equal for all ranks that read it."""

    def __init__(self, group: Group) -> None:
        self._group, self._store = group, BoundedStore()
        self._key = f"weft/first-cause/{group.token}"

    def report_wait(self, hosts: Sequence[int]) -> None:
        """Record that this rank has waited for `hosts` longer than its deadline."""
        self._store.set(f"{self._key}/{self._group.rank}", " ".join(map(str, hosts)))

    def find_root_hosts(self, hosts: Sequence[int]) -> list[int]:
        """Return the hosts that cause this rank to wait for `hosts`.

        These are the hosts that wait for no other host, among `hosts` and the hosts that they wait
        for. If all wait for each other, the link has failed, and the result is `hosts`. The result
        names no single rank, because the awaited rank may itself wait for a rank of its host.
        """
        ranks = self._group.host_ranks
        texts = self._store.get([f"{self._key}/{rank}" for rank in range(self._group.size)])
        if texts is None:
            return list(hosts)
        waits = {
            host: {int(word) for rank in ranks[host] for word in texts[rank].split()}
            for host in range(len(ranks))
        }
        visited, pending = set[int](), list(hosts)
        while pending:
            host = pending.pop()
            if host not in visited:
                visited.add(host)
                pending += waits[host]
        return sorted(host for host in visited if not waits[host]) or list(hosts)

    def report(self, text: str) -> None:
        """Record an error unless there is one."""
        self._store.set_first(self._key, text)

    def read_first_error(self) -> str:
        """Return the first error; "" if there is none or the store does not answer."""
        values = self._store.get([self._key])
        return values[0] if values else ""
