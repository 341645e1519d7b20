# SPDX-License-Identifier: Apache-2.0
"""Rails that the operators of several hosts open, one for each operator.

Dispatch sends a rank's rows over the rail to the ranks with its index on the other hosts; each of
them dispatches the rows that arrive within its own host. Combine sums within each host, returns
these sums over the rail, and adds them at the tokens' owners.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from weakref import WeakKeyDictionary

from weft.group import Group
from weft.hosts.config import HostSpan
from weft.hosts.rail import Rail
from weft.runtime.exchange import ExchangeOperator

# Number of rails that the operators of a group have opened, equal on all its ranks.
_num_rails: WeakKeyDictionary[Group, int] = WeakKeyDictionary()


def open_rail(operator: ExchangeOperator, span: HostSpan) -> Rail:
    """Create an operator's rail to the other hosts. Collective over all hosts.

    The rail fails, reports and closes with its operator. If a rank fails, every rank closes the
    operator and raises.
    """
    group, (timeout, first_timeout) = operator.group, operator.timeouts
    number = _num_rails.get(group, 0) + 1

    def create_rail() -> Rail:
        limits = {"timeout": timeout, "first_timeout": first_timeout}
        return Rail(group, span, number, on_failure=operator.fail, **limits)

    try:
        rail = group.run_collective(
            create_rail, action=f"connecting the hosts of a group for its {operator.kind}"
        )
        operator.add_companion(rail, reports=rail.REPORTED)
    except BaseException:
        operator.close()
        raise
    _num_rails[group] = number
    return rail


def hold_weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        assert bound is not None  # the operator is in a call
        bound()

    return call
