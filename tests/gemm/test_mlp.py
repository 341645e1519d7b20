# SPDX-License-Identifier: Apache-2.0
"""Both GEMMs of experts in one kernel, in the emulator and on a GPU: the bits are those of two."""

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tests.gemm.cases import UNTOUCHED, Case
from tests.gemm.emulate import RULES, EmulatedHopper, compile_mlps, tensor_map
from tests.mutations import MLP, WRONG, Mutation
from weft.errors import InvalidArgument
from weft.gemm import (
    STORE,
    Epilogue,
    GatedQuant,
    Push,
    Store,
    StoreQuant,
    WgmmaPlan,
    grouped_gemm,
    kernels,
    operator,
)
from weft.gemm.call import GemmCall, check_call
from weft.gemm.config import FP8
from weft.gemm.kernels import GemmShape, MlpShape
from weft.gemm.operator import ExpertGemm, grouped_mlp

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow, id="emulated"),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# Experts without rows, of one row, and of up to three M-blocks: split tiles alone, wide tiles alone
# and both. Of the 768 rows of the second weights, one CTA of a wide tile has the last 256 alone.
UP = Case(counts=(1, 320, 0, 129, 65, 257), align=1, n=1024, k=512)
DOWN = replace(UP, n=768, k=512)
ONE_EXPERT = (0, 200, 0, 0, 0, 0)
EPILOGUES: dict[str, Epilogue] = {"gated": GatedQuant(), "relu2": StoreQuant("relu2")}


@dataclass
class Tensors:
    """Tensors of both GEMMs, with results full of UNTOUCHED."""

    device: str
    epilogue: str = "gated"
    pushes: bool = False
    counts: tuple[int, ...] = UP.counts

    def __post_init__(self) -> None:
        up = replace(UP, n=1024 if self.epilogue == "gated" else 512, counts=self.counts)
        self.up = up.make(self.device)
        self.down = replace(DOWN, counts=self.counts).make(self.device)
        self.groups = {name: self.up.given[name] for name in ("counts", "offsets")}
        rows = up.rows
        self.act = torch.full((rows, 512), UNTOUCHED, device=self.device).to(FP8)
        self.scales = torch.full((rows, 4), UNTOUCHED, device=self.device)
        self.y = torch.full((rows, DOWN.n), UNTOUCHED, device=self.device, dtype=torch.bfloat16)
        self.second: Store | Push = STORE
        if self.pushes:
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
            self.second = Push(self.y.data_ptr() + order.to(self.device) * (DOWN.n * 2))

    @property
    def gemms(self) -> tuple[ExpertGemm, ExpertGemm]:
        up, down = self.up, self.down
        first = ExpertGemm(
            up.a,
            up.given["a_scale"],
            up.b,
            up.given["b_scale"],
            (self.act, self.scales),
            EPILOGUES[self.epilogue],
        )
        out = None if self.pushes else self.y
        second = ExpertGemm(self.act, self.scales, down.b, down.given["b_scale"], out, self.second)
        return first, second

    def compute_in_turn(self, plan: WgmmaPlan) -> None:
        for gemm in self.gemms:
            scales = {"a_scale": gemm.a_scale, "b_scale": gemm.b_scale}
            kwargs = self.groups | scales | {"plan": plan, "epilogue": gemm.epilogue}
            grouped_gemm(gemm.a, gemm.b, out=gemm.out, **kwargs)

    def same_bits(self, other: "Tensors") -> bool:
        pairs = ((self.act, other.act), (self.scales, other.scales), (self.y, other.y))
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)

    def calls(self) -> list[GemmCall]:
        result = []
        for gemm in self.gemms:
            scales = {"a_scale": gemm.a_scale, "b_scale": gemm.b_scale, "bias": None}
            kwargs = self.groups | scales | {"out": gemm.out, "epilogue": gemm.epilogue}
            result.append(check_call(gemm.a, gemm.b, **kwargs))
        return result


def shape_of(tensors: Tensors, plan: WgmmaPlan) -> MlpShape:
    return MlpShape.from_shapes(*(GemmShape.from_call(call, plan) for call in tensors.calls()))


