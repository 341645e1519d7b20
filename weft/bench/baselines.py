# SPDX-License-Identifier: Apache-2.0
"""Other libraries, measured in the same run if they are installed.

They get the same inputs and the same clock. Each runs in its own processes, after weft, so a crash
or hang loses only its own rows. Results are compared with `weft.reference` before timing, within a
tolerance, because others guarantee less than weft (order of slots, rounding).

NVLink multicast stays off: the results are for machines without it, and some drivers must not be
probed for it. FlashInfer's all-reduce therefore uses backend="trtllm"; "auto" and "mnnvl" probe for
multicast.

Written for torch 2.8 to 2.11, FlashInfer 0.6 and 0.7 (`flashinfer.comm`) and DeepEP 1.x
(`deep_ep.Buffer`). Their modules are imported only when they are measured.
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
    synchronize_ranks,
)
from weft.bench.moe import MoECase, make_inputs, rows_of
from weft.errors import RankFailed, WeftError
from weft.group import Group
from weft.placement import Placement

LIMIT_SECONDS = 900.0  # timeout of one library, including compilation
MEASURED, ABSENT = "measured", "not installed"
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
FEW = 512  # maximum tokens per rank of DeepEP's queues and of one-shot all-reduces


@dataclass(frozen=True, slots=True)
class Baseline:
    """A library that may be installed. It is sent to processes, so functions must be module-level.

    Attributes:
        module: Module to import.
        distribution: Package with its version.
        make: Called with group, case and maximum tokens; returns an object whose `bind(tokens)`
            returns the calls and a check. The check calls once and returns a problem or None.
            Collective.
        refuses: Returns why the library cannot run a case, or None.
        least: Minimum tokens.
        most: Maximum tokens.
    """

    name: str
    module: str
    distribution: str
    make: Callable[[Group, Any, int], Any]
    refuses: Callable[[Any], str | None]
    least: int = 1
    most: int = 1 << 30

    def sizes(self, case: Case) -> list[int]:
        """Return the supported sizes of a run."""
        return [size for size in case.tokens if self.least <= size <= self.most]


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """Result of one library.

    Attributes:
        status: "measured", "not installed", or why it was not measured.
        samples_us: tokens -> phase -> samples in us, by rank.
    """

    name: str
    version: str
    status: str
    method: str = ""
    samples_us: dict[int, SamplesOfRank] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}".strip()


def measure_baselines(case: Case, baselines: Sequence[Baseline]) -> list[BaselineRun]:
    """Measure the libraries that are installed and support this case; failures are a status."""
    return [_attempt(baseline, case) for baseline in baselines]


def _attempt(baseline: Baseline, case: Case) -> BaselineRun:
    if importlib.util.find_spec(baseline.module) is None:
        return BaselineRun(baseline.name, "", ABSENT)
    try:
        version = importlib.metadata.version(baseline.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "(unknown version)"
    comparable = case.comparable()
    if comparable is None:
        return BaselineRun(baseline.name, version, "has no equivalent")
    reason = baseline.refuses(comparable)
    if reason is None and not baseline.sizes(comparable):
        reason = "supports none of these sizes"
    if reason is not None:
        return BaselineRun(baseline.name, version, reason)
    try:
        result = on_ranks(comparable, baseline_body, baseline, seconds=LIMIT_SECONDS)[0]
    except WeftError as error:
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        reason = f"failed: {type(cause or error).__name__}: {cause or error}"
        return BaselineRun(baseline.name, version, reason[:300])
    return BaselineRun(baseline.name, version, **result)


def baseline_body(group: Group, case: Case, baseline: Baseline) -> dict[str, Any]:
    """Measure one library on one rank; all ranks return the same."""
    os.environ.update(NO_MULTICAST)
    sizes = baseline.sizes(case)
    library = group.together(
        lambda: baseline.make(group, case, max(sizes)), doing=f"making {baseline.name}"
    )
    result: dict[str, Any] = {"status": MEASURED, "method": "", "samples_us": {}}
    for tokens in sizes:
        calls, check = library.bind(tokens)
        if problem := first_problem(group, check()):
            return {**result, "status": f"check failed, {tokens} tokens: {problem}"}
        method, us = measure(group, calls, samples=case.samples, graph=case.graph)
        result["method"], result["samples_us"][tokens] = method, us
    return result


def compare(group: Group, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str | None:
    """Return a message if the error exceeds `tolerance` times the largest value, or None."""
    error = float((got.float() - want.float()).abs().max())
    allowed = tolerance * float(want.float().abs().max())
    if error <= allowed:  # False for NaN
        return None
    return f"rank {group.rank}: the largest error is {error:.3g}; {allowed:.3g} is allowed"


class Pairs:
    """An all-to-all of another library. The experts' rows stay in place from the check."""

    tolerance = 2.0**-6

    def __init__(self, group: Group, case: MoECase, most: int) -> None:
        self.group, self.case, self.most = group, case, most

    def bind(self, tokens: int) -> tuple[Calls, Callable[[], str | None]]:
        """Return the pair for one size, and a check of one round against the reference."""
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
            return compare(self.group, self.combine(), want, self.tolerance)

        return Calls({"dispatch": self.dispatch, "combine": self.combine}, "pair"), check

    def dispatch(self) -> None:
        """Send the tokens."""
        raise NotImplementedError

    def experts(self) -> None:
        """Return the received rows as the experts' results."""
        raise NotImplementedError

    def combine(self) -> torch.Tensor:
        """Return the weighted sums, `[tokens, hidden]`."""
        raise NotImplementedError


