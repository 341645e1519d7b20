# SPDX-License-Identifier: Apache-2.0
"""State that the layers of one model share: the group of its ranks, and its operators."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from weft.allreduce.operator import AllReduce
from weft.alltoall.operator import AllToAll
from weft.errors import InvalidArgument, OutOfOrder
from weft.group import Group
from weft.plugins.settings import compute_first_timeout
from weft.runtime.operator import run_all

Operator = TypeVar("Operator", AllReduce, AllToAll)


class Exchange:
    """Group and operators of a model's expert-parallel ranks.

    Layers run one after another, so layers of equal sizes share an operator. The group is created
    with the model, and an operator by the first call with its sizes; both are collective. Memory
    is freed by `close`, or when Python collects the model.
    """

    def __init__(self, mesh: DeviceMesh, max_tokens: int, timeout: float) -> None:
        self.mesh, self.max_tokens, self.timeout = mesh, max_tokens, timeout
        self.group = Group.from_torch(mesh.get_group(), device=mesh.device_type)
        self.max_tokens_over_ranks = 0  # in this forward pass
        self._operators: dict[tuple[Any, ...], AllReduce | AllToAll] = {}
        self._layers, self._closed = 0, False

    def register_layer(self) -> bool:
        """Count a layer, and return whether it is the model's first."""
        self._layers += 1
        return self._layers == 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def agree_on_rounds(self, rows: int) -> None:
        """Set `max_tokens_over_ranks` from every rank's row count. Collective among host threads.

        It costs one message to rank 0 and back over Unix sockets, and does not wait for GPUs.
        """
        if self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                "ranks with separate batches agree on the number of rounds in every forward pass, "
                "which a CUDA graph cannot replay: do not capture this model, or let its ranks "
                "share one batch (ep_size == tp_size)"
            )
        self._check_open()
        counts = self.group.all_gather(rows, timeout=self.timeout)
        self.max_tokens_over_ranks = max(counts[rank] for rank in self.group.living)

    def get_operator(self, kind: type[Operator], **sizes: Any) -> Operator:
        """Return the operator of these sizes. Collective if it is new."""
        key = (kind, *sizes.values())
        operator: Any = self._operators.get(key)
        if operator is None:
            operator = self._operators[key] = self._create_operator(kind, **sizes)
        return cast("Operator", operator)

    def check(self) -> None:
        """Raise errors that the operators' devices recorded."""
        for operator in self._operators.values():
            operator.check()

    def close(self) -> None:
        """Free operators and group. Local and idempotent."""
        self._closed = True
        close_functions = [operator.close for operator in self._operators.values()]
        self._operators.clear()
        run_all(*close_functions, self.group.close)

    def close_with_error(self, error: BaseException) -> None:
        """Close after an error, and send the error to peers that wait for this rank."""
        self.group.__exit__(type(error), error, error.__traceback__)
        self.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _create_operator(self, kind: type[Operator], **sizes: Any) -> Operator:
        self._check_open()
        # Tensors created in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            return kind(
                self.group,
                max_tokens=self.max_tokens,
                timeout=self.timeout,
                first_timeout=compute_first_timeout(self.timeout),
                **sizes,
            )

    def _check_open(self) -> None:
        if self._closed:
            raise OutOfOrder(
                "this model's exchange was closed, by close() or because a rank failed in a layer; "
                "reload the model"
            )


# Keyed by the mesh's id, because equal meshes may belong to different models: ranks collect a model
# at different times, and its group must not be used by the next model. An entry references its
# mesh, so the id is unique.
_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()


def get_exchange(mesh: DeviceMesh, max_tokens: int, timeout: float) -> Exchange:
    """Return the exchange of a mesh, shared by all its layers. Collective for the first layer."""
    exchange = _exchanges.get(id(mesh))
    if exchange is None:
        exchange = _exchanges[id(mesh)] = Exchange(mesh, max_tokens, timeout)
    return exchange


def list_exchanges() -> list[Exchange]:
    """Return the exchanges of this process's models."""
    return list(_exchanges.values())
