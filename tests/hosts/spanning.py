# SPDX-License-Identifier: Apache-2.0
"""Groups of several hosts, simulated by ranks of one machine with different WEFT_HOST."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import weft
from tests import rounds
from tests.ranks import Test, on_ranks
from weft.errors import RendezvousFailed
from weft.hosts.buffers import RailViews
from weft.hosts.rail import PendingMessages

# `make test` plays a few rounds of each kind; the rest runs when what it reads has changed.
campaign = pytest.mark.slow
# Rounds that a failure may end: what poisons memory before one is a barrier.
play = functools.partial(rounds.play, poison=False)


def on_hosts(
    group: weft.Group, hosts: int | list[int], body: Callable[..., Any], *args: Any
) -> Any:
    """Run `body(spanning, ...)` on ranks of so many hosts, or of the host listed for each."""
    of_rank = [r * hosts // group.size for r in range(group.size)] if type(hosts) is int else hosts
    assert isinstance(of_rank, list)
    os.environ["WEFT_HOST"] = f"host-{of_rank[group.rank]}"
    with weft.Group.from_torch(
        group.process_group(), device=group.device, timeout=600.0
    ) as spanning:
        assert spanning.hosts == len(set(of_rank))
        return body(spanning, *args)


def across(
    hosts: int | list[int] | str, count: int | str = 4, **options: Any
) -> Callable[[Test], Test]:
    """Like `on_ranks`, for CPU ranks of several hosts: as of `on_hosts`, or a parameter's name."""

    def decorate(body: Test) -> Test:
        @functools.wraps(body)
        def spread(group: weft.Group, **kwargs: Any) -> None:
            def run(spanning: weft.Group) -> None:
                body(spanning, **kwargs)
                # Rank 0 serves the store in which others look for the cause of a failure.
                with contextlib.suppress(RendezvousFailed):
                    group.barrier(timeout=60.0)

            on_hosts(group, kwargs[hosts] if isinstance(hosts, str) else hosts, run)

        return on_ranks(count, "cpu", **options)(spread)

    return decorate


@contextlib.contextmanager
def tamper_with_rail(a2a: Any, tell: Callable[[RailViews, int], None]) -> Iterator[None]:
    """Let `tell(slots, own)` change what this rank sends over its rail in a dispatch."""
    rail, own = a2a._exchange._rail, a2a.group.host
    start = rail._start_messages

    def started(pairs: Any) -> PendingMessages:
        slots = next(each for each in rail._buffers._views.values() if each.messages is pairs)
        before = slots.counts[own].clone(), slots.ids[own].clone()
        tell(slots, own)
        rail._wait_for_messages(start(pairs))
        slots.counts[own], slots.ids[own] = before
        return PendingMessages([], [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rail, "_start_messages", started)
        yield
