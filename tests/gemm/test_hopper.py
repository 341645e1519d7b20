# SPDX-License-Identifier: Apache-2.0
"""Hopper's grouped GEMM in the emulator, in random orders, and on a GPU.

The tensor cores' last bits are theirs, so only the GPU tests compare with the bits of Triton's
kernel. Triton's has no MXFP4 weights: there all tiles make one result.
"""

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gemm.cases import (
    CASES,
    EXPONENTS,
    LARGE,
    UNTOUCHED,
    Case,
    CaseTensors,
    applied,
    decode_mxfp4,
    every_exponent,
    gated,
    shape_of,
)
from tests.gemm.emulate import EmulatedHopper
from weft.gemm import (
    STORE,
    Epilogue,
    Gated,
    GatedQuant,
    Push,
    Store,
    StoreQuant,
    WgmmaPlan,
    pack_mxfp4,
    plan,
)
from weft.gemm.config import BLOCK_MS, FP8, FP8_BLOCK_MS, MXFP4, MXFP4_BLOCK_MS
from weft.gemm.kernels import BIASES, GemmShape, preload_kernels

BF16, FP16 = torch.bfloat16, torch.float16
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow, id="emulated"),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
ALL = CASES | LARGE
TILES = {"contiguous": (32, 256), "normal": (96, 160, 256), "packed": (64, 160)}
TILES |= {"wide": (128, 256), "bf16": (32, 256), "bf16, high": (128, 192), "mxfp4": (32, 160)}
# On a GPU some have every tile there is, others a low and a high one.
EVERY_TILE = ("contiguous", "heights", "deep", "bf16, deep", "mxfp4", "mxfp4, heights")
PUSHED = ("contiguous", "wide", "mxfp4", "bf16")
EARLY = ("normal", "wide", "bf16", "mxfp4")
EPILOGUES: dict[str, Epilogue] = {
    "store": STORE,
    "gated": GatedQuant(),
    "limited": GatedQuant(1.702, 1.0, 0.7),
    "situ": GatedQuant(beta=0.5, linear_beta=3.0),
    "relu2": Store("relu2"),
    "relu2_fp8": StoreQuant("relu2"),
}
SITU = ("contiguous", "mxfp4", "bf16")
RELU2 = ("contiguous", "normal", "wide", "mxfp4", "bf16")
HALF = Case(MXFP4, counts=(5, 40), n=384, k=256)  # the last columns are of one CTA alone
# Split and wide tiles, with k of one block, of fewer than there are stages and of more.
SPLIT = Case(counts=(1, 128, 320, 129, 65, 257, 0), align=1, n=768)
SPLIT_KS = (128, 384, 1408)
# Low tiles of MXFP4 weights: up to eight rows and more, next to rows of other experts, with k of
# whole rings of stages (four for 32 rows, five for 64) and of parts of rings.
LOW = Case(MXFP4, counts=(8, 0, 9, 1, 64, 17), align=1, slack=0)
LOW_KS = (512, 640)
# Biases and results of other dtypes than the operands: fewer columns than a warp has, odd steps of
# k.
DTYPES = {
    "tiny": (Case(BF16, (5, 0, 37, 1, 64), 16, 8, bias=True), torch.float32, FP16, 32),
    "masked": (Case(FP16, (33, 65, 0, 97), 144, 136, masked=True, bias=True), FP16, BF16, 64),
    "other": (Case(FP16, (33, 193), 400, 72, bias=True), BF16, BF16, 192),
}


def block_ms(name: str, device: str) -> tuple[int, ...]:
    if device == "cpu":
        return TILES.get(name, (32,))
    if name not in EVERY_TILE:
        return (32, 128)
    return {FP8: FP8_BLOCK_MS, MXFP4: MXFP4_BLOCK_MS}.get(ALL[name].dtype, BLOCK_MS)


def shapes_of(name: str, device: str) -> Iterator[GemmShape]:
    case = ALL[name]
    for rows in block_ms(name, device):
        for epilogue in ("store", "gated"):
            shape = shape_of(case, rows, epilogue)
            yield shape
            if name in EARLY and device == "cpu":
                yield replace(shape, prefetch_weights=True)
        if name in SITU:
            yield shape_of(case, rows, "gated", situ=True)
        if name in RELU2:
            yield shape_of(case, rows, "relu2")
            if case.fp8_rows:
                yield shape_of(case, rows, "relu2_fp8")
        if name in PUSHED:
            shape = shape_of(case, rows, "push")
            yield from (shape, replace(shape, out_dtype="fp16"), replace(shape, flag_in_data=True))


