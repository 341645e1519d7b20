"""Other libraries beside ours: found or not, right or not; and the adapters against stand-ins that
keep to the other libraries' documented calls and layouts.

Stand-ins show that arguments, layouts and sums fit together; what the libraries themselves do, only
a machine that has them shows.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pickle
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.bench.test_allreduce import SMALL
from tests.bench.test_moe import SETTINGS
from weft import reference
from weft.bench.allreduce import make_rows
from weft.bench.rivals import (
    PAIRS,
    REDUCES,
    FlashInferReduce,
    Pairs,
    Rival,
    SymmetricReduce,
    measure_rivals,
    rival_body,
)
from weft.errors import DriverError
from weft.placement import Placement

SIZES = replace(SETTINGS, ranks=2, tokens=(3, 5), hidden=128, top_k=3, experts=4, samples=2)
NAMED = {each.name: each for each in (*PAIRS, *REDUCES)}


class _Library(Pairs):
    """weft itself as another library; `spoil` is added to what rank 1 gets back."""

    spoil = 0.0

    def __init__(self, group, case, most) -> None:
        super().__init__(group, case)
        self.exchange = weft.AllToAll(group, **case.sizes(most), timeout=30.0)

    def dispatch(self) -> None:
        given = self.inputs
        self.received = self.exchange.dispatch(given.payloads, given.ids, given.weights)

    def experts(self) -> None:
        answers = reference.identity_experts(self.received, self.case.out_dtype)
        self.exchange.output().copy_(answers)

    def combine(self):
        out = self.exchange.combine()
        if self.group.rank == 1:
            out[0, 0] += self.spoil
        return out


LOOM = Rival("Loom", "loom", "loom-python", _Library, lambda case: None, least=2, most=4)


@pytest.fixture
def installed(threads):
    threads.setattr(
        importlib.util, "find_spec", lambda module: None if module == "absent" else True
    )
    threads.setattr(importlib.metadata, "version", lambda name: "2.1")
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        threads.setenv(name, "unset")
    return threads


def test_a_library_is_checked_and_timed(installed):
    (found,) = measure_rivals(SIZES, [LOOM])
    assert (found.library, found.status) == ("Loom 2.1", "measured")
    assert list(found.samples_us) == [3], "of its sizes"
    assert [len(rank) for rank in found.samples_us[3]["pair"]] == [2, 2]
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1", "nobody may use multicast"


@pytest.mark.parametrize("spoil", [1.0, float("nan")])
def test_a_wrong_library_has_no_figure(installed, spoil):
    installed.setattr(_Library, "spoil", spoil)
    (found,) = measure_rivals(SIZES, [LOOM])
    assert found.status.startswith("check failed, 3 tokens: rank 1: a number is off by")
    assert found.samples_us == {}


def test_what_cannot_be_measured_is_a_status(installed):
    def no_gpu(group, case, most):
        raise DriverError("no such GPU")

    def status(case, **changes):
        (found,) = measure_rivals(case, [replace(LOOM, **changes)])
        return found.status

    assert "no such GPU" in status(SIZES, make=no_gpu)
    assert status(replace(SIZES, tokens=(1, 9))) == "serves none of these sizes"
    assert status(SIZES, refuses=lambda case: "too few") == "too few"
    assert status(SIZES, module="absent") == "not installed"
    assert status(replace(SIZES, quantize="mxfp8")) == "has nothing like it"


def test_they_are_asked_for_what_is_like_ours(installed):
    asked = []

    def refuses(case):
        asked.append((case.payload, case.quantize, case.combine_dtype))
        return "seen"

    ours = replace(SIZES, quantize="fp8", combine_dtype="fp8")
    measure_rivals(ours, [replace(LOOM, refuses=refuses)])
    assert asked == [("fp8", None, None)]


def test_what_they_refuse():
    def refused(name, case, **changes):
        return NAMED[name].refuses(replace(case, samples=11, **changes))

    assert refused("FlashInfer", SIZES) == refused("DeepEP v1", SIZES) == "needs GPUs"
    assert refused("FlashInfer", SIZES, device="cuda") is None
    assert "16 bits" in refused("FlashInfer", SIZES, device="cuda", dtype="fp32")
    assert refused("DeepEP v1", SIZES, device="cuda") is None
    assert "bf16" in refused("DeepEP v1", SIZES, device="cuda", dtype="fp16")
    assert "5 on 2" in refused("DeepEP v1", SIZES, device="cuda", experts=5)
    assert NAMED["DeepEP v1"].sizes(replace(SIZES, tokens=(8, 1024))) == [8]
    one, two = "FlashInfer trtllm one-shot", "FlashInfer trtllm two-shot"
    assert refused(one, SMALL) == "needs GPUs"
    assert refused(one, SMALL, device="cuda") is None
    assert refused("torch all_reduce", SMALL) is None
    assert refused(one, SMALL, device="cuda", ranks=3) == "serves 2, 4, 8 ranks, not 3"
    assert refused("torch symm_mem one-shot", SMALL, device="cuda", ranks=3) is None
    assert refused(one, SMALL, epilogue="fp8-token") == "not compared with epilogue fp8-token"
    sizes = replace(SMALL, tokens=(1, 8, 512, 1024))
    assert NAMED[one].sizes(sizes) == [1, 8, 512]
    assert NAMED[two].sizes(sizes) == [512, 1024], "more than ranks"


def test_they_can_be_sent_to_processes():
    everyone = (*PAIRS, *REDUCES)
    found = pickle.loads(pickle.dumps(everyone))  # noqa: S301
    assert [each.name for each in found] == [each.name for each in everyone]
    assert [each.refuses(SMALL) for each in found[len(PAIRS) :]] == [
        each.refuses(SMALL) for each in REDUCES
    ]


@pytest.mark.parametrize("payload", ["bf16", "fp8"])
def test_the_collective_is_measured(ranks, payload):
    for found in ranks(2, "cpu")(rival_body, NAMED["NCCL"], replace(SIZES, payload=payload)):
        assert found["status"] == "measured"
        assert list(found["samples_us"]) == [3, 5]


def test_torch_all_reduce_is_measured(ranks):
    for epilogue in ("none", "norm"):
        case = replace(SMALL, epilogue=epilogue)
        for found in ranks(2, "cpu")(rival_body, NAMED["torch all_reduce"], case):
            assert found["status"] == "measured"
            assert list(found["samples_us"]) == [1, 5]


def _gathered(group: weft.Group, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor; all numbers here are exact in float32."""
    parts = group.all_gather(tensor.float().tolist())
    return [torch.tensor(part).to(tensor.dtype) for part in parts]


