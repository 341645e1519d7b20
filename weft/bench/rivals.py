# SPDX-License-Identifier: Apache-2.0
"""Other libraries, measured in the same run where they are installed.

They get the same inputs and the same clock. Each runs in processes of its own, after weft: one that
traps or hangs loses its own rows only. Its results are compared with `weft.reference` before it is
timed, within a tolerance: others promise less than weft (order of slots, rounding).

None may use NVLink multicast: the figures are for machines where it is off, and some drivers must
not be asked for it. So FlashInfer's all-reduce is made with backend="trtllm", never "auto" or
"mnnvl", which probe for it.

Written against torch 2.8 to 2.11, FlashInfer 0.6 and 0.7 (`flashinfer.comm`) and DeepEP 1.x
(`deep_ep.Buffer`). Their modules are imported only when one of them is made.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from weft import reference
from weft.alltoall.received import Received
from weft.bench.allreduce import EPS, ReduceCase, Rows, arguments_of, make_rows
from weft.bench.gathered import Gathered
from weft.bench.harness import (
    Calls,
    Case,
    SamplesOfRank,
    first_problem,
    measure,
    on_ranks,
    settle,
)
from weft.bench.moe import MoECase, make_inputs, rows_of
from weft.errors import RankFailed, WeftError
from weft.group import Group
from weft.placement import Placement

LIMIT_SECONDS = 900.0  # of one library, what it compiles included
MEASURED, ABSENT = "measured", "not installed"
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
FEW = 512  # tokens a rank: DeepEP's queues and one-shot all-reduces are made for so many


@dataclass(frozen=True, slots=True)
class Rival:
    """A library that may be installed. It is sent to processes: its functions are a module's own.

    module: to import.  distribution: to ask for its version.
    make: `(group, case, most tokens)` to an object whose `bind(tokens)` returns the calls and a
    check, which calls once and returns how far the result is from the reference; collective.
    refuses: why it cannot run this case, or None.  least, most: tokens that it serves.
    """

    name: str
    module: str
    distribution: str
    make: Callable[[Group, Any, int], Any]
    refuses: Callable[[Any], str | None]
    least: int = 1
    most: int = 1 << 30

    def sizes(self, case: Case) -> list[int]:
        """The tokens of a run that it serves."""
        return [size for size in case.tokens if self.least <= size <= self.most]


@dataclass(frozen=True, slots=True)
class RivalRun:
    """What became of one library in this run.

    status: "measured", "not installed", or why there is no figure.
    samples_us: tokens -> phase -> for each rank, us per call of each sample.
    """

    name: str
    version: str
    status: str
    method: str = ""
    samples_us: dict[int, SamplesOfRank] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """Name and version, as tables show it."""
        return f"{self.name} {self.version}".strip()


def measure_rivals(case: Case, rivals: Sequence[Rival]) -> list[RivalRun]:
    """Measure those that are installed and serve this case; a failure is a status."""
    return [_attempt(rival, case) for rival in rivals]


def _attempt(rival: Rival, case: Case) -> RivalRun:
    if importlib.util.find_spec(rival.module) is None:
        return RivalRun(rival.name, "", ABSENT)
    try:
        version = importlib.metadata.version(rival.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "(unknown version)"
    asked = case.comparable()
    if asked is None:
        return RivalRun(rival.name, version, "has nothing like it")
    reason = rival.refuses(asked)
    if reason is None and not rival.sizes(asked):
        reason = "serves none of these sizes"
    if reason is not None:
        return RivalRun(rival.name, version, reason)
    try:
        found = on_ranks(asked, rival_body, rival, seconds=LIMIT_SECONDS)[0]
    except WeftError as error:
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        what = cause or error
        return RivalRun(rival.name, version, f"failed: {type(what).__name__}: {what}"[:300])
    return RivalRun(rival.name, version, **found)


def rival_body(group: Group, case: Case, rival: Rival) -> dict[str, Any]:
    """What every rank does for one library; all ranks return the same."""
    os.environ.update(NO_MULTICAST)
    sizes = rival.sizes(case)
    library = group.together(
        lambda: rival.make(group, case, max(sizes)), doing=f"making {rival.name}"
    )
    result: dict[str, Any] = {"status": MEASURED, "method": "", "samples_us": {}}
    for tokens in sizes:
        calls, check = library.bind(tokens)
        if problem := first_problem(group, check()):
            return {**result, "status": f"check failed, {tokens} tokens: {problem}"}
        method, us = measure(group, calls, samples=case.samples, graph=case.graph)
        result["method"], result["samples_us"][tokens] = method, us
    return result


def off_by(group: Group, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str | None:
    """How far numbers are from those wanted, or None; tolerance: a part of the largest one."""
    error = float((got.float() - want.float()).abs().max())
    allowed = tolerance * float(want.float().abs().max())
    if error <= allowed:  # false for NaN
        return None
    return f"rank {group.rank}: a number is off by {error:.3g}, allowed are {allowed:.3g}"


class Pairs:
    """An all-to-all of another library. Its experts' answers stay in place from the check."""

    tolerance = 2.0**-6

    def __init__(self, group: Group, case: MoECase, most: int) -> None:
        self.group, self.case, self.most = group, case, most

    def bind(self, tokens: int) -> tuple[Calls, Callable[[], str | None]]:
        """One size: the pair, and one round against the reference."""
        self.tokens = tokens
        inputs = make_inputs(self.case, tokens, self.group.rank).to(self.group.device)
        self.inputs = inputs

        def check() -> str | None:
            self.dispatch()
            self.experts()
            want = reference.identity_round_trip(
                rows_of(inputs.payloads, self.case.out_dtype),
                inputs.ids,
                inputs.weights,
                Placement.blocks(self.case.experts, self.group.size),
                ranks=self.group.size,
            )
            return off_by(self.group, self.combine(), want, self.tolerance)

        return Calls({"dispatch": self.dispatch, "combine": self.combine}, "pair"), check

    def dispatch(self) -> None:
        """Send the tokens."""
        raise NotImplementedError

    def experts(self) -> None:
        """Answer with what arrived."""
        raise NotImplementedError

    def combine(self) -> torch.Tensor:
        """Fetch the weighted sums, `[tokens, hidden]`."""
        raise NotImplementedError


