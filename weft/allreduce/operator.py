# SPDX-License-Identifier: Apache-2.0
"""AllReduce: tensor-parallel sums fused with residual, RMSNorm and FP8, over symmetric memory."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Never

import torch

from weft.allreduce import compile as traced
from weft.allreduce.call import (
    CheckedCall,
    FP8Static,
    FusedCall,
    MoEFinalize,
    OutputRequest,
    PreparedCall,
    Quant,
    Reduced,
)
from weft.allreduce.choice import Choice, choose_backend, eligible_backends
from weft.allreduce.config import MISSING, ReduceConfig, memory_bytes
from weft.allreduce.kernels import MOE, load_kernels
from weft.arguments import check_bools, check_choice, check_int, format_choices, raise_invalid
from weft.errors import InvalidArgument
from weft.group import Group
from weft.group.wire import JSON
from weft.heap.header import ErrorRecord
from weft.keywords import internal, reject_unknown
from weft.runtime.ambient import records_creation
from weft.runtime.check import check_tokens
from weft.runtime.identity import BACKENDS, describe_allreduce
from weft.runtime.kernels import Kernels
from weft.runtime.operator import Operator, exclusive_call
from weft.runtime.options import RunOptions
from weft.runtime.prepared import CallCache
from weft.runtime.report import ALL_REDUCE, GONE_UNMASKED

_log = logging.getLogger(__name__)
AUTO = "auto"


class AllReduce(Operator):
    """Sum every rank's rows and, in the same launch, add a residual, normalise and quantise.

    `weft.reference.allreduce_fused` specifies the results bit for bit, for every backend, number of
    tokens and launch. The constructor allocates all memory, compiles all kernels and is collective.
    A call allocates only outputs that were not passed, does not synchronise with the host, and may
    be captured in CUDA graphs. Every rank passes the same number of tokens, eps and weight_bias.
    Residuals, weights and the scale of `FP8Static` must be equal on all ranks unless `epilogue_at`
    is "receiver".

    Args:
        group: Ranks of one host. A single rank is allowed: the sum is then its own rows.
        max_tokens: Maximum rows of one rank in one call.
        hidden: Columns of a row, a multiple of 8.
        dtype: bfloat16, float16 or float32.
        backends: Some of "oneshot" (every rank sums all rows), "twoshot" and "twoshot_bulk" (one
            rank sums each row; bulk is for prefill). Default: all.
        epilogue_at: Rank whose residual, weight and `FP8Static` scale the two-shot backends apply
            to a row. "owner": the rank that sums the row; they must be equal on all ranks.
            "receiver": each rank applies its own.
        missing: Behaviour of calls after a recovery without some ranks. "error": calls raise.
            "drop": calls sum over the living ranks in rank order, with the one-shot backend.
        timeout: Seconds that a wait for a peer may take.
        first_timeout: Seconds that a wait in the first call may take.
        programmatic_launch: Let a short kernel become resident while its predecessor in the stream
            still runs.

    Raises:
        InvalidArgument: an argument is invalid on every rank.
        CreationFailed: the creation failed on a rank. Every rank raises it.
        GeometryMismatch: ranks passed different sizes.
    """

    _phase_names = ("all-reduce",)

    config: ReduceConfig
    _describe_call = staticmethod(describe_allreduce)

    @records_creation
    def __init__(
        self,
        group: Group,
        *,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        backends: Sequence[str] | None = None,
        epilogue_at: str = "owner",
        missing: str = "error",
        timeout: float = 2.0,
        first_timeout: float = 120.0,
        programmatic_launch: bool = True,
        _defines: Sequence[str] = (),
        _first_epoch: int = 0,
    ) -> None:
        self.backends: tuple[str, ...] = ()

        options = RunOptions.from_arguments(locals())

        def prepare() -> tuple[ReduceConfig, Kernels]:
            group.require_one_host("an all-reduce")
            self.backends = _check_backends(backends, check_choice("missing", missing, MISSING))
            config = ReduceConfig.from_args(
                ranks=group.size,
                max_tokens=max_tokens,
                hidden=hidden,
                dtype=dtype,
                epilogue_at=epilogue_at,
                missing=missing,
            )
            return config, load_kernels(group.device, config, options.build(defines=_defines))

        self._create(group, "an all-reduce", prepare, options, first_epoch=_first_epoch)
        self.dtype = dtype
        self._choices: dict[tuple[int, bool], Choice] = {}
        self._prepared: CallCache[PreparedCall] = CallCache()

    memory_bytes = staticmethod(memory_bytes)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in one call."""
        return self.config.tokens

    def fused(
        self,
        x: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        weight_bias: float = 0.0,
        quant: Quant | None = None,
        prologue: MoEFinalize | None = None,
        out: OutputRequest = None,
        residual_out: OutputRequest = None,
        norm_out: OutputRequest = None,
        quant_out: OutputRequest = None,
        scale_out: OutputRequest = None,
        backend: str = "auto",
        **_unknown: Never,
    ) -> Reduced:
        """Sum all ranks' rows and write the requested outputs.

        For each `*_out` argument, pass a tensor to write, True to allocate one, or False for none.
        With None, `out` is written if there is neither residual nor weight, the residual if there
        is one, the norm if there is a weight and no quant, and quant and scale if there is a quant.
        Outputs may be exactly x, and outputs other than `out` exactly residual.

        Args:
            x: `[tokens, hidden]`, this rank's rows. None if there is a prologue.
            residual: `[tokens, hidden]`, added to the rounded sum.
            weight: `[hidden]` of the rows' dtype or float32, the weight of RMSNorm.
            eps: Added to the mean of squares.
            weight_bias: Added to `weight`; 1 for Gemma's RMSNorm.
            quant: `FP8Static(scale)`, `FP8Token()` or `FP8Group(128, scale=...)`: quantisation of
                the normed rows.
            prologue: `MoEFinalize`, which computes this rank's rows from experts' rows.
            out: The rounded sum.
            residual_out: The sum plus the residual.
            norm_out: The normed rows.
            quant_out: The quantised rows.
            scale_out: Their scales.
            backend: "auto" or one of `backends`.

        Returns:
            All outputs by name; None for those that were not written.

        Raises:
            InvalidArgument: a tensor or an option is invalid, or tensors overlap that must not.
            TokenOverflow: there are more tokens than `max_tokens`.
            OutOfOrder: another thread is in a call, or the object is closed.
            GroupError: the group is broken, or ranks made different calls.
        """
        if _unknown:
            reject_unknown(self.fused, _unknown)
        requested = (out, residual_out, norm_out, quant_out, scale_out)
        call = FusedCall(x, residual, weight, *requested, quant, prologue, eps, weight_bias)
        if torch.compiler.is_dynamo_compiling():
            return traced.call_fused(self, call, backend)
        return self.run_fused(call, backend)

    @internal
    @exclusive_call("fused")
    def run_fused(self, call: FusedCall, backend: str) -> Reduced:
        """Check the call, or find it in the cache, and launch it."""
        tensors = call.tensors()
        key, addresses = call.key(tensors, backend, self._layer)
        prepared = self._prepared.find(key, addresses)
        if prepared is not None:
            reduced = prepared.allocate_missing_outputs(tensors, addresses)
        else:
            checked = CheckedCall(call, self.config, self.group.device)
            selected, reduced = self._select_backend(backend, checked), checked.reduced
            if not checked.tokens:
                return reduced
            # With one rank, all backends use the one-shot kernel.
            kernel = "oneshot" if self.config.ranks == 1 else selected
            entry = kernel if call.prologue is None else kernel + MOE
            prepared, addresses = checked.prepare(selected, entry, self.site, layer=self._layer)
            self._prepared.store(key, prepared)
        if self.debug_checks is not None and self.config.epilogue_at == "owner":
            scale = call.quant.scale if isinstance(call.quant, FP8Static) else None
            inputs = {"residual": call.residual, "weight": call.weight, "quant.scale": scale}
            self.debug_checks.compare(inputs)
        self._kernels.run(prepared.entry, prepared.fill_addresses(addresses), prepared.tokens)
        self._raise_if_broken()
        return reduced

    def explain(self, tokens: int, *, norm: bool = True) -> Choice:
        """Return the backend that "auto" selects, and the reason.

        Args:
            tokens: Number of tokens of the call.
            norm: Whether the call has a weight, so that rows are normed.

        Returns:
            The backend and the reason.

        Raises:
            InvalidArgument: tokens is not an integer.
            TokenOverflow: there are more tokens than `max_tokens`.
        """
        self.check_open()
        tokens = check_int("tokens", tokens, 0)
        check_bools(norm=norm)
        check_tokens(tokens, self.max_tokens)
        return self._choose_backend(tokens, epilogue=norm)

    def _select_backend(self, backend: str, checked: CheckedCall) -> str:
        name = check_choice("backend", backend, (AUTO, *self.backends))
        names = eligible_backends(self.config, self.backends, checked.tokens)
        if name == AUTO or not names:
            return self._choose_backend(
                checked.tokens, epilogue=checked.call.weight is not None
            ).backend
        if name not in names:
            raise InvalidArgument(
                f"{checked.tokens} tokens exceed the {self.config.direct} slots of backend "
                f"{name!r}: use 'auto' or {names[0]!r}"
            )
        return name

    def _choose_backend(self, tokens: int, *, epilogue: bool) -> Choice:
        choice = self._choices.get((tokens, epilogue))
        if choice is None:
            choice = choose_backend(self.config, self.backends, tokens, epilogue=epilogue)
            if self.group.rank == 0:  # INFO once per backend, because eager calls have many sizes
                logged_backends = {logged.backend for logged in self._choices.values()}
                level = logging.DEBUG if choice.backend in logged_backends else logging.INFO
                _log.log(level, "all-reduce: %s", choice.text)
            self._choices[tokens, epilogue] = choice
        return choice

    def _manifest(self) -> dict[str, JSON]:
        return {**self.config.manifest(), "backends": list(self.backends)}

    def _discard_calls(self) -> None:
        """Do nothing: calls share no state."""

    def _write_contents(self, header: ctypes.Structure) -> None:
        config = self.config
        share = self.heap.tensor((config.share_bytes,), torch.uint8)
        share[config.inbox_offset : config.rows_offset].zero_()
        share[config.rows_offset : config.trailers_offset].fill_(0xFF)
        share[config.trailers_offset :].zero_()
        dead_ranks = [r for r in range(config.ranks) if not self.living_mask >> r & 1]
        if dead_ranks and config.missing == "error":
            self._mailbox.broken = ErrorRecord(
                code=GONE_UNMASKED, rank=self.group.rank, peer=dead_ranks[0], phase=ALL_REDUCE
            )
            header.failed = self._mailbox.broken_code = GONE_UNMASKED

    def _make_views(self) -> None:
        """Do nothing: an all-reduce has no views."""

    def _drop_views(self) -> None:
        """Do nothing: an all-reduce has no views."""


def _check_backends(names: Sequence[str] | None, missing: str) -> tuple[str, ...]:
    if names is None:
        return ("oneshot",) if missing == "drop" else tuple(BACKENDS)
    if not isinstance(names, list | tuple):
        raise_invalid("backends", names, f"a list of some of {format_choices(BACKENDS)}")
    backends = tuple(check_choice(f"backends[{i}]", name, BACKENDS) for i, name in enumerate(names))
    if not backends or len(set(backends)) != len(backends):
        raise InvalidArgument(
            f"backends is {list(names)!r}; pass one or more of {format_choices(BACKENDS)}, without "
            "repetition"
        )
    if missing == "drop" and backends != ("oneshot",):
        raise InvalidArgument(
            f"backends is {list(names)!r} with missing='drop', which only oneshot supports: in "
            "other backends, each rank sums a part of the tokens. Omit backends"
        )
    return backends