def _owners(group: weft.Group, experts: int) -> torch.Tensor:
    return torch.tensor(Placement.blocks(experts, group.size).ranks)


class MoeAlltoAll:
    """Rank-major; a source's tokens lie in compact slots, here in reverse order."""

    def __init__(
        self, mapping, max_num_tokens, top_k, num_experts, *, hidden_size, mnnvl_config
    ) -> None:
        self.group = mnnvl_config.comm_backend.group
        assert (mapping.rank, mapping.world_size) == (self.group.rank, self.group.size)
        assert mapping.moe_ep_size == mapping.tp_size == self.group.size
        self.max, self.experts, self.hidden = max_num_tokens, num_experts, hidden_size
        self.phase = "idle"

    def dispatch(self, ids, payloads, runtime_max):
        assert self.phase == "idle"
        assert ids.dtype == torch.int32
        assert runtime_max <= self.max
        self.phase, self.ids = "dispatched", ids
        everyone = [_gathered(self.group, payload) for payload in payloads]
        owners = _owners(self.group, self.experts)
        views = [
            torch.full((self.group.size, runtime_max, *p.shape[1:]), 77).to(p.dtype)
            for p in payloads
        ]
        self.slots = []
        for source, chosen in enumerate(_gathered(self.group, ids)):
            mine = (owners[chosen.long()] == self.group.rank).any(dim=1).nonzero().flatten()
            self.slots.append(mine.flip(0).tolist())
            for view, parts in zip(views, everyone, strict=True):
                for slot, token in enumerate(self.slots[-1]):
                    view[source, slot] = parts[source][token]
        self.answers = torch.full((self.group.size, runtime_max, self.hidden), float("nan"))
        return views

    def get_combine_payload_tensor_in_workspace(self, runtime_max, hidden, dtype):
        assert self.phase == "dispatched"
        assert self.answers.shape == (self.group.size, runtime_max, hidden)
        self.answers = self.answers.to(dtype)
        return self.answers

    def combine(self, payload, runtime_max, payload_in_workspace=False):
        assert payload_in_workspace
        assert payload is self.answers
        self.phase = "idle"
        out = torch.zeros(len(self.ids), self.hidden)
        slots = self.group.all_gather(self.slots)
        for rank, answers in enumerate(_gathered(self.group, payload.nan_to_num(1e4))):
            for slot, token in enumerate(slots[rank][self.group.rank]):
                out[token] += answers[self.group.rank, slot].float()
        return out.to(payload.dtype)