class FlashInfer(Pairs):
    """`flashinfer.comm`'s MoeAlltoAll: one-sided, rank-major, answers written in its workspace.

    Ids and weights travel as payloads, as servers send them. Its kernel that replaces ids of other
    ranks' experts ("sanitize") is left out: dispatch runs it on request only, and ours answers that
    question in the ids themselves.
    """

    def __init__(self, group: Group, case: MoECase, most: int) -> None:
        super().__init__(group, case, most)
        memory: Any = importlib.import_module("flashinfer.comm.mnnvl")
        mapping: Any = importlib.import_module("flashinfer.comm.mapping")
        alltoall: Any = importlib.import_module("flashinfer.comm.trtllm_moe_alltoall")
        ranks, backend = group.size, memory.TorchDistBackend(group.process_group())
        parts = {"gpus_per_node": ranks, "tp_size": ranks, "moe_ep_size": ranks}
        self.exchange = alltoall.MoeAlltoAll(
            mapping.Mapping(world_size=ranks, rank=group.rank, **parts),
            max_num_tokens=most,
            top_k=case.top_k,
            num_experts=case.experts,
            hidden_size=case.hidden,
            mnnvl_config=memory.MnnvlConfig(comm_backend=backend),
        )
        torch.cuda.synchronize()
        group.barrier()  # a peer may not send before this rank's workspace is cleared

    def dispatch(self) -> None:
        ids, weights = self.inputs.ids, self.inputs.weights
        payloads = [*self.inputs.payloads, ids, weights]
        self.received = self.exchange.dispatch(ids, payloads, self.tokens)

    def experts(self) -> None:
        """Answer every slot; those without a token hold anything and are not read."""
        *planes, ids, weights = self.received
        ranks, experts = self.group.size, self.case.experts
        owner = torch.tensor((*Placement.blocks(experts, ranks).ranks, -1), device=ids.device)
        known = torch.where((ids >= 0) & (ids < experts), ids, -1)
        local = torch.where(owner[known.long()] == self.group.rank, known, -1)
        rows = rows_of(planes, self.case.out_dtype)
        received = Received((rows,), local, weights, torch.empty(0))
        self._answers().copy_(reference.identity_experts(received, self.case.out_dtype))

    def combine(self) -> torch.Tensor:
        out: torch.Tensor = self.exchange.combine(
            self._answers(), self.tokens, payload_in_workspace=True
        )
        return out

    def _answers(self) -> torch.Tensor:
        case, exchange = self.case, self.exchange
        answers: torch.Tensor = exchange.get_combine_payload_tensor_in_workspace(
            self.tokens, case.hidden, case.out_dtype
        )
        return answers