@dataclass
class EmulatedMlp:
    """Runs kernels of two GEMMs on CPU tensors; a library for all shapes."""

    shapes: list[MlpShape]
    mutation: Mutation | None = None

    def __post_init__(self) -> None:
        self._library = ctypes.CDLL(str(compile_mlps(self.shapes, self.mutation)))

    def run(
        self,
        tensors: Tensors,
        plan: WgmmaPlan,
        state: torch.Tensor,
        seed: int,
        clusters: int,
        *,
        at_once: bool,
    ) -> None:
        broken = (ctypes.c_uint32 * len(RULES))()
        calls = tensors.calls()
        filled = [kernels.HopperArguments(call).fill_addresses(call.addresses) for call in calls]
        run = getattr(self._library, f"grouped_mlp_{self.shapes.index(shape_of(tensors, plan))}")
        at, ctas = ctypes.c_void_p(state.data_ptr()), 2 * clusters
        run(
            ctypes.byref(filled[0]),
            ctypes.byref(filled[1]),
            at,
            ctas,
            seed,
            seed % 3,
            at_once,
            broken,
        )
        assert not any(broken), {r: n for r, n in zip(RULES, broken, strict=True) if n}


PLANS = [WgmmaPlan(128), WgmmaPlan(256)]
FORMS = [("gated", False), ("gated", True), ("relu2", False)]


@pytest.fixture(scope="module")
def emulated() -> EmulatedMlp:
    return EmulatedMlp([shape_of(Tensors("cpu", *form), plan) for form in FORMS for plan in PLANS])


