# SPDX-License-Identifier: Apache-2.0
"""Measurement of other libraries with the inputs and the harness of weft's benchmarks.

Each library runs in separate processes after weft, so a crash or hang loses only its own results.
Results are compared with `weft.reference` before timing, within a tolerance, because other
libraries do not specify the order of slots and the rounding.

NVLink multicast is disabled: the results are for machines without it, and some drivers must not be
probed for it. FlashInfer's all-reduce therefore uses backend="trtllm", because "auto" and "mnnvl"
probe for multicast.

Supports torch 2.8 to 2.11, FlashInfer 0.6 and 0.7 (`flashinfer.comm`) and DeepEP 1.x
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
from weft.bench.allreduce import EPS, AllReduceCase, Rows, epilogue_arguments, generate_rows
from weft.bench.collectives import CollectiveAllToAll
from weft.bench.harness import (
    Case,
    SamplesOfRank,
    TimedCall,
    gather_first_error,
    measure,
    run_on_ranks,
    synchronize_ranks,
)
from weft.bench.moe import MoECase, dequantize_rows, generate_inputs
from weft.errors import RankFailed, WeftError
from weft.group import Group
from weft.placement import Placement

LIBRARY_TIMEOUT = 900.0  # seconds for one library, including compilation
MEASURED, ABSENT = "measured", "not installed"
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
SMALL_BATCH = 512  # maximum tokens per rank of DeepEP's queues and of one-shot all-reduces


@dataclass(frozen=True, slots=True)
class Baseline:
    """An optional library. Its functions must be picklable, because ranks are other processes.

    Attributes:
        name: Name in reports.
        module: Name of the module; the library is installed if it can be found.
        distribution: Name of the package that has its version.
        create: Called with the group, the case and the maximum number of tokens; returns an
            AllToAllBaseline or AllReduceBaseline. Collective.
        unsupported_reason: Returns why the library does not support a case, or None.
        min_tokens: Minimum tokens per rank.
        max_tokens: Maximum tokens per rank.
    """

    name: str
    module: str
    distribution: str
    create: Callable[[Group, Any, int], Any]
    unsupported_reason: Callable[[Any], str | None]
    min_tokens: int = 1
    max_tokens: int = 1 << 30

    def supported_sizes(self, case: Case) -> list[int]:
        """Return the sizes of a case that the library supports."""
        return [size for size in case.tokens if self.min_tokens <= size <= self.max_tokens]


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """Result of one library.

    Attributes:
        name: Name of the library.
        version: Installed version.
        status: "measured", "not installed", or the reason why it was not measured.
        method: Description of the timing method.
        samples_us: Samples in us by number of tokens, phase and rank.
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
    """Measure every library that is installed and supports a case.

    A failure of a library is recorded in the status of its run and does not raise.
    """
    return [_measure_baseline(baseline, case) for baseline in baselines]


