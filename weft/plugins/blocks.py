# SPDX-License-Identifier: Apache-2.0
"""MoE layers of a served model: a decode and a prefill operator that share one set of weights."""

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
from weft.group import Group
from weft.leases import Lease, lease
from weft.moe import MoE
from weft.plugins.faults import Watch
from weft.plugins.settings import Settings, first_timeout
from weft.plugins.weights import Layer, check_weights

_log = logging.getLogger(__name__)
# Low-latency buffers hold max_tokens rows per expert, so larger batches use the prefill operator.
MOST_DECODE_TOKENS = 512
MOST_PREFILL_TOKENS = 4096
LOAD_TIMEOUT = 300.0  # seconds between the first and the last rank to finish loading weights


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest number of tokens per rank in one round, equal on all ranks."""

    decode: int
    prefill: int

    @classmethod
    def from_server(
        cls, decode: int, chunk: int, *, attention_ranks: int, prefill_tokens: int | None = None
    ) -> Limits:
        """Return the limits of a server.

        Args:
            decode: Tokens of an attention group's largest decode batch.
            chunk: Tokens of an attention group's prefill chunk.
            attention_ranks: Ranks that share an attention group's tokens in a MoE block.
            prefill_tokens: Prefill tokens per rank that the user requested.
        """
        small = min(-(-decode // attention_ranks), MOST_DECODE_TOKENS)
        large = prefill_tokens or min(-(-chunk // attention_ranks), MOST_PREFILL_TOKENS)
        return cls(decode=max(1, small), prefill=max(1, small, large))


class Blocks:
    """The MoE layers of one process. Collective: every rank makes the same calls in the same order.

    `max_tokens` is the largest token count over all ranks. It selects the operator and the number
    of rounds, so all ranks must pass the same value; a captured graph keeps both.
    """

    def __init__(self, group: Group, limits: Limits, settings: Settings) -> None:
        self.group, self.limits, self.settings = group, limits, settings
        self._leases: list[Lease[Any]] = []
        self._layers: dict[int, _Served] = {}
        self._refusals = 0
        self.watch: Watch | None = None  # closed with the rest

    def announce(self, what: str) -> None:
        """Log on rank 0 which layers weft serves."""
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
        """Serve a whole MoE layer, including its shared expert. Collective.

        Args:
            layer: The engine's layer.
            shared: The shared expert's forward function.
            shared_size: The shared expert's intermediate size.
        """
        config = layer.config(shared=shared_size if shared is not None else 0)
        if shared is not None and config.hidden != layer.hidden:
            raise InvalidArgument(
                f"{layer.name} has a shared expert, and its rows of {layer.hidden} are padded to "
                f"{config.hidden} for MXFP4 experts: weft pads only layers without a shared expert"
            )
        experts, expected, fp8 = layer.local_expert_weights(), layer.local_expert_ids(), layer.fp8

        def weights(local: tuple[int, ...]) -> Any:
            if local != expected:
                raise OutOfOrder(
                    f"rank {self.group.rank} holds experts {expected[:1]} to {expected[-1:]} in "
                    f"{layer.name}, but {local[:1]} to {local[-1:]} in weft: the engine numbers "
                    "its ranks differently"
                )
            return experts

        def build(mode: str, max_tokens: int) -> MoE:
            owner = lease(
                self.group,
                MoE,
                config,
                weights,
                max_tokens=max_tokens,
                shared=shared,
                mode=mode,
                overlap=self.settings.overlap,
                combine_dtype=self.settings.combine_dtype,
                fp8=fp8,
                missing="drop",  # ids are physical: the engine reroutes around a dead rank itself
                timeout=self.settings.timeout,
                first_timeout=first_timeout(self.settings.timeout),
            )
            self._leases.append(owner)
            return owner.operator

        self._layers[id(layer.module)] = _Served(
            layer,
            build(self.settings.decode, self.limits.decode),
            build("throughput", self.limits.prefill),
            layer.parameters(),
        )

    def has(self, module: Any) -> bool:
        """Whether weft serves the module's whole layer."""
        return id(module) in self._layers

    def check_tensors(self, module: Any) -> None:
        """Raise OutOfOrder if the engine replaced tensors of a served module."""
        served = self._layers[id(module)]
        replaced = served.replaced()
        if replaced:
            raise OutOfOrder(
                f"the tensors of {served.layer.name} were replaced after loading "
                f"({', '.join(replaced)}), and graphs hold the old addresses: write weights "
                "in place, or restart the server"
            )

    @torch.no_grad()
    def reload(self, module: Any) -> None:
        """Copy weights that the engine loaded into new tensors of a served layer.

        Kernels and captured graphs read the original tensors, so the new values are copied there
        and the module gets the original parameters back. The result is the same whether the engine
        wrote in place, keeps its new tensors, or later copies them into the old ones. Local; a
        no-op if no tensor was replaced.

        Raises:
            OutOfOrder: If only some tensors of a reordered layer are new, or if their format
                differs from the served one.
            InvalidArgument: If weft does not support the new tensors.
        """
        served = self._layers[id(module)]
        replaced = served.replaced()
        if not replaced:
            return
        layer = served.layer
        if layer.is_reordered:
            if len(replaced) < len(served.parameters):
                kept = ", ".join(set(served.parameters) - set(replaced))
                raise OutOfOrder(
                    f"{layer.name} was reloaded in part: {', '.join(replaced)} are new, {kept} "
                    "are not, and weft reorders all of them together: load the whole layer, or "
                    "restart the server"
                )
            check_weights(layer, "block")
            layer.local_expert_weights(packed=served.tensors["w13_weight"].dtype == MXFP4)
        for name, tensor in served.tensors.items():
            new = getattr(module, name)
            if new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise OutOfOrder(
                    f"{layer.name}.{name} was reloaded as {list(new.shape)} {new.dtype}, and "
                    f"is served as {list(tensor.shape)} {tensor.dtype}: restart the server"
                )
        for name, parameter in served.parameters.items():
            tensor, new = served.tensors[name], getattr(module, name)
            if new.data_ptr() != tensor.data_ptr():
                tensor.copy_(new)
            parameter.data = tensor
            setattr(module, name, parameter)

    def reload_all(self) -> None:
        """Call `reload` for every layer whose tensors the engine has replaced."""
        for served in self._layers.values():
            if served.replaced():
                self.reload(served.layer.module)

    def exchange(self, layer: Layer, payloads: Sequence[Payload] | None = None) -> AllToAll:
        """Return the all-to-all of a layer whose experts the engine computes. Collective if new.

        `payloads` are the tensors to send, as in `weft.AllToAll`.
        """
        owner = lease(
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
        self._leases.append(owner)
        return owner.operator

    def run(
        self,
        module: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        max_tokens: int,
    ) -> torch.Tensor:
        """Run routed and shared experts: `[tokens, hidden]` to a new `[tokens, hidden]`.

        Args:
            module: A module passed to `add_block`.
            x: This rank's tokens.
            ids: Physical expert ids `[tokens, top_k]`, -1 for none.
            weights: Routing weights `[tokens, top_k]`.
            max_tokens: Largest token count over all ranks.
        """
        served = self._layers[id(module)]
        self.check_tensors(module)
        if max_tokens == 0:
            return torch.empty_like(x)
        moe = served.decode if max_tokens <= self.limits.decode else served.prefill
        if served.layer.scale != 1.0:
            weights = weights * served.layer.scale
        x, ids, padding = x.contiguous(), ids.contiguous(), moe.config.hidden - x.shape[1]
        if padding:
            x = functional.pad(x, (0, padding))
        out = moe(x, topk_ids=ids, topk_weights=weights.contiguous(), rows=max_tokens)
        return out[:, :-padding].contiguous() if padding else out

    @property
    def broken(self) -> bool:
        """Whether the group is broken. Reads host memory only."""
        return any(each.broken for each in self.operators())

    def check(self) -> None:
        """Raise a group error; log input that a device refused, which affects no other rank."""
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
        """Return the error that broke the group, or "". Reads host memory only."""
        try:
            if self.broken:
                self.check()
        except GroupError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Log group errors raised in the context: engines bury them among other tracebacks."""
        try:
            yield
        except GroupError as error:
            _log.critical("%s: %s", type(error).__name__, error)
            raise

    def operators(self) -> list[Any]:
        """Return one operator per workspace."""
        operators: dict[int, Any] = {}
        for each in self._leases:
            exchange = getattr(each.operator, "exchange", each.operator)
            operators.setdefault(id(exchange.heap), each.operator)
        return list(operators.values())

    def close(self) -> None:
        """Free all memory and the group. Local and idempotent."""
        if self.watch is not None:
            self.watch.close()
        for each in self._leases:
            try:
                each.close()
            except WeftError as error:  # the engine is shutting down
                _log.warning("closing a workspace: %s", error)
        self._leases.clear()
        self._layers.clear()
        self.group.close()


class _Served:
    """One layer, with its module kept alive so that the module's id stays unique.

    `parameters` are the module's served parameters by name. `tensors` keeps their data alive, so
    that no other tensor gets one of their addresses.
    """

    def __init__(
        self, layer: Layer, decode: MoE, prefill: MoE, parameters: dict[str, nn.Parameter]
    ) -> None:
        self.layer, self.decode, self.prefill = layer, decode, prefill
        self.parameters = parameters
        self.tensors = {name: each.data for name, each in parameters.items()}
        self._addresses = [(name, each.data_ptr()) for name, each in parameters.items()]

    def replaced(self) -> list[str]:
        """Return the names of tensors that the engine replaced. Runs in every forward pass."""
        module = self.layer.module
        return [
            name for name, address in self._addresses if getattr(module, name).data_ptr() != address
        ]
