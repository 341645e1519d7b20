"""AllReduce: tensor-parallel sums fused with residual, RMSNorm and FP8, over symmetric memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from weft.allreduce import library as reduce_library
from weft.allreduce.choice import Choice, able, choose, common_table, epilogue_of
from weft.allreduce.collective import CollectiveReduce
from weft.allreduce.entry import load_entries
from weft.allreduce.form import Form, Forms, key_of, places_of
from weft.allreduce.reduction import Reduction, memory_bytes
from weft.allreduce.request import Checker, Outputs, Request, Wanted
from weft.allreduce.spec import MoEFinalize, Quant, Reduced, coding_of
from weft.allreduce.table import Table
from weft.allreduce.workspace import ReduceWorkspace
from weft.arguments import flags, integer, listed, one_of, real, refuse, seconds
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.memory.driver import in_relaxed_mode, relaxed
from weft.memory.wire import JSON
from weft.runtime import library
from weft.runtime.call_word import BACKENDS
from weft.runtime.check import check_group, check_tokens
from weft.runtime.kernels import Build
from weft.runtime.watched import Watched, WatchedOperator
from weft.tuning.table_vote import gpu_name

_log = logging.getLogger(__name__)
AUTO = "auto"
ALIASES = {"nccl": "collective"}


class AllReduce(WatchedOperator):
    """Sum every rank's rows and, in the same launch, add a residual, normalise and quantise.

    Meaning: `weft.reference.allreduce_fused`, bit for bit, whatever the backend, the number of
    tokens or the launch: sums are fp32 in rank order, and the tree of the norm is fixed. All memory
    and all kernels are made here; a call allocates nothing but outputs that were not given, waits
    for no host, and may be captured in CUDA graphs that replay between eager calls. Every rank
    makes the same calls, with as many tokens and the same eps and weight_bias; residual, weight and
    the scale of FP8Static are equal on all ranks unless `epilogue_at` says otherwise.

    max_tokens: the most rows of one rank in one call.
    hidden, dtype: a row; bfloat16, float16 or float32, hidden a multiple of 8.
    backends: "oneshot" (every rank sums everything; up to 32 tokens on 8 ranks), "twoshot" and
        "twoshot_bulk" (each token is summed by one rank; bulk is for prefill), and "collective"
        (torch.distributed; "nccl" is another name for it).
    table: what "auto" chooses by: a Table, the path of one that `weft tune allreduce` wrote, or
        None for the one that came with weft for these GPUs. Rank 0's is sent to everyone.
    epilogue_at: whose residual, weight and FP8Static scale a row of two shots gets. "owner": those
        of the rank that sums it, which are equal on all ranks; the fastest. "receiver": each rank
        applies its own, which may differ. The other backends always do, with the same bits.
    timeout, first_timeout: seconds that a wait for a peer may take, and one of the first call.
    programmatic_launch: let a short kernel take its place on the GPU while its predecessor in the
        stream still runs; it touches no memory before that one's end.

    Raises InvalidArgument, CreationFailed (on every rank, when one cannot do its part),
    GeometryMismatch (when ranks pass different sizes).
    """

    @in_relaxed_mode
    def __init__(
        self,
        group: Group,
        *,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        backends: Sequence[str] = ("oneshot", "twoshot", "twoshot_bulk"),
        table: Table | Path | str | None = None,
        epilogue_at: str = "owner",
        timeout: float = 2.0,
        first_timeout: float = 120.0,
        programmatic_launch: bool = True,
        _defines: Sequence[str] = (),
        _first_epoch: int = 0,
    ) -> None:
        check_group(group)
        problem: Exception | None = None
        try:
            limits = seconds("timeout", timeout), seconds("first_timeout", first_timeout)
            flags(programmatic_launch=programmatic_launch)
            self._backends = _checked_backends(backends)
            self.reduction = Reduction.of(
                ranks=group.size,
                max_tokens=max_tokens,
                hidden=hidden,
                dtype=dtype,
                epilogue_at=epilogue_at,
            )
            build = Build(programmatic=programmatic_launch, defines=_defines)
            self._entries = load_entries(group.device, self.reduction, build)
        except Exception as error:  # whatever it is, every rank hears of it
            problem = error
        group.vote(problem, doing="preparing an all-reduce", undo=lambda: self._entries.close())
        self.group, self.dtype = group, dtype
        try:
            names: list[JSON] = list(self._backends)
            manifest: dict[str, JSON] = {**self.reduction.manifest(), "backends": names}
            group.agree(manifest, what="all-reduce geometry")
            self._table = common_table(group, table)
            self._collective = CollectiveReduce(group) if "collective" in names else None
            self._workspace = ReduceWorkspace(
                group, self.reduction, seconds=limits, first_epoch=_first_epoch
            )
        except BaseException:
            self._entries.close()
            raise
        self._gpu = gpu_name(group.device)
        self._checker = Checker(self.reduction, dtype, group.device)
        self._choices: dict[tuple[int, str], Choice] = {}
        self._forms = Forms()
        self._order = library.order_of(group.device)
        self._handle = library.register(self, manifest)

    memory_bytes = staticmethod(memory_bytes)

    @property
    def max_tokens(self) -> int:
        """Most tokens of one call."""
        return self.reduction.tokens

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that were built."""
        return self._backends

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
        out: Wanted = None,
        residual_out: Wanted = None,
        norm_out: Wanted = None,
        quant_out: Wanted = None,
        scale_out: Wanted = None,
        backend: str = "auto",
    ) -> Reduced:
        """Sum all ranks' rows and make every wanted output.

        x: `[tokens, hidden]`, this rank's rows; or None with a prologue that makes them.
        residual: `[tokens, hidden]`, added to the rounded sum.
        weight: `[hidden]` of the rows' dtype or float32, for RMSNorm, plus `weight_bias`.
        quant: FP8Static(scale), FP8Token() or FP8Group(128, scale=...), of the normed rows.
        out, residual_out, norm_out, quant_out, scale_out: a tensor to write, True to make one,
            False for none. None: `out` where there is neither residual nor weight; the residual
            where there is one; the norm where there is a weight and no quant; quant and scale where
            there is a quant. Outputs may lie exactly on x or on residual.
        backend: "auto", or one of `backends`.

        Raises InvalidArgument, TokenOverflow, OutOfOrder, and what broke the group.
        """
        outputs = (out, residual_out, norm_out, quant_out, scale_out)
        if torch.compiler.is_dynamo_compiling():
            specs = (quant, prologue, eps, weight_bias, backend)
            return reduce_library.traced_fused(self, (x, residual, weight), outputs, *specs)
        self._workspace.begin("fused")
        try:
            return self._fused(
                (x, residual, weight), eps, weight_bias, quant, prologue, outputs, backend
            )
        finally:
            self._workspace.end()

    def _fused(
        self,
        inputs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        eps: float,
        weight_bias: float,
        quant: Quant | None,
        prologue: MoEFinalize | None,
        outputs: tuple[Wanted, Wanted, Wanted, Wanted, Wanted],
        backend: str,
    ) -> Reduced:
        x, residual, weight = inputs
        places = places_of((x, residual, weight), outputs, quant, prologue)
        key, addresses = key_of(places, backend, coding_of(quant), eps, weight_bias, prologue)
        form = self._forms.find(key, addresses)
        if form is not None:
            reduced = form.make(places, addresses)
        else:
            real("eps", eps, least=0.0)
            real("weight_bias", weight_bias)
            given = Outputs(*outputs)
            request = self._checker.request(x, residual, weight, quant, prologue, given)
            name = self._backend(backend, request)
            reduced, addresses = request.reduced, request.addresses
            if request.tokens == 0:
                return reduced
            if name == "collective":
                assert self._collective is not None
                self._collective.run(request, eps, weight_bias)
                return reduced
            form = Form.of(request, name, eps, weight_bias, site=self._workspace.site)
            self._forms.keep(key, form)
        form.place(addresses)
        self._entries.run(form.name, form.args, form.tokens)
        self._workspace.raise_if_broken()
        return reduced

    def explain(self, tokens: int, *, quant: Quant | None = None, norm: bool = True) -> Choice:
        """What "auto" takes for so many tokens, and why. Raises InvalidArgument, TokenOverflow."""
        self._check_open()
        tokens = integer("tokens", tokens, 0)
        flags(norm=norm)
        check_tokens(tokens, self.max_tokens)
        return self._choose(tokens, epilogue_of(quant, norm=norm))

    def close(self) -> None:
        """Give the memory back; any thread may call it, as `AllToAll.close`. Idempotent."""
        if not self._workspace.begin_close():
            return
        library.forget(self._handle)
        with relaxed(self.group.device):
            try:
                self._entries.close()
            finally:
                self._workspace.free()

    def _backend(self, asked: str, request: Request) -> str:
        names = (AUTO, *self._backends, *(k for k, v in ALIASES.items() if v in self._backends))
        asked = one_of("backend", asked, names)
        name = ALIASES.get(asked, asked)
        if name == AUTO:
            return self._choose(request.tokens, request.epilogue).backend
        if name != "collective" and name not in able(self.reduction, (name,), request.tokens):
            raise InvalidArgument(
                f"backend 'oneshot' with {request.tokens} tokens; it has slots for "
                f"{self.reduction.direct}: use 'auto' or 'twoshot'"
            )
        return name

    def _choose(self, tokens: int, epilogue: str) -> Choice:
        key = (tokens, epilogue)
        if key not in self._choices:
            choice = choose(
                self._table, self.reduction, self._backends, tokens, epilogue, gpu=self._gpu
            )
            if self.group.rank == 0:  # of the many sizes of eager calls, tell what is news
                known = {each.backend for each in self._choices.values()}
                level = logging.DEBUG if choice.backend in known else logging.INFO
                _log.log(level, "all-reduce: %s", choice.text)
            self._choices[key] = choice
        return self._choices[key]

    @property
    def _watched(self) -> Watched:
        return self._workspace


def _checked_backends(names: Sequence[str]) -> tuple[str, ...]:
    known = (*BACKENDS, "collective", *ALIASES)
    if not isinstance(names, list | tuple):
        refuse("backends", names, f"a list of some of {listed(known)}")
    words = [one_of(f"backends[{i}]", name, known) for i, name in enumerate(names)]
    found = tuple(ALIASES.get(name, name) for name in words)
    if not found or len(set(found)) != len(found):
        raise InvalidArgument(
            f"backends is {list(names)!r}; choose some of {listed(known)}, each once"
        )
    return found
