# SPDX-License-Identifier: Apache-2.0
"""Which error came first: a rank that leaves can report it to other hosts through the store only.

Ranks of other hosts ask while they wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.group import Group
from weft.group.torch_groups import BoundedStore


class FirstCause:
    """The text of the first error of a group's exchanges, the same for all ranks that ask later."""

    def __init__(self, group: Group) -> None:
        self._group, self._store = group, BoundedStore()
        self._key = f"weft/first-cause/{group.token}"

    def wait_for(self, hosts: Sequence[int]) -> None:
        """Say that this rank waits for hosts, longer than its deadline."""
        self._store.set(f"{self._key}/{self._group.rank}", " ".join(map(str, hosts)))

    def culprits(self, hosts: Sequence[int]) -> list[int]:
        """Return which hosts wait for no other, of `hosts` and those that these wait for.

        None of the ranks there can be named from here: the one that is waited for may wait for
        another of its host. Where all wait for each other, it is `hosts`: the link is gone.
        """
        ranks = self._group.host_ranks
        texts = self._store.get([f"{self._key}/{rank}" for rank in range(self._group.size)])
        if texts is None:
            return list(hosts)
        waits = {
            host: {int(each) for rank in ranks[host] for each in texts[rank].split()}
            for host in range(len(ranks))
        }
        reached, pending = set[int](), list(hosts)
        while pending:
            host = pending.pop()
            if host not in reached:
                reached.add(host)
                pending += waits[host]
        return sorted(host for host in reached if not waits[host]) or list(hosts)

    def tell(self, text: str) -> None:
        """Leave an error, unless there is one."""
        self._store.set_first(self._key, text)

    def ask(self) -> str:
        """Return the first error; "" where there is none, or no answer now or before."""
        values = self._store.get([self._key])
        return values[0] if values else ""
