# SPDX-License-Identifier: Apache-2.0
"""MoE layers of a model: each has a decode and a prefill operator that share its weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.errors import GroupError, InvalidArgument, OutOfOrder, UsageError, WeftError
from weft.gemm.config import MXFP4
from weft.group import Group
from weft.leases import Leasable, Lease, lease
from weft.moe import MoE
from weft.plugins.faults import Watch
from weft.plugins.metrics import Exporter
from weft.plugins.settings import Settings, compute_first_timeout
from weft.plugins.weights import (
    Layer,
    ParameterFormat,
    build_layer_error,
    check_weights,
    refuse_loads,
)

T = TypeVar("T", bound=Leasable)
_log = logging.getLogger(__name__)
# Low-latency buffers hold max_tokens rows per expert, so larger batches use the prefill operator.
MAX_DECODE_TOKENS = 512
MAX_PREFILL_TOKENS = 4096
LOAD_TIMEOUT = 300.0  # seconds between the first and the last rank to finish loading weights


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum tokens per rank in one round of each operator, equal on all ranks."""

    decode: int
    prefill: int

    @classmethod
    def from_server(
        cls, decode: int, chunk: int, *, attention_ranks: int, prefill_tokens: int | None = None
    ) -> Limits:
        """Compute the limits from a server's batch sizes.

        Args:
            decode: Maximum tokens of an attention group's decode batch.
            chunk: Tokens of an attention group's prefill chunk.
            attention_ranks: Number of ranks that share an attention group's tokens in a MoE block.
            prefill_tokens: Prefill tokens per rank requested by the user, or None.
        """
        decode_tokens = min(-(-decode // attention_ranks), MAX_DECODE_TOKENS)
        prefill = prefill_tokens or min(-(-chunk // attention_ranks), MAX_PREFILL_TOKENS)
        return cls(decode=max(1, decode_tokens), prefill=max(1, decode_tokens, prefill))


class Blocks:
    """MoE layers of one process. Collective: every rank makes the same calls in the same order.

    `max_tokens` is the largest token count over all ranks. It selects the operator and the number
    of rounds, so all ranks must pass the same value; a captured graph fixes both.
    """

    def __init__(
        self, group: Group, limits: Limits, settings: Settings, *, avoids_pool: bool = False
    ) -> None:
        """Create no layers yet.

        Args:
            group: Ranks of the layers.
            limits: Maximum tokens of the operators.
            settings: Settings of the plug-in.
            avoids_pool: Whether the loading thread allocates from a torch memory pool whose
                contents the engine discards when it sleeps. Operators are then created in another
                thread, whose allocations torch does not route to the pool.
        """
        if settings.batch_invariant and settings.form != "block":
            raise InvalidArgument(
                f"the engine's batch-invariant mode with weft's form {settings.form!r}, in which "
                "each rank rounds its own sum of a token's rows: use form 'block'"
            )
        self.group, self.limits, self.settings = group, limits, settings
        self._avoids_pool = avoids_pool
        self._leases: list[Lease[Any]] = []
        self._layers: dict[int, _LayerState] = {}
        # By a module's id and payloads, with the module, so that the id stays unique.
        self._exchanges: dict[tuple[int, tuple[Payload, ...] | None], tuple[Any, AllToAll]] = {}
        self._num_invalid_inputs = 0
        self.watch: Watch | None = None  # closed by `close`
        self._exporter = Exporter.start(group)

    def log_layers(self, label: str) -> None:
        """Log on rank 0 that weft runs the layers described by `label`."""
        if self.group.rank == 0:
            _log.info(
                "weft runs %s on %d ranks, form %s: up to %d tokens per rank and round, %d in "
                "prefill; hosts: %d",
                label, self.group.size, self.settings.form, self.limits.decode,
                self.limits.prefill, self.group.hosts,
            )  # fmt: skip

    def add_block(
        self,
        layer: Layer,
        *,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        shared_size: int = 0,
        moves_experts: bool = False,
        weights_memory: AbstractContextManager[object] | None = None,
    ) -> None:
        """Create the operators of a whole MoE layer, including its shared expert. Collective.

        Args:
            layer: The engine's layer.
            shared: The shared expert's forward function.
            shared_size: The shared expert's intermediate size.
            moves_experts: Whether the engine's EPLB moves experts between ranks.
            weights_memory: Context in which the engine allocates weights.
        """
        was_mxfp4 = layer.is_mxfp4
        config = layer.build_config(shared=shared_size if shared is not None else 0)
        if shared is not None and config.hidden != layer.hidden:
            raise InvalidArgument(
                f"{layer.name} has a shared expert and MXFP4 experts with hidden size "
                f"{layer.hidden}, which weft would pad to {config.hidden}: it pads only layers "
                "without a shared expert"
            )
        formats = layer.read_formats()
        with weights_memory or contextlib.nullcontext():
            experts = layer.local_expert_weights()
        expected, fp8 = layer.local_expert_ids(), layer.uses_fp8_rows
        if moves_experts and was_mxfp4 != layer.is_mxfp4:
            raise build_layer_error(
                layer.name,
                "block",
                "this rank converted its MXFP4 experts to FP8, and EPLB needs one format on all "
                "ranks: remove --enable-eplb",
            )

        def get_weights(expert_ids: tuple[int, ...]) -> Any:
            if expert_ids != expected:
                raise OutOfOrder(
                    f"rank {self.group.rank} has experts {expected[:1]} to {expected[-1:]} in "
                    f"{layer.name}, but {expert_ids[:1]} to {expert_ids[-1:]} in weft: the "
                    "engine numbers its ranks differently"
                )
            return experts

        def build(mode: str, max_tokens: int) -> MoE:
            return self._lease(
                MoE,
                config,
                get_weights,
                max_tokens=max_tokens,
                shared=shared,
                mode=mode,
                overlap=self.settings.overlap,
                batch_invariant=self.settings.batch_invariant,
                fp8=fp8,
                missing="drop",  # ids are physical: the engine itself reroutes tokens of dead ranks
            )

        self._layers[id(layer.module)] = _LayerState(
            layer,
            build(self.settings.decode, self.limits.decode),
            build("throughput", self.limits.prefill),
            layer.parameters(),
            # FP8 has not all values of MXFP4, so such a layer cannot be restored.
            {} if was_mxfp4 != layer.is_mxfp4 else formats,
        )

    def has_layer(self, module: Any) -> bool:
        """Whether the module was passed to `add_block`."""
        return id(module) in self._layers

    def check_tensors(self, module: Any) -> None:
        """Raise OutOfOrder if the engine replaced tensors of a module, or has them to load into."""
        state = self._layers[id(module)]
        if state.restored:
            raise OutOfOrder(
                f"the experts of {state.layer.name} are in the engine's row order or format since "
                "a weight update began, and this call bypasses the hook that converts them: run a "
                "forward pass of the engine's model runner first, or restart the server"
            )
        replaced = state.list_replaced()
        if replaced:
            raise OutOfOrder(
                f"the tensors of {state.layer.name} were replaced after loading "
                f"({', '.join(replaced)}), and graphs contain the old addresses: write weights "
                "in place, or restart the server"
            )

    @torch.no_grad()
    def reload(self, module: Any) -> None:
        """Copy weights that the engine loaded into new tensors to the original tensors.

        Kernels and captured graphs read the original tensors. After the copy, the module has its
        original parameters again. The result is the same whether the engine wrote in place, uses
        its new tensors, or later copies them into the old ones. Local; a no-op if no tensor was
        replaced.

        Raises:
            OutOfOrder: If only some tensors of a reordered layer are new, or if their shape or
                dtype has changed.
            InvalidArgument: If weft does not support the new tensors.
        """
        state = self._layers[id(module)]
        replaced = state.list_replaced()
        if not (replaced or state.restored):
            return
        layer = state.layer
        if layer.is_reordered:
            if not state.restored and len(replaced) < len(state.parameters):
                unchanged = ", ".join(set(state.parameters) - set(replaced))
                raise OutOfOrder(
                    f"{layer.name} was reloaded in part: {', '.join(replaced)} are new, "
                    f"{unchanged} are not, and weft reorders all of them together: load the "
                    "whole layer, or restart the server"
                )
            check_weights(layer, "block")
            layer.local_expert_weights(packed=state.tensors["w13_weight"].dtype == MXFP4)
        for name, tensor in state.tensors.items():
            new = getattr(module, name)
            if new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise OutOfOrder(
                    f"{layer.name}.{name} was reloaded as {list(new.shape)} {new.dtype}, but "
                    f"was {list(tensor.shape)} {tensor.dtype}: restart the server"
                )
        for name, parameter in state.parameters.items():
            tensor, new = state.tensors[name], getattr(module, name)
            if new.data_ptr() != tensor.data_ptr():
                tensor.copy_(new)
            parameter.data = tensor
            setattr(module, name, parameter)
            if state.restored and name in state.formats:
                refuse_loads(parameter, f"{layer.name}.{name}")
        state.restored = False

    def reload_all(self, prepare: Callable[[Any], None] | None = None) -> None:
        """Reload every layer whose tensors the engine has replaced or may have written.

        `prepare` is called before with each module that was restored.
        """
        for state in self._layers.values():
            if state.restored and prepare is not None:
                prepare(state.layer.module)
            if state.restored or state.list_replaced():
                self.reload(state.layer.module)

    @torch.no_grad()
    def restore(self, modules: Iterable[Any]) -> list[Any]:
        """Put reordered weights of `modules` into the engine's form, before the engine loads some.

        `reload_all` converts them again. MXFP4 weights need the memory of both forms meanwhile, and
        those that were converted to FP8 stay: loads raise.

        Returns:
            The modules whose weights changed.
        """
        restored = []
        for module in modules:
            state = self._layers.get(id(module))
            if state is not None and state.formats and not state.restored:
                state.layer.restore(state.formats)
                state.restored = True
                restored.append(module)
        return restored

    def get_exchange(self, layer: Layer, payloads: Sequence[Payload] | None = None) -> AllToAll:
        """Return the all-to-all of a layer whose experts the engine runs. Collective if new.

        A layer that is loaded again has it already. `payloads` are the tensors to send, as in
        `weft.AllToAll`.
        """
        key = id(layer.module), None if payloads is None else tuple(payloads)
        if key not in self._exchanges:
            exchange = self._lease(
                AllToAll,
                max_tokens=self.limits.prefill,
                top_k=layer.top_k,
                num_experts=layer.num_experts,
                hidden=layer.hidden,
                dtype=layer.dtype,
                payloads=payloads,
            )
            self._exchanges[key] = layer.module, exchange
        return self._exchanges[key][1]

    def _lease(self, kind: type[T], *args: Any, **options: Any) -> T:
        """Lease an operator with the settings that all operators have, and return it."""

        def create() -> Lease[T]:
            if self.group.device.type == "cuda":
                torch.cuda.set_device(self.group.device)
            return lease(
                self.group,
                kind,
                *args,
                **options,
                combine_dtype=self.settings.combine_dtype,
                timeout=self.settings.timeout,
                first_timeout=compute_first_timeout(self.settings.timeout),
            )

        if self._avoids_pool:
            with ThreadPoolExecutor(1) as executor:
                leased = executor.submit(create).result()
        else:
            leased = create()
        self._leases.append(leased)
        return leased.operator

    def run(
        self,
        module: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        max_tokens: int,
    ) -> torch.Tensor:
        """Run the routed and shared experts; return a new `[tokens, hidden]`.

        Args:
            module: A module passed to `add_block`.
            x: This rank's tokens `[tokens, hidden]`.
            ids: Physical expert ids `[tokens, top_k]`, -1 for none.
            weights: Routing weights `[tokens, top_k]`.
            max_tokens: Largest token count over all ranks.
        """
        state = self._layers[id(module)]
        self.check_tensors(module)
        if max_tokens == 0:
            return torch.empty_like(x)
        moe = state.decode if max_tokens <= self.limits.decode else state.prefill
        if state.layer.scale != 1.0:
            weights = weights * state.layer.scale
        x, ids, padding = x.contiguous(), ids.contiguous(), moe.config.hidden - x.shape[1]
        if padding:
            x = functional.pad(x, (0, padding))
        out = moe(x, topk_ids=ids, topk_weights=weights.contiguous(), rows=max_tokens)
        return out[:, :-padding].contiguous() if padding else out

    @property
    def is_broken(self) -> bool:
        """Whether the group is broken. Reads host memory only."""
        return any(operator.broken for operator in self.list_operators())

    def check(self) -> None:
        """Raise a group error. Invalid input, which affects no other rank, is only logged."""
        for operator in self.list_operators():
            try:
                with self.log_group_errors():
                    operator.check()
            except UsageError as error:
                self._num_invalid_inputs += 1
                count = self._num_invalid_inputs
                if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                    _log.error("rank %d, invalid input %d: %s", self.group.rank, count, error)

    def describe_fault(self) -> str:
        """Return the error that broke the group, or "". Reads host memory only."""
        try:
            if self.is_broken:
                self.check()
        except GroupError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @contextlib.contextmanager
    def log_group_errors(self) -> Iterator[None]:
        """Log group errors raised in the context as one line. Engines log long tracebacks."""
        try:
            yield
        except GroupError as error:
            _log.critical("%s: %s", type(error).__name__, error)
            raise

    def list_operators(self) -> list[Any]:
        """Return one operator per workspace."""
        operators: dict[int, Any] = {}
        for leased in self._leases:
            exchange = getattr(leased.operator, "exchange", leased.operator)
            operators.setdefault(id(exchange.heap), leased.operator)
        return list(operators.values())

    def close(self) -> None:
        """Free all memory and the group. Local and idempotent."""
        if self.watch is not None:
            self.watch.close()
        if self._exporter is not None:
            self._exporter.close()
        for leased in self._leases:
            try:
                leased.close()
            except WeftError as error:  # the engine is shutting down
                _log.warning("failed to close a workspace: %s", error)
        self._leases.clear()
        self._layers.clear()
        self._exchanges.clear()
        self.group.close()


class _LayerState:
    """A layer's operators and parameters.

    It references the module, so that the module's id stays unique, and the data of the parameters,
    so that no other tensor gets one of their addresses.
    """

    def __init__(
        self,
        layer: Layer,
        decode: MoE,
        prefill: MoE,
        parameters: dict[str, nn.Parameter],
        formats: dict[str, ParameterFormat],
    ) -> None:
        self.layer, self.decode, self.prefill = layer, decode, prefill
        self.parameters = parameters
        self.formats = formats  # of the parameters that `restore` gives back to the engine
        self.restored = False  # whether the weights are in the engine's form, see `restore`
        self.tensors = {name: parameter.data for name, parameter in parameters.items()}
        self._addresses = [(name, parameter.data_ptr()) for name, parameter in parameters.items()]

    def list_replaced(self) -> list[str]:
        """Return the names of tensors that the engine replaced. Called in every forward pass."""
        module = self.layer.module
        return [
            name for name, address in self._addresses if getattr(module, name).data_ptr() != address
        ]