def all_shapes(device: str) -> Iterator[GemmShape]:
    for name in CASES if device == "cpu" else ALL:
        yield from shapes_of(name, device)
    for case in (HALF, EXPONENTS):
        yield shape_of(case, 32, "store")
    for k in SPLIT_KS:
        for rows, early in ((64, False), (256, False), (256, True)):
            yield shape_of(replace(SPLIT, k=k), rows, "gated", prefetch_weights=early)
    for k in LOW_KS:
        for rows, early in ((160, False), (32, False), (32, True), (64, False), (64, True)):
            yield shape_of(replace(LOW, k=k), rows, "gated", prefetch_weights=early)
    for case, bias, out, rows in DTYPES.values():
        for epilogue in ("store", "gated", "push"):
            dtypes = {"bias": BIASES[bias], "out_dtype": "bf16" if out == BF16 else "fp16"}
            yield shape_of(case, rows, epilogue, **dtypes)


class Hopper:
    """The kernel on one device; a GPU needs no seeds for its order."""

    def __init__(self, device: str, emulated: EmulatedHopper | None) -> None:
        self.device, self.emulated = device, emulated

    def draw(self, seed: int, policy: int | None = None, sms: int = 4) -> None:
        """Run the next calls in another order. policy: of what is on its way."""
        if self.emulated is not None:
            self.emulated.seed, self.emulated.sms = seed, sms
            self.emulated.policy = seed % 3 if policy is None else policy


@pytest.fixture(scope="module")
def emulated() -> EmulatedHopper:
    return EmulatedHopper(all_shapes("cpu"))


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile all shapes at once, which is faster than one by one."""
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("WgmmaPlan's kernel is for Hopper")
    preload_kernels([*dict.fromkeys(all_shapes("cuda"))])


@pytest.fixture
def hopper(device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Hopper:
    """Return the kernel on a device. In the emulator, calls on CPU tensors run it."""
    if device == "cuda":
        request.getfixturevalue("compiled")
        return Hopper(device, None)
    own = request.getfixturevalue("emulated")
    own.patch(monkeypatch)
    return Hopper(device, own)


on_each = pytest.mark.parametrize("device", DEVICES)
in_emulator = pytest.mark.parametrize("device", DEVICES[:1])


def epilogue_for(case: Case, name: str) -> tuple[Epilogue, float]:
    """Return an epilogue for a case's dtype, and the tolerance of its result."""
    epilogue = EPILOGUES[name]
    if type(epilogue) is Store:
        return epilogue, 2.0**-6 if epilogue.activation else 2.0**-7
    if case.fp8_rows:
        return epilogue, 0.08
    assert isinstance(epilogue, GatedQuant)
    return Gated(**asdict(epilogue)), 2.0**-6


@pytest.mark.parametrize(
    ("device", "name", "epilogue"),
    [
        pytest.param(*device.values, name, epilogue, marks=device.marks)
        for device in DEVICES
        for name in (CASES if device.id else ALL)
        for epilogue in EPILOGUES
        if (epilogue != "situ" or name in SITU)
        and (not epilogue.startswith("relu2") or name in RELU2)
        and (epilogue != "relu2_fp8" or ALL[name].fp8_rows)
    ],
)
def test_rows_are_those_of_the_oracle(hopper: Hopper, name: str, epilogue: str):
    case, on_gpu = ALL[name], hopper.device == "cuda"
    if on_gpu and case.dtype == MXFP4:
        # Tensor cores align FP8 products before they add them: of rows that span the whole window
        # the smallest numbers are lost, with FP8 weights as well.
        case = replace(case, window=4)
    made, (how, tolerance) = case.make(hopper.device), epilogue_for(case, epilogue)
    expected, first = applied(how, made.oracle()), None
    if on_gpu and case.dtype != MXFP4:
        tile = plan(4, 32, case.n, case.k, case.dtype, gated=isinstance(how, Gated))
        first = made.call(how, tile)
    for seed, rows in enumerate(block_ms(name, hopper.device)):
        hopper.draw(seed, (seed + len(epilogue)) % 3)
        ours = made.call(how, WgmmaPlan(rows))
        ours.agrees(expected, tolerance)
        first = first or ours
        assert not on_gpu or ours.same_bits(first), rows


