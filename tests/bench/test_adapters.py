"""The adapters against stand-ins that keep to the other libraries' documented calls and layouts.

They show that arguments, layouts and sums fit together; what the libraries themselves do, only a
machine that has them shows.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.bench.test_moe import SETTINGS
from weft.bench.baselines import baseline_body
from weft.bench.moe_baselines import BASELINES
from weft.placement import Placement

SIZES = replace(SETTINGS, ranks=2, tokens=(3, 5), hidden=128, top_k=3, experts=4, samples=2)
NAMED = {(each.name, each.setting): each for each in BASELINES}


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

    def combine(self, payload, runtime_max, payload_in_workspace=False, *, use_low_precision=False):
        assert payload_in_workspace is (payload is self.answers)
        assert payload.shape == self.answers.shape
        if use_low_precision:  # casts where the rows lie, without scales
            payload = payload.to(torch.float8_e4m3fn).to(payload.dtype)
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
    first, second = ranks(2, "threads")(baseline_body, NAMED[name, ""], settings)
    assert first == second
    assert first["status"] == "measured"
    assert list(first["samples_us"]) == [3, 5]


@pytest.mark.parametrize("setting", ["low-precision back", "low-precision back, staged"])
def test_flashinfer_returns_rows_as_fp8(ranks, stand_ins, setting):
    asked, combine = [], MoeAlltoAll.combine

    def noted(self, payload, *args, payload_in_workspace=False, use_low_precision=False):
        asked.append((use_low_precision, payload_in_workspace))
        given = {"payload_in_workspace": payload_in_workspace}
        return combine(self, payload, *args, use_low_precision=use_low_precision, **given)

    stand_ins.setattr(MoeAlltoAll, "combine", noted)
    settings = replace(SIZES, payload="fp8")
    first, second = ranks(2, "threads")(baseline_body, NAMED["FlashInfer", setting], settings)
    assert first == second
    assert first["status"] == "measured"
    assert set(asked) == {(True, not setting.endswith("staged"))}


def test_the_check_sees_a_lost_row(ranks, stand_ins):
    combine = MoeAlltoAll.combine

    def loses(self, *args, **kwargs):
        out = combine(self, *args, **kwargs)
        out[1] = 0
        return out

    stand_ins.setattr(MoeAlltoAll, "combine", loses)
    for found in ranks(2, "threads")(baseline_body, NAMED["FlashInfer", ""], SIZES):
        assert found["status"].startswith("check failed, 3 tokens: rank 0: a number is off by")