@pytest.mark.parametrize("counts", [UP.counts, ONE_EXPERT])
@pytest.mark.parametrize("plan", PLANS, ids=["wide", "split"])
@pytest.mark.parametrize(("epilogue", "pushes"), FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_those_of_two_kernels(
    device: str,
    epilogue: str,
    pushes: bool,
    plan: WgmmaPlan,
    counts: tuple[int, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state is 0 after each launch, for the next one.

    In the emulator clusters run at once, or one after the other, as if the last had no SM.
    """
    expected = Tensors(device, epilogue, pushes, counts)
    state = torch.zeros(2 + len(counts), dtype=torch.int32)
    if device == "cuda":
        expected.compute_in_turn(plan)
        state = state.cuda()
        for _ in range(20):
            own = Tensors(device, epilogue, pushes, counts)
            grouped_mlp(*own.gemms, **own.groups, state=state, plan=plan)
            assert own.same_bits(expected)
            assert not state.any()
        return
    shapes = [GemmShape.from_call(call, plan) for call in expected.calls()]
    EmulatedHopper(shapes).patch(monkeypatch)
    expected.compute_in_turn(plan)
    kernel = request.getfixturevalue("emulated")
    for seed, (clusters, at_once) in enumerate([(1, False), (2, True), (3, True), (3, False)]):
        own = Tensors(device, epilogue, pushes, counts)
        kernel.run(own, plan, state, seed, clusters, at_once=at_once)
        assert own.same_bits(expected), seed
        assert not state.any()


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the addresses of each launch from now on, with an empty call cache."""
    launches: list[tuple[int, ...]] = []

    class Launch:
        def __init__(self, up: GemmCall, down: GemmCall, plan: WgmmaPlan, use_pdl: bool) -> None:
            self.size = len(up.tensors) + len(down.tensors) + 1

        def __call__(self, tensors: Sequence[object], addresses: Sequence[int]) -> None:
            assert len(tensors) == len(addresses) == self.size
            launches.append(tuple(addresses))

    monkeypatch.setattr(operator, "_calls", operator._ThreadCalls())
    monkeypatch.setattr(kernels, "MlpLaunch", Launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return launches


def call_mlp(tensors: Tensors, *gemms: ExpertGemm) -> None:
    state = torch.zeros(2 + len(tensors.counts), dtype=torch.int32)
    grouped_mlp(*(gemms or tensors.gemms), **tensors.groups, state=state, plan=PLANS[1])


@pytest.mark.parametrize("pushes", [False, True])
def test_the_kernel_gets_the_arguments_of_both_gemms(
    pushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[kernels.MlpArgs, tuple[int, int, int]]] = []

    class Launcher:
        def __init__(self, function: object, struct: type, *, use_pdl: bool, cluster: int) -> None:
            assert (struct, cluster) == (kernels.MlpArgs, 2)

        def __call__(self, args: kernels.MlpArgs, grid: tuple[int, int, int], *_: int) -> None:
            launches.append((kernels.MlpArgs.from_buffer_copy(args), grid))

    monkeypatch.setattr(operator, "_calls", operator._ThreadCalls())
    monkeypatch.setattr(kernels, "Launcher", Launcher)
    monkeypatch.setattr(kernels, "load_kernel", lambda shape: None)
    monkeypatch.setattr(kernels, "current_stream", lambda device: 0)
    monkeypatch.setattr(kernels, "_count_sms", lambda device: 132)
    monkeypatch.setattr(kernels, "encode_tensor_map", tensor_map)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    kept = [Tensors("cpu", pushes=pushes) for _ in range(2)]
    state = torch.zeros(2 + len(UP.counts), dtype=torch.int32)
    for tensors in kept:  # the second call is cached
        grouped_mlp(*tensors.gemms, **tensors.groups, state=state, plan=PLANS[1])
    for tensors, (args, grid) in zip(kept, launches, strict=True):
        expected = [
            bytes(kernels.HopperArguments(call).fill_addresses(call.addresses))
            for call in tensors.calls()
        ]
        assert [bytes(args.up), bytes(args.down)] == expected
        assert args.state == state.data_ptr()
        assert grid[0] % 2 == 0
        assert 0 < grid[0] <= 132


@pytest.mark.parametrize("pushes", [False, True])
def test_equal_calls_are_checked_once(pushes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    kept = [Tensors("cpu", pushes=pushes) for _ in range(2)]
    for tensors in kept:
        call_mlp(tensors)
    assert len(operator._calls.prepared) == 1
    for tensors, addresses in zip(kept, launches, strict=True):
        calls = tensors.calls()
        assert list(addresses[:-1]) == [*calls[0].addresses, *calls[1].addresses]


def test_results_overlap_no_tensor_of_either_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of the second GEMM are stored while rows of the first are still read."""
    launches = record_launches(monkeypatch)
    tensors = Tensors("cpu")
    up, down = tensors.gemms
    memory = torch.zeros(tensors.y.numel() + up.a.numel(), dtype=torch.bfloat16)
    y, rest = memory[: tensors.y.numel()].view_as(tensors.y), memory[tensors.y.numel() :]
    bytes_ = memory.view(torch.uint8)
    inside = bytes_[: up.a.numel()].view(FP8).view_as(up.a)
    beside = rest.view(torch.uint8)[: up.a.numel()].view(FP8).view_as(up.a)
    call_mlp(tensors, up._replace(a=beside), down._replace(out=y))
    for _ in range(2):  # the first call is cached
        with pytest.raises(InvalidArgument, match="out of down overlaps a of up in memory"):
            call_mlp(tensors, up._replace(a=inside), down._replace(out=y))
    assert len(launches) == 1


@pytest.mark.parametrize("counts", [(), (0, 0)])
def test_nothing_is_launched_without_rows_or_experts(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have no experts: layers of few experts have ranks without any."""
    launches = record_launches(monkeypatch)
    tensors = Tensors("cpu", counts=(1, 0))
    up, down = (
        gemm._replace(b=gemm.b[: len(counts)], b_scale=gemm.b_scale[: len(counts)])
        for gemm in tensors.gemms
    )
    tensors.counts = counts
    tensors.groups = {name: t[: len(counts)] for name, t in tensors.groups.items()}
    if counts:  # no rows
        act = tensors.act[:0], tensors.scales[:0]
        up = up._replace(a=up.a[:0], a_scale=up.a_scale[:0], out=act)
        down = down._replace(a=act[0], a_scale=act[1], out=tensors.y[:0])
    call_mlp(tensors, up, down)
    assert launches == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MLP)
def test_a_fault_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first down tiles are of the expert whose up tiles are the last."""
    plan, expected = WgmmaPlan(256), Tensors("cpu", counts=ONE_EXPERT)
    EmulatedHopper([GemmShape.from_call(call, plan) for call in expected.calls()]).patch(
        monkeypatch
    )
    expected.compute_in_turn(plan)
    kernel = EmulatedMlp([shape_of(expected, plan)], MLP[name])

    def compare() -> None:
        state = torch.zeros(8, dtype=torch.int32)
        for seed in range(12):
            own = Tensors("cpu", counts=ONE_EXPERT)
            kernel.run(own, plan, state, seed, 2, at_once=seed % 2 == 0)
            assert own.same_bits(expected), WRONG
            assert not state.any(), "unreset"

    with pytest.raises(AssertionError, match=MLP[name].error):
        compare()
