"""Other libraries' all-to-alls, as `weft bench moe --peers` times them.

Written against FlashInfer 0.6 and 0.7 (`flashinfer.comm`) and DeepEP 1.x (`deep_ep.Buffer`). Their
modules are imported here only when one of them is made. Each is made for the most tokens of a run
and then serves any smaller size.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weft import reference
from weft.alltoall.received import Received
from weft.bench.baselines import Baseline, off_by
from weft.bench.clock import Calls
from weft.bench.moe import SCALE_GROUP, Inputs, MoECase, make_inputs, rows_of
from weft.placement import Placement

if TYPE_CHECKING:
    from weft.memory import Group

DEEPEP_MOST = 512  # tokens a rank; its queues and its memory are made for few


class PairTrial:
    """One size of a library. Its experts' answers stay in place from the check."""

    def __init__(self, library: Any, tokens: int) -> None:
        self.group, self.case, self.tolerance = library.group, library.case, library.tolerance
        self.inputs = make_inputs(self.case, tokens, self.group.rank).to(self.group.device)
        self._call = library.call(self.inputs, tokens)

    def calls(self) -> Calls:
        """The pair."""
        return Calls({"dispatch": self._call.dispatch, "combine": self._call.combine}, "pair")

    def check(self) -> str | None:
        """One round against the reference."""
        self._call.dispatch()
        self._call.experts()
        got = self._call.combine()
        want = reference.identity_round_trip(
            rows_of(self.inputs.payloads, self.case.out_dtype),
            self.inputs.ids,
            self.inputs.weights,
            Placement.blocks(self.case.experts, self.group.size),
            ranks=self.group.size,
        )
        return off_by(self.group, got, want, self.tolerance)


class FlashInfer:
    """`flashinfer.comm`'s MoeAlltoAll: one-sided, rank-major, answers written in its workspace.

    Its kernel that replaces ids of other ranks' experts ("sanitize") is left out: dispatch runs it
    on request only, and ours answers that question in the ids themselves.

    back: how rows are returned. "bf16" as they are; "fp8" by its `use_low_precision=True`, which
    casts them to e4m3 without scales where they lie in its workspace; "fp8-staged" by the same from
    a tensor of the experts' own, which it then also copies.
    """

    def __init__(self, group: Group, case: MoECase, most: int, *, back: str = "bf16") -> None:
        memory: Any = importlib.import_module("flashinfer.comm.mnnvl")
        mapping: Any = importlib.import_module("flashinfer.comm.mapping")
        alltoall: Any = importlib.import_module("flashinfer.comm.trtllm_moe_alltoall")
        ranks = group.size
        self.group, self.case, self.back = group, case, back
        # It rounds as we do, in an order of its own; e4m3 keeps 3 bits of each row's numbers.
        self.tolerance = 2.0**-6 if back == "bf16" else 2.0**-3
        backend = memory.TorchDistBackend(group.process_group())
        self.exchange = alltoall.MoeAlltoAll(
            mapping.Mapping(
                world_size=ranks,
                rank=group.rank,
                gpus_per_node=ranks,
                tp_size=ranks,
                moe_ep_size=ranks,
            ),
            max_num_tokens=most,
            top_k=case.top_k,
            num_experts=case.experts,
            hidden_size=case.hidden,
            mnnvl_config=memory.MnnvlConfig(comm_backend=backend),
        )
        torch.cuda.synchronize()
        group.barrier()  # a peer may not send before this rank's workspace is cleared

    def call(self, inputs: Inputs, tokens: int) -> FlashInferCall:
        """Bind the inputs of one size."""
        return FlashInferCall(self, inputs, tokens)

    def trial(self, tokens: int) -> PairTrial:
        """One size."""
        return PairTrial(self, tokens)


class FlashInferCall:
    """One size of FlashInfer; ids and weights travel as payloads, as servers send them."""

    def __init__(self, library: FlashInfer, inputs: Inputs, tokens: int) -> None:
        self._library, self._tokens = library, tokens
        self._ids = inputs.ids
        self._payloads = [*inputs.payloads, inputs.ids, inputs.weights]
        self._received: list[torch.Tensor] = []
        self._own: torch.Tensor | None = None

    def dispatch(self) -> None:
        """Send the tokens."""
        self._received = self._library.exchange.dispatch(self._ids, self._payloads, self._tokens)

    def experts(self) -> None:
        """Answer every slot; those without a token hold anything and are not read."""
        case = self._library.case
        *planes, ids, weights = self._received
        rank, ranks = self._library.group.rank, self._library.group.size
        owner = torch.tensor(Placement.blocks(case.experts, ranks).ranks, device=ids.device)
        known = (ids >= 0) & (ids < case.experts)
        here = known & (owner[ids.long().clamp(0, case.experts - 1)] == rank)
        local = torch.where(here, ids, -1)
        rows = rows_of(planes, case.out_dtype)
        received = Received((rows,), local, weights, torch.empty(0))
        answers = reference.identity_experts(received, case.out_dtype)
        if self._library.back == "fp8-staged":
            self._own = answers
        else:
            self._answers().copy_(answers)

    def combine(self) -> torch.Tensor:
        """Fetch the sums, `[tokens, hidden]`.

        In the workspace, `use_low_precision` overwrites the rows with their casts: calls after the
        first cast what those bytes then mean, which is as much work.
        """
        exchange: Any = self._library.exchange
        low: dict[str, bool] = {}
        if self._library.back != "bf16":
            low["use_low_precision"] = True
        rows = self._answers() if self._own is None else self._own
        out: torch.Tensor = exchange.combine(
            rows, self._tokens, payload_in_workspace=self._own is None, **low
        )
        return out

    def _answers(self) -> torch.Tensor:
        case, exchange = self._library.case, self._library.exchange
        answers: torch.Tensor = exchange.get_combine_payload_tensor_in_workspace(
            self._tokens, case.hidden, case.out_dtype
        )
        return answers