class Buffer:
    """Expert-major: every local expert has ranks x most rows; weights are applied in combine."""

    def __init__(
        self, group, num_nvl_bytes, num_rdma_bytes, *, low_latency_mode, num_qps_per_rank
    ) -> None:
        assert low_latency_mode
        assert (num_nvl_bytes, num_rdma_bytes, num_qps_per_rank) == (0, 4321, 2)
        self.group = group

    @staticmethod
    def get_low_latency_rdma_size_hint(most, hidden, ranks, experts):
        assert (most, hidden, ranks, experts) == (8, 128, 2, 4)
        return 4321

    def low_latency_dispatch(self, x, ids, most, experts, *, use_fp8):
        assert (x.dtype, ids.dtype) == (torch.bfloat16, torch.int64)
        size, hidden = self.group.size, x.shape[1]
        first = self.group.rank * (experts // size)
        rows = torch.zeros(experts // size, size * most, hidden, dtype=torch.bfloat16)
        count, places = [0] * (experts // size), []
        everyone = zip(_gathered(self.group, x), _gathered(self.group, ids), strict=True)
        for source, (xs, chosen) in enumerate(everyone):
            for token, experts_of in enumerate(chosen.tolist()):
                for expert in experts_of:
                    local = expert - first
                    if 0 <= local < len(count):
                        rows[local, count[local]] = xs[token]
                        places.append((source, token, expert, local, count[local]))
                        count[local] += 1
        received: Any = rows
        if use_fp8:
            grouped = rows.float().view(*rows.shape[:2], -1, 128)
            scales = grouped.abs().amax(dim=-1).clamp_min(1e-4) / 448
            values = (grouped / scales[..., None]).to(torch.float8_e4m3fn).flatten(2)
            received = (values, scales.transpose(1, 2).contiguous().transpose(1, 2))
        return received, torch.tensor(count), (places, len(x)), SimpleNamespace(), None

    def low_latency_combine(self, answers, ids, weights, handle):
        assert answers.dtype == torch.bfloat16
        places, tokens = handle
        returned = [
            (source, token, expert, answers[local, row].float().tolist())
            for source, token, expert, local, row in places
        ]
        out = torch.zeros(tokens, answers.shape[2])
        for rows in self.group.all_gather(returned):
            for source, token, expert, row in rows:
                if source == self.group.rank:
                    place = ids[token].tolist().index(expert)
                    out[token] += weights[token, place] * torch.tensor(row)
        return out.bfloat16(), SimpleNamespace(), None


@pytest.fixture
def stand_ins(monkeypatch):
    """Both libraries, for ranks that are threads."""
    comm: dict[str, dict[str, Any]] = {
        "mnnvl": {
            "TorchDistBackend": lambda group: SimpleNamespace(group=group),
            "MnnvlConfig": SimpleNamespace,
        },
        "mapping": {"Mapping": SimpleNamespace},
        "trtllm_moe_alltoall": {"MoeAlltoAll": MoeAlltoAll},
    }
    for name, content in comm.items():
        module = ModuleType(f"flashinfer.comm.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("flashinfer", "flashinfer.comm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    deep_ep = ModuleType("deep_ep")
    vars(deep_ep)["Buffer"] = Buffer
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
    monkeypatch.setattr(weft.Group, "process_group", lambda group: group)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "1024")
    return monkeypatch


@pytest.mark.parametrize("payload", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["FlashInfer", "DeepEP v1"])
def test_adapters(ranks, stand_ins, name, payload):
    settings = replace(SIZES, payload=payload)
    first, second = ranks(2, "threads")(rival_body, NAMED[name], settings)
    assert first == second
    assert first["status"] == "measured"
    assert list(first["samples_us"]) == [3, 5]


def test_the_check_sees_a_lost_row(ranks, stand_ins):
    combine = MoeAlltoAll.combine

    def loses(self, *args, **kwargs):
        out = combine(self, *args, **kwargs)
        out[1] = 0
        return out

    stand_ins.setattr(MoeAlltoAll, "combine", loses)
    for found in ranks(2, "threads")(rival_body, NAMED["FlashInfer"], SIZES):
        assert found["status"].startswith("check failed, 3 tokens: rank 0: a number is off by")


@pytest.fixture
def alone() -> Any:
    """A group of one rank, as far as adapters of all-reduces ask."""
    named = SimpleNamespace(group_name="some")
    return SimpleNamespace(rank=0, size=2, device=torch.device("cpu"), process_group=lambda: named)


@pytest.mark.parametrize(("epilogue", "one_shot"), [("none", True), ("norm", False)])
def test_flashinfers_all_reduce_is_called_as_documented(monkeypatch, alone, epilogue, one_shot):
    made, calls = {}, []

    def create(**given):
        made.update(given)
        return "workspace"

    def fusion(*, input, workspace, pattern, launch_with_pdl, use_oneshot, fp32_acc, **others):
        assert (workspace, launch_with_pdl, fp32_acc) == ("workspace", True, True)
        calls.append((pattern, use_oneshot))
        if pattern == 0:
            others["output"].copy_(input)
        else:
            others["norm_out"].copy_(input * 2)
            others["residual_out"].copy_(others["residual_in"])
            assert others["rms_gamma"].shape == (SMALL.hidden,)

    comm, memory = ModuleType("flashinfer.comm"), ModuleType("flashinfer.comm.mnnvl")
    vars(comm).update(create_allreduce_fusion_workspace=create, allreduce_fusion=fusion)
    vars(memory).update(TorchDistBackend=lambda group: ("backend", group))
    for module in (comm, memory):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    settings = replace(SMALL, epilogue=epilogue)
    library = FlashInferReduce(alone, settings, 5, one_shot=one_shot)
    assert made["backend"] == "trtllm", "auto and mnnvl probe for multicast"
    assert (made["world_size"], made["rank"], made["max_token_num"]) == (2, 0, 5)
    rows = make_rows(settings, 3, 0, alone.device)
    assert torch.equal(library.call(rows)(), rows.x if epilogue == "none" else rows.x * 2)
    assert calls == [(0 if epilogue == "none" else 1, one_shot)]


@pytest.mark.parametrize("one_shot", [True, False])
def test_symmetric_memory_is_called_as_documented(monkeypatch, alone, one_shot):
    memory, met = ModuleType("torch.distributed._symmetric_memory"), []
    rendezvous = lambda tensor, name: met.append(name)  # noqa: E731
    vars(memory).update(empty=torch.empty, rendezvous=rendezvous)
    monkeypatch.setitem(sys.modules, memory.__name__, memory)
    ops = SimpleNamespace(
        one_shot_all_reduce=lambda x, op, name: x + 1,
        two_shot_all_reduce_=lambda x, op, name: x.add_(2),
    )
    monkeypatch.setattr(torch.ops, "symm_mem", ops)
    settings = replace(SMALL, epilogue="none")
    library = SymmetricReduce(alone, settings, 5, one_shot=one_shot)
    rows = make_rows(settings, 3, 0, alone.device)
    assert torch.equal(library.call(rows)(), rows.x + (1 if one_shot else 2))
    assert met == ["some"]