class FlashInfer(Pairs):
    """`flashinfer.comm`'s MoeAlltoAll: one-sided, rank-major, results written in its workspace.

    Ids and weights are payloads, as in servers. The optional kernel that replaces ids of other
    ranks' experts ("sanitize") is not run; weft's dispatch returns local ids.
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
        group.barrier()  # peers must not send before this rank's workspace is cleared

    def dispatch(self) -> None:
        ids, weights = self.inputs.ids, self.inputs.weights
        payloads = [*self.inputs.payloads, ids, weights]
        self.received = self.exchange.dispatch(ids, payloads, self.tokens)

    def experts(self) -> None:
        """Fill every slot; slots without a token are not read."""
        *planes, ids, weights = self.received
        ranks, experts = self.group.size, self.case.experts
        owner = torch.tensor((*Placement.blocks(experts, ranks).ranks, -1), device=ids.device)
        known = torch.where((ids >= 0) & (ids < experts), ids, -1)
        local = torch.where(owner[known.long()] == self.group.rank, known, -1)
        rows = rows_of(planes, self.case.out_dtype)
        received = Received((rows,), local, weights, torch.empty(0))
        self._expert_output().copy_(reference.identity_experts(received, self.case.out_dtype))

    def combine(self) -> torch.Tensor:
        out: torch.Tensor = self.exchange.combine(
            self._expert_output(), self.tokens, payload_in_workspace=True
        )
        return out

    def _expert_output(self) -> torch.Tensor:
        case, exchange = self.case, self.exchange
        output: torch.Tensor = exchange.get_combine_payload_tensor_in_workspace(
            self.tokens, case.hidden, case.out_dtype
        )
        return output


class Collective(Pairs):
    """All-gather and reduce-scatter of NCCL (gloo on CPUs), rows in fixed slots.

    Every call moves the full capacity, so each size has its own exchange.
    """

    def bind(self, tokens: int) -> tuple[Calls, Callable[[], str | None]]:
        self.exchange = Gathered(self.group, **self.case.sizes(tokens))
        return super().bind(tokens)

    def dispatch(self) -> None:
        inputs = self.inputs
        self.received = self.exchange.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def experts(self) -> None:
        received, dtype = self.received, self.case.out_dtype
        rows = replace(received, payloads=(rows_of(received.payloads, dtype),))
        self.exchange.output().copy_(reference.identity_experts(rows, dtype))

    def combine(self) -> torch.Tensor:
        return self.exchange.combine()


class DeepEP(Pairs):
    """`deep_ep.Buffer`'s low-latency pair: expert-major, weighted in combine.

    It takes bf16 rows, and quantizes them in dispatch for an fp8 payload.
    """

    def __init__(self, group: Group, case: MoECase, most: int) -> None:
        super().__init__(group, case, most)
        library: Any = importlib.import_module("deep_ep")
        self.most = -(-most // 4) * 4  # ranks * most must be a multiple of four
        self.fp8 = case.payload == "fp8"
        self.tolerance = 2.0**-3 if self.fp8 else 2.0**-5
        # Each queue must hold all messages of a call, and a few more.
        os.environ.setdefault("NVSHMEM_QP_DEPTH", str(max(1024, 2 * (self.most + 1))))
        size = library.Buffer.get_low_latency_rdma_size_hint(
            self.most, case.hidden, group.size, case.experts
        )
        queues = {"low_latency_mode": True, "num_qps_per_rank": case.experts // group.size}
        self.buffer = library.Buffer(group.process_group(), 0, size, **queues)

    def bind(self, tokens: int) -> tuple[Calls, Callable[[], str | None]]:
        """Bind one size; the buffer's capacity is `most` in any case."""
        bound = super().bind(tokens)
        self.x = rows_of(self.inputs.payloads, torch.bfloat16).contiguous()
        self.ids = self.inputs.ids.long()
        return bound

    def dispatch(self) -> None:
        self.received, _, self.handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.ids, self.most, self.case.experts, use_fp8=self.fp8
        )

    def experts(self) -> None:
        """Dequantize one expert at a time: all at once may need gigabytes in fp32."""
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
    """An all-reduce of another library.

    If it does not fuse, torch's residual add and RMSNorm follow, as in an engine without fusion.
    """

    tolerance = 2.0**-5  # relative to the largest value: it may round after every addition

    def __init__(self, group: Group, case: ReduceCase, most: int) -> None:
        self.group, self.case, self.norm = group, case, case.epilogue != "none"
        self.process_group = group.process_group()

    def bind(self, tokens: int) -> tuple[Calls, Callable[[], str | None]]:
        """Return the call for one size, and a check against the reference."""
        ranks = range(self.group.size)
        all_rows = [make_rows(self.case, tokens, rank, self.group.device) for rank in ranks]
        rows = all_rows[self.group.rank]
        call = self.call(rows)

        def check() -> str | None:
            synchronize_ranks(self.group)
            got = call()
            arguments = arguments_of(self.case, rows)
            expected = reference.allreduce_fused([each.x for each in all_rows], **arguments)
            want = expected.norm if self.norm else expected.out
            assert want is not None
            return compare(self.group, got, want, self.tolerance)

        return Calls({"call": call}), check

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Return a call for one size, which returns the sum or the norm, `[tokens, hidden]`."""
        raise NotImplementedError

    def finish(self, rows: Rows, summed: torch.Tensor) -> torch.Tensor:
        """Apply the epilogue with torch."""
        if not self.norm:
            return summed
        total = summed + rows.residual
        return functional.rms_norm(total, (total.shape[-1],), rows.weight, EPS)


class TorchReduce(Reduces):
    """torch.distributed's all_reduce (NCCL on GPUs, gloo on CPUs)."""

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size. It sums in place, so later calls sum earlier sums."""
        x = rows.x.clone()

        def reduce() -> torch.Tensor:
            dist.all_reduce(x, group=self.process_group)
            return self.finish(rows, x)

        return reduce


class SymmetricReduce(Reduces):
    """torch's symmetric memory, one-shot or two-shot. In place, as TorchReduce."""

    def __init__(self, group: Group, case: ReduceCase, most: int, *, one_shot: bool) -> None:
        super().__init__(group, case, most)
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self.one_shot = one_shot
        shape = (most, case.hidden)
        self.buffer = memory.empty(shape, dtype=case.out_dtype, device=group.device)
        memory.rendezvous(self.buffer, self.process_group.group_name)

    def call(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Bind one size. The rows are in symmetric memory already, as these operators require."""
        x = self.buffer[: len(rows.x)]
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
        """Bind one size, with its own outputs."""
        names = ("norm_out", "residual_out") if self.norm else ("output",)
        kwargs: dict[str, Any] = {name: torch.empty_like(rows.x) for name in names}
        result: torch.Tensor = kwargs[names[0]]
        kwargs |= {"pattern": int(self.norm), "use_oneshot": self.one_shot}
        if self.norm:
            kwargs |= {"residual_in": rows.residual, "rms_gamma": rows.weight, "rms_eps": EPS}

        def reduce() -> torch.Tensor:
            self.comm.allreduce_fusion(
                input=rows.x,
                workspace=self.workspace,
                launch_with_pdl=True,
                fp32_acc=True,
                **kwargs,
            )
            return result

        return reduce


def accepts_all(case: Case) -> str | None:
    """Return None: the library runs every case."""
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
    """Return why an all-reduce kernel cannot run the case, or None. Empty `ranks` means any."""
    if case.epilogue not in ("none", "norm"):
        return f"is not compared with epilogue {case.epilogue}"
    if case.device not in devices:
        return "needs GPUs"
    if ranks and case.ranks not in ranks:
        return f"supports {', '.join(map(str, ranks))} ranks, not {case.ranks}"
    return None


_TORCH, _FLASHINFER = ("torch", "torch"), ("flashinfer", "flashinfer-python")
_EVEN = partial(reduce_refuses, ranks=(2, 4, 8))  # rank counts of FlashInfer's kernels
PAIRS = (
    Baseline("torch all-gather", *_TORCH, Collective, accepts_all),
    Baseline("FlashInfer", *_FLASHINFER, FlashInfer, flashinfer_refuses),
    Baseline("DeepEP v1", "deep_ep", "deep_ep", DeepEP, deepep_refuses, most=FEW),
)
REDUCES = (
    Baseline(
        "torch all_reduce", *_TORCH, TorchReduce, partial(reduce_refuses, devices=("cuda", "cpu"))
    ),
    *(
        Baseline(f"{name} {shots}-shot", *package, partial(kind, one_shot=one), refuses, *limits)
        for name, package, kind, refuses, least in (
            ("torch symm_mem", _TORCH, SymmetricReduce, reduce_refuses, 1),
            ("FlashInfer trtllm", _FLASHINFER, FlashInferReduce, _EVEN, 9),  # tokens > ranks
        )
        for shots, one, limits in (("one", True, (1, FEW)), ("two", False, (least,)))
    ),
)
