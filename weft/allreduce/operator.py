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
    Checked,
    FP8Static,
    Fused,
    Key,
    MoEFinalize,
    Prepared,
    Quant,
    Reduced,
    Requested,
)
from weft.allreduce.choice import Choice, able, choose
from weft.allreduce.config import MISSING, ReduceConfig, memory_bytes
from weft.allreduce.kernels import MOE, load_kernels
from weft.arguments import flags, integer, listed, one_of, refuse
from weft.cuda.driver import as_creation
from weft.errors import InvalidArgument
from weft.group import Group
from weft.group.wire import JSON
from weft.heap.header import ErrorRecord
from weft.keywords import refuse_unknown
from weft.runtime.check import check_tokens
from weft.runtime.identity import BACKENDS, describe_reduce
from weft.runtime.kernels import Build, Kernels
from weft.runtime.operator import Operator, one_call
from weft.runtime.report import ALL_REDUCE, GONE_UNMASKED

_log = logging.getLogger(__name__)
AUTO = "auto"
MOST_PREPARED = 512  # kinds of calls that are kept; each takes about 3 KiB


class AllReduce(Operator):
    """Sum every rank's rows and, in the same launch, add a residual, normalise and quantise.

    `weft.reference.allreduce_fused` specifies the results bit for bit, whatever the backend, the
    number of tokens or the launch. The constructor allocates all memory, makes all kernels and is
    collective. A call allocates only outputs that were not passed, waits for no host, and may be
    captured in CUDA graphs. Every rank passes the same number of tokens, eps and weight_bias.
    Residuals, weights and the scale of `FP8Static` are equal on all ranks unless `epilogue_at` says
    otherwise.

    Args:
        group: Ranks of one host. With one rank the sum is its rows, and all the rest is the same.
        max_tokens: Maximum rows of one rank in one call.
        hidden: Columns of a row, a multiple of 8.
        dtype: bfloat16, float16 or float32.
        backends: Some of "oneshot" (every rank sums everything), "twoshot" and "twoshot_bulk" (each
            token is summed by one rank; bulk is for prefill). Default: all.
        epilogue_at: Whose residual, weight and `FP8Static` scale a row of two shots gets. "owner":
            those of the rank that sums it, which must be equal on all ranks. "receiver": each rank
            applies its own.
        missing: What calls do after a recovery without some ranks. "error": they raise. "drop":
            they sum over the living ranks in rank order, with the one-shot backend.
        timeout: Seconds that a wait for a peer may take.
        first_timeout: Seconds that a wait in the first call may take.
        programmatic_launch: Let a short kernel become resident while its predecessor in the stream
            still runs.

    Raises:
        InvalidArgument: an argument is invalid on every rank.
        CreationFailed: a rank cannot do its part. Every rank raises it.
        GeometryMismatch: ranks pass different sizes.
    """

    config: ReduceConfig
    _describe_call = staticmethod(describe_reduce)

    @as_creation
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

        def prepare() -> tuple[ReduceConfig, Kernels]:
            flags(programmatic_launch=programmatic_launch)
            group.one_host("an all-reduce")
            self.backends = _checked_backends(backends, one_of("missing", missing, MISSING))
            config = ReduceConfig.of(
                ranks=group.size,
                max_tokens=max_tokens,
                hidden=hidden,
                dtype=dtype,
                epilogue_at=epilogue_at,
                missing=missing,
            )
            build = Build(programmatic=programmatic_launch, defines=_defines)
            return config, load_kernels(group.device, config, build)

        self._create(
            group,
            "an all-reduce",
            prepare,
            timeout=timeout,
            first_timeout=first_timeout,
            first_epoch=_first_epoch,
        )
        self.dtype = dtype
        self._choices: dict[tuple[int, bool], Choice] = {}
        self._prepared: dict[Key, Prepared] = {}

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
        out: Requested = None,
        residual_out: Requested = None,
        norm_out: Requested = None,
        quant_out: Requested = None,
        scale_out: Requested = None,
        backend: str = "auto",
        **_unknown: Never,
    ) -> Reduced:
        """Sum all ranks' rows and make the requested outputs.

        For each `*_out` argument, pass a tensor to write, True to make one, or False for none. None
        makes `out` if there is neither residual nor weight, the residual if there is one, the norm
        if there is a weight and no quant, and quant and scale if there is a quant. Outputs may be
        exactly x, and those other than `out` exactly residual.

        Args:
            x: `[tokens, hidden]`, this rank's rows. None with a prologue that makes them.
            residual: `[tokens, hidden]`, added to the rounded sum.
            weight: `[hidden]` of the rows' dtype or float32, the weight of RMSNorm.
            eps: Added to the mean of squares.
            weight_bias: Added to `weight`; 1 is Gemma's RMSNorm.
            quant: `FP8Static(scale)`, `FP8Token()` or `FP8Group(128, scale=...)`, of the normed
                rows.
            prologue: `MoEFinalize`, which makes this rank's rows from experts' rows.
            out: The rounded sum.
            residual_out: The sum plus the residual.
            norm_out: The normed rows.
            quant_out: The quantised rows.
            scale_out: Their scales.
            backend: "auto" or one of `backends`.

        Returns:
            All outputs by name, None where there is none.

        Raises:
            InvalidArgument: a tensor or an option is invalid, or tensors overlap that must not.
            TokenOverflow: more tokens than `max_tokens`.
            OutOfOrder: another thread is in a call, or the object is closed.
            GroupError: the group is broken, or ranks made different calls.
        """
        if _unknown:
            refuse_unknown(self.fused, _unknown)
        given = (out, residual_out, norm_out, quant_out, scale_out)
        call = Fused(x, residual, weight, *given, quant, prologue, eps, weight_bias)
        if torch.compiler.is_dynamo_compiling():
            return traced.fused(self, call, backend)
        return self._fused(call, backend)

    @one_call("fused")
    def _fused(self, call: Fused, backend: str) -> Reduced:
        tensors = call.tensors()
        key, addresses = call.key(tensors, backend, self._layer)
        prepared = self._known(key)
        if prepared is not None and prepared.serves(addresses):
            reduced = prepared.outputs(tensors, addresses)
        else:
            checked = call.checked(self.config, self.group.device)
            name, reduced = self._backend(backend, checked), checked.reduced
            if not checked.tokens:
                return reduced
            # One rank has no second shot: whatever the backend, the same kernel makes the outputs.
            kernel = "oneshot" if self.config.ranks == 1 else name
            entry = kernel if call.prologue is None else kernel + MOE
            prepared, addresses = checked.prepared(name, entry, self._site, layer=self._layer)
            self._keep(key, prepared)
        if self._debug is not None and self.config.epilogue_at == "owner":
            scale = call.quant.scale if isinstance(call.quant, FP8Static) else None
            equal = {"residual": call.residual, "weight": call.weight, "quant.scale": scale}
            self._debug.compare(equal)
        self._kernels.run(prepared.entry, prepared.arguments(addresses), prepared.tokens)
        self._raise_if_broken()
        return reduced

    def explain(self, tokens: int, *, norm: bool = True) -> Choice:
        """Return which backend "auto" takes, and why.

        Args:
            tokens: Tokens of the call.
            norm: Whether the call has a weight, so that rows are normed.

        Returns:
            The backend and a sentence.

        Raises:
            InvalidArgument: tokens is no integer.
            TokenOverflow: more tokens than `max_tokens`.
        """
        self._check_open()
        tokens = integer("tokens", tokens, 0)
        flags(norm=norm)
        check_tokens(tokens, self.max_tokens)
        return self._choose(tokens, epilogue=norm)

    def _known(self, key: Key | None) -> Prepared | None:
        """What is kept of an equal call; None where the check must decide."""
        try:
            return None if key is None else self._prepared.get(key)
        except TypeError:  # a backend that cannot be hashed is none: the check says so
            return None

    def _keep(self, key: Key | None, prepared: Prepared) -> None:
        """Keep what was checked just now; the oldest goes where there are too many."""
        if key is not None:
            if len(self._prepared) >= MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[key] = prepared

    def _backend(self, asked: str, checked: Checked) -> str:
        name = one_of("backend", asked, (AUTO, *self.backends))
        names = able(self.config, self.backends, checked.tokens)
        if name == AUTO or not names:
            return self._choose(checked.tokens, epilogue=checked.call.weight is not None).backend
        if name not in names:
            raise InvalidArgument(
                f"backend {name!r} with {checked.tokens} tokens; it has slots for "
                f"{self.config.direct}: use 'auto' or {names[0]!r}"
            )
        return name

    def _choose(self, tokens: int, *, epilogue: bool) -> Choice:
        found = self._choices.get((tokens, epilogue))
        if found is None:
            found = choose(self.config, self.backends, tokens, epilogue=epilogue)
            if self.group.rank == 0:  # of the many sizes of eager calls, tell what is news
                known = {each.backend for each in self._choices.values()}
                level = logging.DEBUG if found.backend in known else logging.INFO
                _log.log(level, "all-reduce: %s", found.text)
            self._choices[tokens, epilogue] = found
        return found

    def _manifest(self) -> dict[str, JSON]:
        return {**self.config.manifest(), "backends": list(self.backends)}

    def _start_anew(self) -> None:
        """No call leaves anything to the next one."""

    def _write_contents(self, header: ctypes.Structure) -> None:
        config = self.config
        share = self.heap.tensor((config.share_bytes,), torch.uint8)
        share[config.slots : config.rows].zero_()
        share[config.rows : config.trailers].fill_(0xFF)
        share[config.trailers :].zero_()
        gone = [r for r in range(config.ranks) if not self._living >> r & 1]
        if gone and config.missing == "error":
            self._mailbox.broken = ErrorRecord(
                code=GONE_UNMASKED, rank=self.group.rank, peer=gone[0], phase=ALL_REDUCE
            )
            header.failed = self._mailbox.broken_code = GONE_UNMASKED

    def _make_views(self) -> None:
        """There are none."""

    def _drop_views(self) -> None:
        """There are none."""


def _checked_backends(names: Sequence[str] | None, missing: str) -> tuple[str, ...]:
    if names is None:
        return ("oneshot",) if missing == "drop" else tuple(BACKENDS)
    if not isinstance(names, list | tuple):
        refuse("backends", names, f"a list of some of {listed(BACKENDS)}")
    found = tuple(one_of(f"backends[{i}]", name, BACKENDS) for i, name in enumerate(names))
    if not found or len(set(found)) != len(found):
        raise InvalidArgument(
            f"backends is {list(names)!r}; choose some of {listed(BACKENDS)}, each once"
        )
    if missing == "drop" and found != ("oneshot",):
        raise InvalidArgument(
            f"backends is {list(names)!r} with missing='drop'; in two shots each rank sums its own "
            "tokens, so only oneshot goes on without a rank: leave backends out"
        )
    return found
