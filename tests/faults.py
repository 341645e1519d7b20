# SPDX-License-Identifier: Apache-2.0
"""Fault injection at the fault points (device/fault.cuh) of kernels that are built with FAULTS."""

import torch

from tests.headers import HEADER_BYTES, Header
from tests.patience import HasHeap
from weft.heap.header import Fault

FAULTS = ("WEFT_FAULTS=1",)
DELAY, JITTER, DROP, LIE, STAY_AWAY, DIE = range(1, 7)
ANY_PEER, ANY_EPOCH = 32, (1 << 64) - 1
# Points of dispatch and combine, and of an all-reduce.
DISPATCH_ENTER, AFTER_PAYLOAD, BEFORE_FLAG, BEFORE_POLL = range(1, 5)
COMBINE_ENTER, BEFORE_READY, BEFORE_READ = range(5, 8)
REDUCE_ENTER, AFTER_ROWS, BEFORE_ROWS, BEFORE_MOMENTS = range(8, 12)


def plan_fault(
    operator: HasHeap,
    point: int,
    action: int,
    *,
    peer: int = ANY_PEER,
    epoch: int = ANY_EPOCH,
    argument: int = 0,
) -> None:
    """Plan an action of this rank at a fault point. `argument`: nanoseconds of a delay."""
    fault = Fault(point=point, action=action, peer=peer, epoch=epoch, argument=argument)
    at, raw = Header.fault.offset, torch.frombuffer(bytearray(fault), dtype=torch.uint8)
    view = operator.heap.tensor((HEADER_BYTES,), torch.uint8)
    view[at : at + len(raw)].copy_(raw)
