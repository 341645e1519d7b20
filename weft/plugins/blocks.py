# SPDX-License-Identifier: Apache-2.0
"""A served model's MoE blocks on weft: two sizes with one set of weights, shared by all layers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.errors import GroupError, InvalidArgument, OutOfOrder, UsageError, WeftError
from weft.gemm.config import MXFP4
from weft.leases import Lease, lease
from weft.memory import Group
from weft.moe import MoE
from weft.plugins.faults import Watch
from weft.plugins.settings import Settings, first_timeout
from weft.plugins.weights import Layer, check

_log = logging.getLogger(__name__)
# A low-latency layer has a slot for every token at every expert: more tokens take the other size.
MOST_DECODE_TOKENS = 512
MOST_PREFILL_TOKENS = 4096
MEETING = 300.0  # seconds that ranks may be apart when they have loaded their weights


@dataclass(frozen=True, slots=True)
class Limits:
    """Most tokens of a rank that one round takes, equal on all ranks."""

    decode: int
    prefill: int

    @classmethod
    def of(
        cls, decode: int, chunk: int, *, attention_ranks: int, wanted: int | None = None
    ) -> Limits:
        """The limits of a server.

        decode: tokens of the largest decode batch of an attention group.   chunk: of a prefill.
        attention_ranks: each group's tokens are split over so many ranks before a MoE block.
        wanted: of a prefill on a rank, where the user says so.
        """
        small = min(-(-decode // attention_ranks), MOST_DECODE_TOKENS)
        large = wanted or min(-(-chunk // attention_ranks), MOST_PREFILL_TOKENS)
        return cls(decode=max(1, small), prefill=max(1, small, large))


class Blocks:
    """What serves the layers of one process. Every rank makes the same calls in the same order.

    most: tokens of the rank that has most, equal on all ranks: it chooses the size, and how many
        rounds a batch beyond it takes. A captured graph keeps both.
    """

    def __init__(self, group: Group, limits: Limits, settings: Settings) -> None:
        self.group, self.limits, self.settings = group, limits, settings
        self._leases: list[Lease[Any]] = []
        self._served: dict[int, _Served] = {}
        self._refusals = 0
        self.watch: Watch | None = None  # closed with the rest

    def announce(self, what: str) -> None:
        """Log what is served, on one rank."""
        if self.group.rank == 0:
            _log.info(
                "weft serves %s on %d ranks, form %s: rounds of %d tokens a rank, %d in prefill; "
                "hosts: %d",
                what, self.group.size, self.settings.form, self.limits.decode,
                self.limits.prefill, self.group.hosts,
            )  # fmt: skip

    def add_block(
        self,
        layer: Layer,
        *,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        shared_size: int = 0,
    ) -> None:
        """Serve `layer` whole, with the shared expert of its block. Collective.

        shared_size: the shared expert's intermediate size. Raises what `weft.MoE` raises.
        """
        config = layer.config(shared=shared_size if shared is not None else 0)
        if shared is not None and config.hidden != layer.hidden:
            raise InvalidArgument(
                f"{layer.name} has a shared expert and rows of {layer.hidden}, which are padded to "
                f"{config.hidden} for its MXFP4 experts: served is such a layer without one"
            )
        experts, mine, fp8 = layer.take(), layer.mine(), layer.fp8

        def weights(local: tuple[int, ...]) -> Any:
            if local != mine:
                raise OutOfOrder(
                    f"rank {self.group.rank} has experts {mine[:1]} to {mine[-1:]} in {layer.name} "
                    f"and {local[:1]} to {local[-1:]} in weft: the engine numbers its ranks "
                    "otherwise"
                )
            return experts

        def build(mode: str, most: int) -> MoE:
            made = lease(
                self.group,
                MoE,
                config,
                weights,
                max_tokens=most,
                shared=shared,
                mode=mode,
                overlap=self.settings.overlap,
                combine_dtype=self.settings.combine_dtype,
                fp8=fp8,
                missing="drop",  # ids are physical: who goes on without a rank names it no more
                timeout=self.settings.timeout,
                first_timeout=first_timeout(self.settings.timeout),
            )
            self._leases.append(made)
            return made.operator

        self._served[id(layer.module)] = _Served(
            layer,
            build(self.settings.decode, self.limits.decode),
            build("throughput", self.limits.prefill),
            layer.parameters(),
        )

    def has(self, module: Any) -> bool:
        """Whether the module's layer is served whole."""
        return id(module) in self._served

    def check_tensors(self, module: Any) -> None:
        """Raise OutOfOrder if the module holds other tensors than those that are served."""
        served = self._served[id(module)]
        replaced = served.replaced()
        if replaced:
            raise OutOfOrder(
                f"{served.layer.name} has other tensors than when it was loaded "
                f"({', '.join(replaced)}), and graphs hold the old ones' addresses: write weights "
                "in place, or start the server anew"
            )

    @torch.no_grad()
    def reload(self, module: Any) -> None:
        """Serve what the engine has loaded into new tensors of a layer that is served already.

        The values are copied into the tensors that kernels and captured graphs read, and the module
        gets those parameters back. So the result is the same whether the engine wrote in place,
        keeps its new tensors, or copies them into the old ones itself afterwards. Local; nothing
        happens if every tensor is the served one.

        Raises:
            OutOfOrder: only some tensors of a layer in weft's own order are new, or their format
                differs from the one that is served.
            InvalidArgument: the new tensors are not what weft takes.
        """
        served = self._served[id(module)]
        replaced = served.replaced()
        if not replaced:
            return
        layer = served.layer
        if layer.is_reordered:
            if len(replaced) < len(served.parameters):
                kept = ", ".join(set(served.parameters) - set(replaced))
                raise OutOfOrder(
                    f"{layer.name} was loaded again in part: {', '.join(replaced)} are new, {kept} "
                    "are not, and weft reorders all of them together: load the whole layer, or "
                    "start the server anew"
                )
            check(layer, "block")
            layer.take(packed=served.tensors["w13_weight"].dtype == MXFP4)
        for name, tensor in served.tensors.items():
            new = getattr(module, name)
            if new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise OutOfOrder(
                    f"{layer.name}.{name} was loaded again as {list(new.shape)} {new.dtype}, and "
                    f"is served as {list(tensor.shape)} {tensor.dtype}: start the server anew"
                )
        for name, parameter in served.parameters.items():
            tensor, new = served.tensors[name], getattr(module, name)
            if new.data_ptr() != tensor.data_ptr():
                tensor.copy_(new)
            parameter.data = tensor
            setattr(module, name, parameter)

    def reload_all(self) -> None:
        """Call `reload` for every layer: an engine may have loaded weights since the last pass."""
        for served in self._served.values():
            if served.replaced():
                self.reload(served.layer.module)

    def exchange(self, layer: Layer, payloads: Sequence[Payload] | None = None) -> AllToAll:
        """The all-to-all of a layer whose experts the engine multiplies. Collective if new.

        payloads: what travels, as in `weft.AllToAll`.
        """
        made = lease(
            self.group,
            AllToAll,
            max_tokens=self.limits.prefill,
            top_k=layer.top_k,
            num_experts=layer.num_experts,
            hidden=layer.hidden,
            dtype=layer.dtype,
            payloads=payloads,
            combine_dtype=self.settings.combine_dtype,
            timeout=self.settings.timeout,
            first_timeout=first_timeout(self.settings.timeout),
        )
        self._leases.append(made)
        return made.operator

    def run(
        self, module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int
    ) -> torch.Tensor:
        """`[tokens, hidden]` -> a new `[tokens, hidden]`: routed experts and the shared one.

        module: the layer's.   ids, weights: `[tokens, top_k]`, of physical experts, -1 for none.
        """
        served = self._served[id(module)]
        self.check_tensors(module)
        if most == 0:
            return torch.empty_like(x)
        moe = served.decode if most <= self.limits.decode else served.prefill
        if served.layer.scale != 1.0:
            weights = weights * served.layer.scale
        x, ids, missing = x.contiguous(), ids.contiguous(), moe.config.hidden - x.shape[1]
        if missing:
            x = functional.pad(x, (0, missing))
        out = moe(x, topk_ids=ids, topk_weights=weights.contiguous(), rows=most)
        return out[:, :-missing].contiguous() if missing else out

    @property
    def broken(self) -> bool:
        """Did the group break? Reads of host memory."""
        return any(each.broken for each in self.operators())

    def check(self) -> None:
        """Raise what broke the group; log what a device refused, which harmed nobody."""
        for operator in self.operators():
            try:
                with self.logged():
                    operator.check()
            except UsageError as error:
                self._refusals += 1
                if self._refusals & (self._refusals - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                    count = self._refusals
                    _log.error("rank %d, refusal %d: %s", self.group.rank, count, error)

    def fault(self) -> str:
        """What broke the group, or nothing; reads of host memory."""
        try:
            if self.broken:
                self.check()
        except GroupError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Log what breaks the group in here, which the engine shows in a traceback among many."""
        try:
            yield
        except GroupError as error:
            _log.critical("%s: %s", type(error).__name__, error)
            raise

    def operators(self) -> list[Any]:
        """One of each workspace."""
        found: dict[int, Any] = {}
        for each in self._leases:
            exchange = getattr(each.operator, "exchange", each.operator)
            found.setdefault(id(exchange.heap), each.operator)
        return list(found.values())

    def close(self) -> None:
        """Give all memory and the group back. Local and idempotent."""
        if self.watch is not None:
            self.watch.close()
        for each in self._leases:
            try:
                each.close()
            except WeftError as error:  # the engine ends: it has nobody to catch an error
                _log.warning("closing a workspace: %s", error)
        self._leases.clear()
        self._served.clear()
        self.group.close()


class _Served:
    """One layer. It keeps the module, so that the module's id stays its own.

    parameters: the module's, by name, as weft serves them.
    tensors: their data; kept, so that no other tensor gets one of their addresses.
    """

    def __init__(
        self, layer: Layer, decode: MoE, prefill: MoE, parameters: dict[str, nn.Parameter]
    ) -> None:
        self.layer, self.decode, self.prefill = layer, decode, prefill
        self.parameters = parameters
        self.tensors = {name: each.data for name, each in parameters.items()}
        self._addresses = [(name, each.data_ptr()) for name, each in parameters.items()]

    def replaced(self) -> list[str]:
        """Names of the module's tensors that are not the served ones. Called for every pass."""
        module = self.layer.module
        return [name for name, at in self._addresses if getattr(module, name).data_ptr() != at]
