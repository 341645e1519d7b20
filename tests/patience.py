"""A machine under load is late, not dead: tests that name no deadline wait ten minutes for a peer.

The fork server of the ranks imports this module, and so does the conftest.
"""

from __future__ import annotations

import inspect

import weft

SECONDS = 600.0
PATIENT = (weft.AllToAll, weft.LowLatencyAllToAll, weft.AllReduce, weft.MoE)

for each in PATIENT:
    defaults = inspect.unwrap(each.__init__).__kwdefaults__
    assert defaults is not None
    assert {"timeout", "first_timeout"} <= defaults.keys()
    defaults.update(timeout=SECONDS, first_timeout=SECONDS)
