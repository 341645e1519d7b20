# SPDX-License-Identifier: Apache-2.0
"""What the layers of one model share: the group of its ranks, and the operators on it."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from weft.allreduce.operator import AllReduce
from weft.alltoall.operator import AllToAll
from weft.errors import InvalidArgument, OutOfOrder
from weft.memory import Group
from weft.plugins.settings import first_timeout
from weft.runtime.operator import call_all

Operator = TypeVar("Operator", AllReduce, AllToAll)


class Exchange:
    """A group of a model's expert-parallel ranks, and one operator for all layers of equal sizes.

    Layers run one after another, so one operator serves them all. The group is made here, with the
    model, and an operator at the first call of its sizes; both are collective. When the model is
    dropped everything is given back, and `close` does it at once.
    """

    def __init__(self, mesh: DeviceMesh, max_tokens: int, timeout: float) -> None:
        self.mesh, self.max_tokens, self.timeout = mesh, max_tokens, timeout
        self.group = Group.from_torch(mesh.get_group(), device=mesh.device_type)
        self.most = 0  # rows of the rank that has most, as agreed in this forward pass
        self._operators: dict[tuple[Any, ...], AllReduce | AllToAll] = {}
        self._layers, self._closed = 0, False

    def join(self) -> bool:
        """Count a layer in; is it the model's first?"""
        self._layers += 1
        return self._layers == 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def agree(self, rows: int) -> None:
        """Learn how many rows the rank with most has. Collective: hosts wait for each other here.

        One message to rank 0 and back over Unix sockets; no GPU is waited for.
        """
        if self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                "ranks with batches of their own agree on a number of rounds in every forward "
                "pass, which a CUDA graph cannot replay: do not capture this model, or let its "
                "ranks share one batch (ep_size == tp_size)"
            )
        self._check_open()
        counts = self.group.all_gather(rows, timeout=self.timeout)
        self.most = max(counts[rank] for rank in self.group.living)

    def operator(self, kind: type[Operator], **sizes: Any) -> Operator:
        """The operator of these sizes. Collective when it is new."""
        key = (kind, *sizes.values())
        found: Any = self._operators.get(key)
        if found is None:
            found = self._operators[key] = self._open(kind, **sizes)
        return cast("Operator", found)

    def check(self) -> None:
        """Raise what the operators' devices have recorded."""
        for operator in self._operators.values():
            operator.check()

    def close(self) -> None:
        """Give operators and group back. Local and idempotent."""
        self._closed = True
        closes = [operator.close for operator in self._operators.values()]
        self._operators.clear()
        call_all(*closes, self.group.close)

    def leave(self, error: BaseException) -> None:
        """Close because of `error`: peers that wait for this rank hear of it, and why."""
        self.group.__exit__(type(error), error, error.__traceback__)
        self.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _open(self, operator: type[Operator], **sizes: Any) -> Operator:
        self._check_open()
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return operator(
                self.group,
                max_tokens=self.max_tokens,
                timeout=self.timeout,
                first_timeout=first_timeout(self.timeout),
                **sizes,
            )

    def _check_open(self) -> None:
        if self._closed:
            raise OutOfOrder(
                "this model's exchange was closed, by close() or because a rank failed in a layer; "
                "load the model anew"
            )


# By the mesh's identity, because equal meshes are of different models: a model that one rank has
# dropped and another has not must not lend its group to the next. An entry keeps its mesh alive,
# so no other mesh has its id.
_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()


def exchange_of(mesh: DeviceMesh, max_tokens: int, timeout: float) -> Exchange:
    """What all layers that were made on this mesh share; collective at the first."""
    found = _exchanges.get(id(mesh))
    if found is None:
        found = _exchanges[id(mesh)] = Exchange(mesh, max_tokens, timeout)
    return found


def exchanges() -> list[Exchange]:
    """Those of this process's models."""
    return list(_exchanges.values())