def flashinfer_refuses(case: MoECase) -> str | None:
    """Return why FlashInfer cannot run this case, or None."""
    if case.device != "cuda":
        return "needs GPUs"
    if case.out_dtype.itemsize != 2:
        return f"sizes its workspace for rows of 16 bits, not for {case.dtype}"
    return None


class DeepEP:
    """`deep_ep.Buffer`'s low-latency pair: expert-major, weighted when it combines.

    It takes bf16 rows; with an fp8 payload it quantises them inside its dispatch.
    """

    def __init__(self, group: Group, case: MoECase, most: int) -> None:
        library: Any = importlib.import_module("deep_ep")
        ranks = group.size
        self.group, self.case = group, case
        self.most = -(-most // 4) * 4  # ranks x most must be a multiple of four
        self.fp8 = case.payload == "fp8"
        self.tolerance = 2.0**-3 if self.fp8 else 2.0**-5
        # Each queue must hold all the messages of a call, and a few more.
        os.environ.setdefault("NVSHMEM_QP_DEPTH", str(max(1024, 2 * (self.most + 1))))
        size = library.Buffer.get_low_latency_rdma_size_hint(
            self.most, case.hidden, ranks, case.experts
        )
        self.buffer = library.Buffer(
            group.process_group(),
            0,
            size,
            low_latency_mode=True,
            num_qps_per_rank=case.experts // ranks,
        )

    def call(self, inputs: Inputs, tokens: int) -> DeepEPCall:
        """Bind one size; it is made for `most` tokens, whatever the size."""
        return DeepEPCall(self, inputs)

    def trial(self, tokens: int) -> PairTrial:
        """One size."""
        return PairTrial(self, tokens)


class DeepEPCall:
    """One size of DeepEP."""

    def __init__(self, library: DeepEP, inputs: Inputs) -> None:
        self._library = library
        self._x = rows_of(inputs.payloads, torch.bfloat16).contiguous()
        self._ids, self._weights = inputs.ids.long(), inputs.weights
        self._received: Any = None
        self._handle: Any = None
        self._answers: torch.Tensor | None = None

    def dispatch(self) -> None:
        """Send the tokens."""
        library = self._library
        self._received, _, self._handle, _, _ = library.buffer.low_latency_dispatch(
            self._x, self._ids, library.most, library.case.experts, use_fp8=library.fp8
        )

    def experts(self) -> None:
        """Answer with what arrived, an expert at a time: the whole may be gigabytes in fp32."""
        if not self._library.fp8:
            self._answers = self._received.clone()
            return
        values, scales = self._received
        self._answers = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
        for answer, value, scale in zip(self._answers, values, scales, strict=True):
            groups = value.float().view(len(value), -1, SCALE_GROUP) * scale[..., None]
            answer.copy_(groups.flatten(1))

    def combine(self) -> torch.Tensor:
        """Fetch the weighted sums, `[tokens, hidden]`."""
        out: torch.Tensor = self._library.buffer.low_latency_combine(
            self._answers, self._ids, self._weights, self._handle
        )[0]
        return out


def deepep_refuses(case: MoECase) -> str | None:
    """Return why DeepEP cannot run this case, or None."""
    if case.device != "cuda":
        return "needs GPUs"
    if case.dtype != "bf16":
        return f"combines bf16 rows, not {case.dtype}"
    if case.experts % case.ranks:
        return f"needs equal shares of experts; {case.experts} on {case.ranks} ranks"
    return None


def deepep_sizes(case: MoECase) -> list[int]:
    """The tokens of the run that its queues hold."""
    return [size for size in case.tokens if size <= DEEPEP_MOST]


_FLASHINFER = ("FlashInfer", "flashinfer", "flashinfer-python")
BASELINES: tuple[Baseline, ...] = (
    Baseline(*_FLASHINFER, make=FlashInfer, refuses=flashinfer_refuses),
    *(
        Baseline(
            *_FLASHINFER,
            make=partial(FlashInfer, back=back),
            refuses=flashinfer_refuses,
            setting=setting,
            fp8_back=True,
        )
        for back, setting in (
            ("fp8", "low-precision back"),
            ("fp8-staged", "low-precision back, staged"),
        )
    ),
    Baseline(
        *("DeepEP v1", "deep_ep", "deep_ep"),
        make=DeepEP,
        refuses=deepep_refuses,
        sizes=deepep_sizes,
    ),
)