class Collective(Pairs):
    """All-gather and reduce-scatter of NCCL (gloo on CPUs), rows in fixed places.

    It moves its capacity in every call, so it is made anew for each size.
    """

    def bind(self, tokens: int) -> tuple[Calls, Callable[[], str | None]]:
        self.exchange = Gathered(self.group, **self.case.sizes(tokens))
        return super().bind(tokens)

    def dispatch(self) -> None:
        inputs = self.inputs
        self.received = self.exchange.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def experts(self) -> None:
        found, dtype = self.received, self.case.out_dtype
        rows = replace(found, payloads=(rows_of(found.payloads, dtype),))
        self.exchange.output().copy_(reference.identity_experts(rows, dtype))

    def combine(self) -> torch.Tensor:
        return self.exchange.combine()


class DeepEP(Pairs):
    """`deep_ep.Buffer`'s low-latency pair: expert-major, weighted when it combines.

    It takes bf16 rows; with an fp8 payload it quantises them inside its dispatch.
    """

    def __init__(self, group: Group, case: MoECase, most: int) -> None:
        super().__init__(group, case, most)
        library: Any = importlib.import_module("deep_ep")
        self.most = -(-most // 4) * 4  # ranks x most must be a multiple of four
        self.fp8 = case.payload == "fp8"
        self.tolerance = 2.0**-3 if self.fp8 else 2.0**-5
        # Each queue must hold all the messages of a call, and a few more.
        os.environ.setdefault("NVSHMEM_QP_DEPTH", str(max(1024, 2 * (self.most + 1))))
        size = library.Buffer.get_low_latency_rdma_size_hint(
            self.most, case.hidden, group.size, case.experts
        )
        queues = {"low_latency_mode": True, "num_qps_per_rank": case.experts // group.size}
        self.buffer = library.Buffer(group.process_group(), 0, size, **queues)

    def bind(self, tokens: int) -> tuple[Calls, Callable[[], str | None]]:
        """One size; the buffer is made for `most`, whatever the size."""
        found = super().bind(tokens)
        self.x = rows_of(self.inputs.payloads, torch.bfloat16).contiguous()
        self.ids = self.inputs.ids.long()
        return found

    def dispatch(self) -> None:
        self.received, _, self.handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.ids, self.most, self.case.experts, use_fp8=self.fp8
        )

    def experts(self) -> None:
        """Answer with what arrived, an expert at a time: the whole may be gigabytes in fp32."""
        if not self.fp8:
            self.answers = self.received.clone()
            return
        values, scales = self.received
        self.answers = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
        for answer, value, scale in zip(self.answers, values, scales, strict=True):
            answer.copy_(reference.dequantize(value, scale))

    def combine(self) -> torch.Tensor:
        out: torch.Tensor = self.buffer.low_latency_combine(
            self.answers, self.ids, self.inputs.weights, self.handle
        )[0]
        return out


class Reduces:
    """An all-reduce of another library; where it does not fuse, torch's residual add and RMSNorm
    follow, as an engine without fusion runs them."""

    tolerance = 2.0**-5  # of the largest number: they may round after every add

    def __init__(self, group: Group, case: ReduceCase, most: int) -> None:
        self.group, self.case, self.norm = group, case, case.epilogue != "none"
        self.process_group = group.process_group()

    def bind(self, tokens: int) -> tuple[Calls, Callable[[], str | None]]:
        """One size: the call, and one call against the reference."""
        ranks = range(self.group.size)
        every = [make_rows(self.case, tokens, rank, self.group.device) for rank in ranks]
        rows = every[self.group.rank]
        call = self.call(rows)

        def check() -> str | None:
            settle(self.group)
            got = call()
            arguments = arguments_of(self.case, rows)
            found = reference.allreduce_fused([each.x for each in every], **arguments)
            want = found.norm if self.norm else found.out
            assert want is not None
            return off_by(self.group, got, want, self.tolerance)

        return Calls({"call": call}), check

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size; the call returns the sum or the norm, `[tokens, hidden]`."""
        raise NotImplementedError

    def finish(self, rows: Rows, summed: torch.Tensor) -> torch.Tensor:
        """The epilogue by torch."""
        if not self.norm:
            return summed
        total = summed + rows.residual
        return functional.rms_norm(total, (total.shape[-1],), rows.weight, EPS)


class TorchReduce(Reduces):
    """torch.distributed's all_reduce (NCCL on GPUs, gloo on CPUs)."""

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size. It sums in place, so every call but the first sums sums."""
        x = rows.x.clone()

        def reduce() -> torch.Tensor:
            dist.all_reduce(x, group=self.process_group)
            return self.finish(rows, x)

        return reduce


class SymmetricReduce(Reduces):
    """torch's symmetric memory, one-shot or two-shot. In place, as above."""

    def __init__(self, group: Group, case: ReduceCase, most: int, *, one_shot: bool) -> None:
        super().__init__(group, case, most)
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self.one_shot = one_shot
        shape = (most, case.hidden)
        self.whole = memory.empty(shape, dtype=case.out_dtype, device=group.device)
        memory.rendezvous(self.whole, self.process_group.group_name)

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size: its rows are in symmetric memory already, as these calls ask for."""
        x = self.whole[: len(rows.x)]
        x.copy_(rows.x)
        ops: Any = torch.ops.symm_mem
        name = self.process_group.group_name
        op = ops.one_shot_all_reduce if self.one_shot else ops.two_shot_all_reduce_
        return lambda: self.finish(rows, op(x, "sum", name))


class FlashInferReduce(Reduces):
    """`flashinfer.comm.allreduce_fusion` with backend="trtllm", one-shot or two-shot."""

    def __init__(self, group: Group, case: ReduceCase, most: int, *, one_shot: bool) -> None:
        super().__init__(group, case, most)
        self.comm: Any = importlib.import_module("flashinfer.comm")
        memory: Any = importlib.import_module("flashinfer.comm.mnnvl")
        self.one_shot = one_shot
        self.workspace = self.comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=group.size,
            rank=group.rank,
            max_token_num=most,
            hidden_dim=case.hidden,
            dtype=case.out_dtype,
            gpus_per_node=group.size,
            comm_backend=memory.TorchDistBackend(self.process_group),
            group=self.process_group,
        )

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size, with outputs of its own."""
        names = ("norm_out", "residual_out") if self.norm else ("output",)
        given: dict[str, Any] = {name: torch.empty_like(rows.x) for name in names}
        answer: torch.Tensor = given[names[0]]
        given |= {"pattern": int(self.norm), "use_oneshot": self.one_shot}
        if self.norm:
            given |= {"residual_in": rows.residual, "rms_gamma": rows.weight, "rms_eps": EPS}

        def reduce() -> torch.Tensor:
            self.comm.allreduce_fusion(
                input=rows.x,
                workspace=self.workspace,
                launch_with_pdl=True,
                fp32_acc=True,
                **given,
            )
            return answer

        return reduce


def runs_all(case: Case) -> str | None:
    """Refuses no case."""
    return None


def flashinfer_refuses(case: MoECase) -> str | None:
    """Return why FlashInfer cannot run this case, or None."""
    if case.device != "cuda":
        return "needs GPUs"
    if case.out_dtype.itemsize != 2:
        return f"sizes its workspace for rows of 16 bits, not for {case.dtype}"
    return None


def deepep_refuses(case: MoECase) -> str | None:
    """Return why DeepEP cannot run this case, or None."""
    if case.device != "cuda":
        return "needs GPUs"
    if case.dtype != "bf16":
        return f"combines bf16 rows, not {case.dtype}"
    if case.experts % case.ranks:
        return f"needs equal shares of experts; {case.experts} on {case.ranks} ranks"
    return None


def reduce_refuses(
    case: ReduceCase, devices: tuple[str, ...] = ("cuda",), ranks: tuple[int, ...] = ()
) -> str | None:
    """Why an all-reduce with kernels for these cannot run the case, or None; no ranks: any."""
    if case.epilogue not in ("none", "norm"):
        return f"not compared with epilogue {case.epilogue}"
    if case.device not in devices:
        return "needs GPUs"
    if ranks and case.ranks not in ranks:
        return f"serves {', '.join(map(str, ranks))} ranks, not {case.ranks}"
    return None


_TORCH, _FLASHINFER = ("torch", "torch"), ("flashinfer", "flashinfer-python")
_EVEN = partial(reduce_refuses, ranks=(2, 4, 8))  # that FlashInfer has kernels for
PAIRS = (
    Rival("torch all-gather", *_TORCH, Collective, runs_all),
    Rival("FlashInfer", *_FLASHINFER, FlashInfer, flashinfer_refuses),
    Rival("DeepEP v1", "deep_ep", "deep_ep", DeepEP, deepep_refuses, most=FEW),
)
REDUCES = (
    Rival(
        "torch all_reduce", *_TORCH, TorchReduce, partial(reduce_refuses, devices=("cuda", "cpu"))
    ),
    *(
        Rival(f"{name} {shots}-shot", *package, partial(kind, one_shot=one), refuses, *limits)
        for name, package, kind, refuses, least in (
            ("torch symm_mem", _TORCH, SymmetricReduce, reduce_refuses, 1),
            ("FlashInfer trtllm", _FLASHINFER, FlashInferReduce, _EVEN, 9),  # more than ranks
        )
        for shots, one, limits in (("one", True, (1, FEW)), ("two", False, (least,)))
    ),
)