def exact(made: CaseTensors, block_m: int) -> None:
    """Assert that rows are the oracle's, rounded once, and that other rows are unchanged."""
    case = made.case
    live, wide = case.live(), made.oracle()
    got = made.call(STORE, WgmmaPlan(block_m)).numbers.reshape(case.rows, -1).cpu()
    assert torch.equal(got[live], wide[live].to(BF16 if case.fp8_rows else case.dtype))
    assert bool((got[~live] == UNTOUCHED).all())


@on_each
def test_every_number_at_every_exponent(hopper: Hopper):
    exact(every_exponent(hopper.device), 32)


def integer_operands(case: Case) -> CaseTensors:
    """Return operands whose sums are exact in fp32, in any order."""
    made, seed = case.make(), torch.Generator().manual_seed(3)
    live = case.live().view(made.a.shape[:-1])

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randint(-3, 4, like.shape, generator=seed).to(like.dtype)

    a = made.a.clone()
    a[live] = draw(made.a)[live]
    if case.bias:
        made.given["bias"].copy_(draw(made.given["bias"]))
    if not case.fp8_rows:
        return replace(made, a=a, b=draw(made.b))
    for name in ("a_scale", "b_scale") if case.dtype == FP8 else ("a_scale",):
        powers = torch.exp2(torch.randint(-3, 1, made.given[name].shape, generator=seed).float())
        kept = made.given[name].isnan()
        made.given[name].copy_(torch.where(kept, torch.nan, powers))
    if case.dtype == FP8:
        return replace(made, a=a, b=draw(made.b))
    experts, size = len(case.counts), (len(case.counts), case.n, case.k // 2)
    values = torch.randint(0, 256, size, generator=seed).byte()
    scales = torch.randint(124, 130, (experts, case.n, case.k // 32), generator=seed).byte()
    b, b_scale = pack_mxfp4(values, scales)
    given = made.given | {"b_scale": b_scale}
    return replace(made, a=a, b=b, given=given, wide=decode_mxfp4(values, scales))


@pytest.mark.parametrize("name", [*TILES, "masked", "mxfp4, masked", "half a cluster's columns"])
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@in_emulator
def test_integers_are_exact_with_any_counts(hopper: Hopper, name: str, data: st.DataObject):
    """Counts are also drawn from the borders of tiles."""
    edges = [0, 1, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 160, 161, 256, 257, 320, 321, 544]
    case = CASES.get(name, HALF)
    some = st.sampled_from(edges) | st.integers(0, 300)
    counts = data.draw(st.tuples(*[some] * len(case.counts)))
    made = integer_operands(replace(case, counts=counts, align=1, slack=3))
    for policy in range(3):
        hopper.draw(data.draw(st.integers(0, 99)), policy, data.draw(st.sampled_from((2, 4, 6))))
        exact(made, data.draw(st.sampled_from(block_ms(name, hopper.device))))


@pytest.mark.parametrize("k", SPLIT_KS)
@on_each
def test_split_and_wide_tiles_change_no_bit(hopper: Hopper, k: int):
    """Each block of k is added with one fma, in order, as in low tiles."""
    made, epilogue = replace(SPLIT, k=k).make(hopper.device), GatedQuant()
    alone = made.call(epilogue, WgmmaPlan(64))
    for seed in range(4):
        hopper.draw(seed, sms=(2, 6)[seed // 2])
        early = seed % 2 == 1
        options: dict[str, Any] = {"prefetch_weights": early, "programmatic_launch": early}
        assert made.call(epilogue, WgmmaPlan(256), **options).same_bits(alone), seed


@pytest.mark.parametrize("k", LOW_KS)
@on_each
def test_low_tiles_of_mxfp4_change_no_bit(hopper: Hopper, k: int):
    """The unrolled loop adds as the rolled one, and NaN in padding rows is of no effect."""
    made, epilogue = replace(LOW, k=k).make(hopper.device), GatedQuant()
    made.a.view(torch.uint8)[[8, 18]] = 0x7F  # padding of the first tiles of two other experts
    high = made.call(epilogue, WgmmaPlan(160))
    assert high.scales is not None
    assert high.scales.isnan().any(1).nonzero().flatten().tolist() == [8, 18]
    for seed, (rows, early) in enumerate([(32, False), (32, True), (64, False), (64, True)] * 2):
        hopper.draw(seed, sms=(2, 6)[seed // 4])
        options: dict[str, Any] = {"prefetch_weights": early, "programmatic_launch": early}
        assert made.call(epilogue, WgmmaPlan(rows), **options).same_bits(high), seed


@pytest.mark.parametrize("epilogue", ["store", "gated"])
@pytest.mark.parametrize("name", EARLY)
@in_emulator
def test_weights_may_be_loaded_before_the_previous_kernel_ends(hopper, name, epilogue):
    """Rows, scales and dst_addr are NaN until the previous kernel ends, at any time."""
    made, (how, _) = CASES[name].make(), epilogue_for(CASES[name], epilogue)
    for rows in block_ms(name, hopper.device):
        plain = made.call(how, WgmmaPlan(rows))
        for seed in range(3):
            hopper.draw(seed, sms=(2, 4)[seed % 2])
            got = made.call(how, WgmmaPlan(rows), prefetch_weights=True, programmatic_launch=True)
            assert got.same_bits(plain), (rows, seed)


@pytest.mark.parametrize("epilogue", ["store", "gated"])
@pytest.mark.parametrize("name", PUSHED)
@on_each
def test_no_order_and_no_number_of_sms_changes_a_bit(hopper: Hopper, name: str, epilogue: str):
    """One cluster computes all tiles in turn, or several share them."""
    made, (how, _) = CASES[name].make(hopper.device), epilogue_for(CASES[name], epilogue)
    tile = WgmmaPlan(TILES[name][-1])
    first = made.call(how, tile)
    for seed, sms in enumerate((1, 2, 7, 40)):
        hopper.draw(seed, sms=(2, 4, 6, 12)[seed])
        num_sms: dict[str, Any] = {"num_sms": sms} if hopper.device == "cuda" else {}
        assert made.call(how, tile, **num_sms).same_bits(first), seed


@pytest.mark.parametrize("name", PUSHED)
@on_each
def test_rows_are_pushed_to_dst_addr_or_nowhere(hopper: Hopper, name: str):
    case = CASES[name]
    made = case.make(hopper.device)
    for seed, rows in enumerate(block_ms(name, hopper.device)):
        whole = made.call(STORE, WgmmaPlan(rows)).numbers.reshape(case.rows, case.n)
        for aborted in (None, 0, 1):
            hopper.draw(seed, 2 * (seed % 2))
            stored, received = made.pushed(WgmmaPlan(rows), BF16, aborted=aborted)
            assert torch.equal(stored[received], whole[received])
        stored, received = made.pushed(WgmmaPlan(rows), FP16)
        assert torch.allclose(
            stored[received].float(), whole[received].float(), rtol=2.0**-7, atol=0.02
        )


@pytest.mark.parametrize("name", PUSHED)
@in_emulator
def test_no_word_of_a_row_with_flag_in_data_is_the_sentinel(hopper: Hopper, name: str):
    """A NaN of the result is never a word of all ones, for which the owner polls."""
    case, tile = CASES[name], WgmmaPlan(TILES[name][-1])
    made = case.make()
    made.a.view(torch.uint8 if case.fp8_rows else torch.int16)[case.live().nonzero()[0]] = (
        0x7F if case.fp8_rows else 0x7FFF
    )
    whole = made.call(STORE, tile).numbers.reshape(case.rows, case.n)
    remote = torch.full((case.rows, case.n // 2), -1, dtype=torch.int32)
    dst_addr = remote.data_ptr() + torch.arange(case.rows) * (case.n * 2)
    abort_flag = torch.zeros(1, dtype=torch.int32)
    made.call(Push(dst_addr, BF16, flag_in_data=True, abort_flag=abort_flag), tile)
    live = case.live()
    assert torch.equal(remote[live], whole.view(torch.int32)[live])
    assert bool(whole[live].isnan().any())
    assert bool((remote[live] != -1).all())
    assert bool((remote[~live] == -1).all())


@pytest.mark.parametrize("rows", [32, 256])
@on_each
def test_invalid_counts_and_starts_change_no_other_row(hopper: Hopper, rows: int):
    """Counts below zero and beyond the rows, and starts outside, are clamped."""
    case, plan = CASES["contiguous"], WgmmaPlan(rows)
    made, starts, third = case.make(hopper.device), case.starts, case.counts[2]
    honest = made.call(plan=plan).numbers

    def call(counts: list[int], offsets: list[int]) -> torch.Tensor:
        made.given["counts"].copy_(torch.tensor(counts))
        made.given["offsets"][: len(offsets)].copy_(torch.tensor(offsets))
        return made.call(plan=plan).numbers

    got = call([-5, -(2**31), 2**31 - 1, 1, 30], [*starts[:3], -7, case.rows])
    assert bool((got[: starts[2]] == UNTOUCHED).all())
    assert torch.equal(got[starts[2] :][:third], honest[starts[2] :][:third])
    beyond = [case.rows, case.rows + 9, 2**30, -(2**31), 2**31 - 1]
    assert bool((call([40, 9, 20, 30, 2**31 - 1], beyond) == UNTOUCHED).all())


@on_each
def test_non_finite_scales_affect_their_row_only(hopper: Hopper):
    """Rows whose scales are not finite become NaN; other rows keep their bits."""
    name = "normal" if hopper.device == "cpu" else "heights"
    plans = [WgmmaPlan(rows) for rows in reversed(block_ms(name, hopper.device))]
    made, rows = ALL[name].make(hopper.device), [5, ALL[name].rows // 2]
    clean = made.call(GatedQuant(), plans[0])
    made.given["a_scale"][rows[0], 1] = torch.nan
    made.given["a_scale"][rows[1], 0] = torch.inf
    for tile in plans[: 1 if hopper.device == "cpu" else None]:
        got = made.call(GatedQuant(), tile)
        assert got.scales is not None
        assert clean.scales is not None
        assert bool(got.scales[rows].isnan().all())
        got.scales[rows] = clean.scales[rows]
        got.numbers.view(torch.uint8)[rows] = clean.numbers.view(torch.uint8)[rows]
        assert got.same_bits(clean), tile


@pytest.mark.parametrize("epilogue", ["store", "gated", "push"])
@pytest.mark.parametrize("name", DTYPES)
@on_each
def test_biases_and_results_of_other_dtypes(hopper: Hopper, name: str, epilogue: str):
    case, bias, out, block_m = DTYPES[name]
    made, tile = case.make(hopper.device), WgmmaPlan(block_m)
    made.given["bias"] = made.given["bias"].to(bias)
    expected, how = made.oracle(), Gated(1.702, 1.0, 0.7)
    for seed, sms in enumerate((2, 4, 6)):
        hopper.draw(seed, sms=sms)
        if epilogue == "gated":
            made.call(how, tile, out).agrees(gated(how, expected), 2.0**-6)
            continue
        got = made.call(STORE, tile, out)
        got.agrees(expected, 2.0**-6)
        if epilogue == "push":
            stored, received = made.pushed(tile, out)
            assert torch.equal(stored[received], got.numbers.reshape(case.rows, -1)[received])


def end_at_guard_page(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that ends at an inaccessible page."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + pages), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    bytes_ = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=pages - size)
    copy = bytes_.view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy


@pytest.mark.parametrize("epilogue", ["store", "gated"])
@pytest.mark.parametrize("name", ["contiguous", "packed", "mxfp4", "bf16"])
@in_emulator
def test_nothing_beyond_the_end_is_accessed(hopper: Hopper, name: str, epilogue: str):
    case, (how, _) = CASES[name], epilogue_for(CASES[name], epilogue)
    made = case.make()
    given = {name: end_at_guard_page(tensor) for name, tensor in made.given.items()}
    made = replace(made, a=end_at_guard_page(made.a), b=end_at_guard_page(made.b), given=given)
    for rows in block_ms(name, hopper.device):
        whole = made.call(how, WgmmaPlan(rows))
        numbers, out = end_at_guard_page(whole.numbers), None
        if whole.scales is not None:
            out = numbers, end_at_guard_page(whole.scales)
        made.call(how, WgmmaPlan(rows), out=numbers if out is None else out)
        assert torch.equal(numbers.view(torch.uint8), whole.numbers.view(torch.uint8))