def _measure_baseline(baseline: Baseline, case: Case) -> BaselineRun:
    if importlib.util.find_spec(baseline.module) is None:
        return BaselineRun(baseline.name, "", ABSENT)
    try:
        version = importlib.metadata.version(baseline.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "(unknown version)"
    baseline_case = case.baseline_case()
    if baseline_case is None:
        return BaselineRun(baseline.name, version, "has no equivalent")
    reason = baseline.unsupported_reason(baseline_case)
    if reason is None and not baseline.supported_sizes(baseline_case):
        reason = "supports none of these sizes"
    if reason is not None:
        return BaselineRun(baseline.name, version, reason)
    try:
        result = run_on_ranks(baseline_case, measure_on_rank, baseline, timeout=LIBRARY_TIMEOUT)[0]
    except WeftError as error:
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        reason = f"failed: {type(cause or error).__name__}: {cause or error}"
        return BaselineRun(baseline.name, version, reason[:300])
    return BaselineRun(baseline.name, version, **result)


def measure_on_rank(group: Group, case: Case, baseline: Baseline) -> dict[str, Any]:
    """Check and time one library on one rank.

    Returns:
        The fields `status`, `method` and `samples_us` of `BaselineRun`, identical on all ranks.
    """
    os.environ.update(NO_MULTICAST)
    sizes = baseline.supported_sizes(case)
    library = group.run_collective(
        lambda: baseline.create(group, case, max(sizes)), action=f"making {baseline.name}"
    )
    result: dict[str, Any] = {"status": MEASURED, "method": "", "samples_us": {}}
    for tokens in sizes:
        call, check = library.bind(tokens)
        if error := gather_first_error(group, check()):
            return {**result, "status": f"check failed, {tokens} tokens: {error}"}
        method, us = measure(group, call, samples=case.samples, graph=case.graph)
        result["method"], result["samples_us"][tokens] = method, us
    return result


def compare(
    group: Group, actual: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> str | None:
    """Describe an error above `tolerance` times the largest expected value, or return None."""
    error = float((actual.float() - expected.float()).abs().max())
    allowed = tolerance * float(expected.float().abs().max())
    if error <= allowed:  # False for NaN
        return None
    return f"rank {group.rank}: the largest error is {error:.3g}; {allowed:.3g} is allowed"


class AllToAllBaseline:
    """An all-to-all of another library, with experts that return their rows."""

    tolerance = 2.0**-6

    def __init__(self, group: Group, case: MoECase, max_tokens: int) -> None:
        self.group, self.case, self.max_tokens = group, case, max_tokens

    def bind(self, tokens: int) -> tuple[TimedCall, Callable[[], str | None]]:
        """Generate the inputs of one size.

        Returns:
            The pair to time, and a function that runs it once and describes a wrong result or
            returns None. The pair combines the experts' results of the last check.
        """
        self.tokens = tokens
        inputs = generate_inputs(self.case, tokens, self.group.rank).to(self.group.device)
        self.inputs = inputs

        def check() -> str | None:
            self.dispatch()
            self.run_experts()
            expected = reference.identity_round_trip(
                dequantize_rows(inputs.payloads, self.case.out_dtype),
                inputs.ids,
                inputs.weights,
                Placement.blocks(self.case.experts, self.group.size),
                ranks=self.group.size,
            )
            return compare(self.group, self.combine(), expected, self.tolerance)

        return TimedCall({"dispatch": self.dispatch, "combine": self.combine}, "pair"), check

    def dispatch(self) -> None:
        """Dispatch the inputs."""
        raise NotImplementedError

    def run_experts(self) -> None:
        """Set the experts' results to the received rows."""
        raise NotImplementedError

    def combine(self) -> torch.Tensor:
        """Return the weighted sums, `[tokens, hidden]`."""
        raise NotImplementedError


class FlashInferAllToAll(AllToAllBaseline):
    """MoeAlltoAll of `flashinfer.comm`: one-sided and rank-major, with results in its workspace.

    Ids and weights are payloads, as in servers. The optional kernel that replaces ids of other
    ranks' experts ("sanitize") is not run, although the dispatch of weft returns local ids.
    """

    def __init__(self, group: Group, case: MoECase, max_tokens: int) -> None:
        super().__init__(group, case, max_tokens)
        memory: Any = importlib.import_module("flashinfer.comm.mnnvl")
        mapping: Any = importlib.import_module("flashinfer.comm.mapping")
        alltoall: Any = importlib.import_module("flashinfer.comm.trtllm_moe_alltoall")
        ranks, backend = group.size, memory.TorchDistBackend(group.process_group())
        sizes = {"gpus_per_node": ranks, "tp_size": ranks, "moe_ep_size": ranks}
        self.alltoall = alltoall.MoeAlltoAll(
            mapping.Mapping(world_size=ranks, rank=group.rank, **sizes),
            max_num_tokens=max_tokens,
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
        self.received = self.alltoall.dispatch(ids, payloads, self.tokens)

    def run_experts(self) -> None:
        """Write results to all slots, including slots without a token, which combine ignores."""
        *payloads, ids, weights = self.received
        ranks, experts = self.group.size, self.case.experts
        owner = torch.tensor((*Placement.blocks(experts, ranks).ranks, -1), device=ids.device)
        valid_ids = torch.where((ids >= 0) & (ids < experts), ids, -1)
        local_ids = torch.where(owner[valid_ids.long()] == self.group.rank, valid_ids, -1)
        rows = dequantize_rows(payloads, self.case.out_dtype)
        received = Received((rows,), local_ids, weights, torch.empty(0))
        self._expert_output().copy_(reference.identity_experts(received, self.case.out_dtype))

    def combine(self) -> torch.Tensor:
        out: torch.Tensor = self.alltoall.combine(
            self._expert_output(), self.tokens, payload_in_workspace=True
        )
        return out

    def _expert_output(self) -> torch.Tensor:
        output: torch.Tensor = self.alltoall.get_combine_payload_tensor_in_workspace(
            self.tokens, self.case.hidden, self.case.out_dtype
        )
        return output


class TorchAllToAll(AllToAllBaseline):
    """All-gather and reduce-scatter of NCCL (gloo on CPUs).

    Every call transfers `max_tokens` rows per rank, so each size has a separate object.
    """

    def bind(self, tokens: int) -> tuple[TimedCall, Callable[[], str | None]]:
        self.alltoall = CollectiveAllToAll(self.group, **self.case.sizes(tokens))
        return super().bind(tokens)

    def dispatch(self) -> None:
        inputs = self.inputs
        self.received = self.alltoall.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def run_experts(self) -> None:
        received, dtype = self.received, self.case.out_dtype
        rows = replace(received, payloads=(dequantize_rows(received.payloads, dtype),))
        self.alltoall.output().copy_(reference.identity_experts(rows, dtype))

    def combine(self) -> torch.Tensor:
        return self.alltoall.combine()


class DeepEPAllToAll(AllToAllBaseline):
    """Low-latency kernels of `deep_ep.Buffer`: expert-major, with weights applied in combine.

    Dispatch accepts bf16 rows, and quantizes them for an fp8 payload.
    """

    def __init__(self, group: Group, case: MoECase, max_tokens: int) -> None:
        super().__init__(group, case, max_tokens)
        library: Any = importlib.import_module("deep_ep")
        self.max_tokens = -(-max_tokens // 4) * 4  # ranks * max_tokens: a multiple of four
        self.fp8 = case.payload == "fp8"
        self.tolerance = 2.0**-3 if self.fp8 else 2.0**-5
        # Each queue must have space for all messages of a call, and a few more.
        os.environ.setdefault("NVSHMEM_QP_DEPTH", str(max(1024, 2 * (self.max_tokens + 1))))
        size = library.Buffer.get_low_latency_rdma_size_hint(
            self.max_tokens, case.hidden, group.size, case.experts
        )
        queues = {"low_latency_mode": True, "num_qps_per_rank": case.experts // group.size}
        self.buffer = library.Buffer(group.process_group(), 0, size, **queues)

    def bind(self, tokens: int) -> tuple[TimedCall, Callable[[], str | None]]:
        call_and_check = super().bind(tokens)
        self.x = dequantize_rows(self.inputs.payloads, torch.bfloat16).contiguous()
        self.ids = self.inputs.ids.long()
        return call_and_check

    def dispatch(self) -> None:
        self.received, _, self.handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.ids, self.max_tokens, self.case.experts, use_fp8=self.fp8
        )

    def run_experts(self) -> None:
        if not self.fp8:
            self.results = self.received.clone()
            return
        values, scales = self.received
        self.results = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
        # One expert at a time: the rows of all experts in fp32 may need gigabytes.
        for result, value, scale in zip(self.results, values, scales, strict=True):
            result.copy_(reference.dequantize(value, scale))

    def combine(self) -> torch.Tensor:
        out: torch.Tensor = self.buffer.low_latency_combine(
            self.results, self.ids, self.inputs.weights, self.handle
        )[0]
        return out


class AllReduceBaseline:
    """An all-reduce of another library.

    Without a fused kernel, torch adds the residual and applies RMSNorm, as in an engine.
    """

    tolerance = 2.0**-5  # libraries may round after every addition

    def __init__(self, group: Group, case: AllReduceCase, max_tokens: int) -> None:
        self.group, self.case, self.norm = group, case, case.epilogue != "none"
        self.process_group = group.process_group()

    def bind(self, tokens: int) -> tuple[TimedCall, Callable[[], str | None]]:
        """Generate the inputs of one size.

        Returns:
            The call to time, and a function that runs it once and describes a wrong result or
            returns None.
        """
        ranks = range(self.group.size)
        rows_by_rank = [generate_rows(self.case, tokens, rank, self.group.device) for rank in ranks]
        rows = rows_by_rank[self.group.rank]
        allreduce = self.bind_rows(rows)

        def check() -> str | None:
            synchronize_ranks(self.group)
            actual = allreduce()
            arguments = epilogue_arguments(self.case, rows)
            reduced = reference.allreduce_fused([r.x for r in rows_by_rank], **arguments)
            expected = reduced.norm if self.norm else reduced.out
            assert expected is not None
            return compare(self.group, actual, expected, self.tolerance)

        return TimedCall({"call": allreduce}), check

    def bind_rows(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """Return a function that reduces `rows` and returns the sum or the normed rows."""
        raise NotImplementedError

    def apply_epilogue(self, rows: Rows, summed: torch.Tensor) -> torch.Tensor:
        """Add the residual and apply RMSNorm with torch, if the case has this epilogue."""
        if not self.norm:
            return summed
        total = summed + rows.residual
        return functional.rms_norm(total, (total.shape[-1],), rows.weight, EPS)


class TorchAllReduce(AllReduceBaseline):
    """all_reduce of torch.distributed (NCCL on GPUs, gloo on CPUs)."""

    def bind_rows(self, rows: Rows) -> Callable[[], torch.Tensor]:
        x = rows.x.clone()

        def reduce() -> torch.Tensor:
            dist.all_reduce(x, group=self.process_group)  # in place: only the first sum is checked
            return self.apply_epilogue(rows, x)

        return reduce


class SymmetricMemoryAllReduce(AllReduceBaseline):
    """One-shot or two-shot all-reduce of torch's symmetric memory."""

    def __init__(
        self, group: Group, case: AllReduceCase, max_tokens: int, *, one_shot: bool
    ) -> None:
        super().__init__(group, case, max_tokens)
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self.one_shot = one_shot
        shape = (max_tokens, case.hidden)
        self.buffer = memory.empty(shape, dtype=case.out_dtype, device=group.device)
        memory.rendezvous(self.buffer, self.process_group.group_name)

    def bind_rows(self, rows: Rows) -> Callable[[], torch.Tensor]:
        x = self.buffer[: len(rows.x)]  # these operators require rows in symmetric memory
        x.copy_(rows.x)
        ops: Any = torch.ops.symm_mem
        name = self.process_group.group_name
        op = ops.one_shot_all_reduce if self.one_shot else ops.two_shot_all_reduce_
        return lambda: self.apply_epilogue(rows, op(x, "sum", name))


class FlashInferAllReduce(AllReduceBaseline):
    """`flashinfer.comm.allreduce_fusion` with backend="trtllm", one-shot or two-shot."""

    def __init__(
        self, group: Group, case: AllReduceCase, max_tokens: int, *, one_shot: bool
    ) -> None:
        super().__init__(group, case, max_tokens)
        self.comm: Any = importlib.import_module("flashinfer.comm")
        memory: Any = importlib.import_module("flashinfer.comm.mnnvl")
        self.one_shot = one_shot
        self.workspace = self.comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=group.size,
            rank=group.rank,
            max_token_num=max_tokens,
            hidden_dim=case.hidden,
            dtype=case.out_dtype,
            gpus_per_node=group.size,
            comm_backend=memory.TorchDistBackend(self.process_group),
            group=self.process_group,
        )

    def bind_rows(self, rows: Rows) -> Callable[[], torch.Tensor]:
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


def support_every_case(case: Case) -> str | None:
    """Return None, for a library that supports every case."""
    return None


def flashinfer_unsupported_reason(case: MoECase) -> str | None:
    """Return why FlashInfer does not support a case, or None."""
    if case.device != "cuda":
        return "needs GPUs"
    if case.out_dtype.itemsize != 2:
        return f"supports rows of 16 bits, not {case.dtype}"
    return None


def deepep_unsupported_reason(case: MoECase) -> str | None:
    """Return why DeepEP does not support a case, or None."""
    if case.device != "cuda":
        return "needs GPUs"
    if case.dtype != "bf16":
        return f"combines bf16 rows, not {case.dtype}"
    if case.experts % case.ranks:
        return f"needs equal numbers of experts per rank; {case.experts} on {case.ranks} ranks"
    return None


def allreduce_unsupported_reason(
    case: AllReduceCase, devices: tuple[str, ...] = ("cuda",), ranks: tuple[int, ...] = ()
) -> str | None:
    """Return why an all-reduce does not support a case, or None.

    Args:
        case: The case.
        devices: Supported devices.
        ranks: Supported numbers of ranks; empty for any.
    """
    if case.epilogue not in ("none", "norm"):
        return f"is not compared with epilogue {case.epilogue}"
    if case.device not in devices:
        return "needs GPUs"
    if ranks and case.ranks not in ranks:
        return f"supports {', '.join(map(str, ranks))} ranks, not {case.ranks}"
    return None


_TORCH, _FLASHINFER = ("torch", "torch"), ("flashinfer", "flashinfer-python")
ALLTOALL_BASELINES = (
    Baseline("torch all-gather", *_TORCH, TorchAllToAll, support_every_case),
    Baseline("FlashInfer", *_FLASHINFER, FlashInferAllToAll, flashinfer_unsupported_reason),
    Baseline(
        "DeepEP v1",
        "deep_ep",
        "deep_ep",
        DeepEPAllToAll,
        deepep_unsupported_reason,
        max_tokens=SMALL_BATCH,
    ),
)
_trtllm_unsupported_reason = partial(allreduce_unsupported_reason, ranks=(2, 4, 8))
ALLREDUCE_BASELINES = (
    Baseline(
        "torch all_reduce",
        *_TORCH,
        TorchAllReduce,
        partial(allreduce_unsupported_reason, devices=("cuda", "cpu")),
    ),
    Baseline(
        "torch symm_mem one-shot",
        *_TORCH,
        partial(SymmetricMemoryAllReduce, one_shot=True),
        allreduce_unsupported_reason,
        max_tokens=SMALL_BATCH,
    ),
    Baseline(
        "torch symm_mem two-shot",
        *_TORCH,
        partial(SymmetricMemoryAllReduce, one_shot=False),
        allreduce_unsupported_reason,
    ),
    Baseline(
        "FlashInfer trtllm one-shot",
        *_FLASHINFER,
        partial(FlashInferAllReduce, one_shot=True),
        _trtllm_unsupported_reason,
        max_tokens=SMALL_BATCH,
    ),
    Baseline(
        "FlashInfer trtllm two-shot",
        *_FLASHINFER,
        partial(FlashInferAllReduce, one_shot=False),
        _trtllm_unsupported_reason,
        min_tokens=9,  # more tokens than ranks
    ),
)
