# SPDX-License-Identifier: Apache-2.0
"""Hopper's grouped GEMM on a CPU: clusters, copies, tensor cores and barriers, in orders by chance.

The tensor cores' last bits are theirs; those that the GPU tests compare are not looked at here.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gemm.cases import (
    EXPONENTS,
    UNTOUCHED,
    Case,
    Made,
    decode_mxfp4,
    every_exponent,
    gated,
    hold_damage_to_its_row,
    hold_to_rows,
    shape_of,
)
from tests.gemm.emulate import (
    AT_ANY_TIME,
    AT_ONCE,
    LATE,
    EmulatedGemms,
    compile_gemms,
    tensor_map,
)
from weft.gemm import (
    STORE,
    Epilogue,
    Gated,
    GatedQuant,
    Push,
    WgmmaPlan,
    kernels,
    pack_mxfp4,
    reference,
)
from weft.gemm.config import FP8, MXFP4
from weft.gemm.kernels import GemmShape

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
BF16 = torch.bfloat16

# Odd numbers of k blocks, scales as vectors and one by one, rows up to the last of the tensor; with
# 16-bit dtypes: k blocks and tiles that end beyond the tensor.
CASES = {
    "contiguous": Case(counts=(5, 0, 130, 1, 170), n=512, k=384),
    "masked": Case(counts=(17, 0, 3, 129), n=512, k=128, masked=True),
    "packed": Case(counts=(3, 1, 7, 0, 200), align=1, slack=0, n=256, k=512),
    "no rows": Case(counts=(0, 0, 0), n=256, k=128),
    "k-major": Case(counts=(40, 9), k_major=True, n=256, k=512),
    "k-major, masked": Case(counts=(40, 9), k_major=True, masked=True, n=256, k=512),
    "many experts": Case(counts=tuple(e % 5 for e in range(70)), n=256, k=128),
    "normal": Case(counts=(97, 128, 129, 192, 257, 300), n=256, k=640),
    "mxfp4": Case(MXFP4, counts=(5, 0, 130, 1, 170), n=512, k=384, bias=True),
    "mxfp4, masked": Case(MXFP4, counts=(17, 0, 3, 97), n=256, k=128, masked=True),
    "bf16": Case(BF16, counts=(5, 0, 130, 1, 64), n=272, k=200, bias=True),
    "bf16, high": Case(BF16, counts=(150, 257, 192, 48), n=256, k=320),
    "fp16, masked": Case(torch.float16, counts=(17, 0, 3, 200), n=512, k=64, masked=True),
}
HALF = Case(MXFP4, counts=(5, 40), n=384, k=256)  # the last columns are of one CTA alone
# Beside split tiles, gated tiles of up to 64 rows have two k blocks in a stage: one k block, one
# pair, a pair and a half, as many pairs as stages, and more.
PAIRED = Case(counts=(1, 63, 320, 64, 65, 257, 0, 321), align=1, n=256)
PAIRED_KS = (128, 256, 384, 1024, 1408)
BLOCK_MS = {"contiguous": (32, 256), "normal": (96, 128, 256), "packed": (64, 160)}
BLOCK_MS |= {"bf16": (32, 256), "bf16, high": (128, 192), "mxfp4": (32, 160)}
EPILOGUES: dict[str, Epilogue] = {
    "store": STORE,
    "gated": GatedQuant(),
    "limited": GatedQuant(1.702, 1.0, 0.7),
    "situ": GatedQuant(beta=0.5, linear_beta=3.0),
}
PREFETCHED = ("no rows", "normal", "bf16", "k-major", "mxfp4")


def block_ms(name: str) -> tuple[int, ...]:
    return BLOCK_MS.get(name, (32,))


def all_shapes() -> Iterator[GemmShape]:
    for case in (HALF, EXPONENTS):
        yield shape_of(case, 32, "store")
    for k in PAIRED_KS:
        case = replace(PAIRED, k=k)
        yield shape_of(case, 64, "gated")
        yield shape_of(case, 256, "gated")
        yield shape_of(case, 256, "gated", prefetch_weights=True)
    for name in CASES:
        for shape in shapes_of(name):
            yield shape
            if name in PREFETCHED:
                yield replace(shape, prefetch_weights=True)


def shapes_of(name: str) -> Iterator[GemmShape]:
    case = CASES[name]
    for rows in block_ms(name):
        yield shape_of(case, rows, "store")
        yield shape_of(case, rows, "gated")
        yield shape_of(case, rows, "gated", situ=True)
        if name in ("contiguous", "mxfp4"):
            yield shape_of(case, rows, "push", out_dtype="fp16")
            yield shape_of(case, rows, "push", flag_in_data=True)
        if name in ("contiguous", "mxfp4", "bf16"):
            yield shape_of(case, rows, "push")


def of(case: Case, name: str) -> tuple[Epilogue, float]:
    """An epilogue of EPILOGUES for a case's dtype, and how near its result must be."""
    how = EPILOGUES[name]
    if not isinstance(how, GatedQuant):
        return how, 2.0**-7
    if case.fp8_rows:
        return how, 0.08
    return Gated(**asdict(how)), 2.0**-6


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGemms:
    shapes = tuple(dict.fromkeys(all_shapes()))
    folder = tmp_path_factory.mktemp("gemms") / "tree"
    return EmulatedGemms(ctypes.CDLL(str(compile_gemms(shapes, folder))), shapes)


@pytest.fixture
def gemms(library: EmulatedGemms, monkeypatch: pytest.MonkeyPatch) -> EmulatedGemms:
    """Calls with a WgmmaPlan and tensors of the CPU are emulated."""
    mine = replace(library)
    monkeypatch.setattr(reference, "compute", mine.compute)
    monkeypatch.setattr(kernels, "tensor_map", tensor_map)
    return mine


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_oracle(gemms: EmulatedGemms, name: str, epilogue: str):
    made, (how, tolerance) = CASES[name].make(), of(CASES[name], epilogue)
    wanted = made.oracle()
    if isinstance(how, Gated):
        wanted = gated(how, wanted)
    for gemms.seed, rows in enumerate(block_ms(name)):
        gemms.policy = (gemms.seed + len(epilogue)) % 3
        made.call(how, WgmmaPlan(rows)).agrees(wanted, tolerance)


def test_columns_may_be_half_a_cluster(gemms: EmulatedGemms):
    made = in_integers(HALF)
    got, live = made.call(STORE, WgmmaPlan(32)).numbers, HALF.live()
    assert torch.equal(got[live], made.oracle()[live].to(BF16))
    assert bool((got[~live] == UNTOUCHED).all())


def test_every_number_at_every_exponent(gemms: EmulatedGemms):
    made, live = every_exponent(), EXPONENTS.live()
    got = made.call(STORE, WgmmaPlan(32)).numbers
    assert torch.equal(got[live], made.oracle()[live].to(BF16))


def in_integers(case: Case) -> Made:
    """Operands whose sums are exact in fp32, in any order."""
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


@pytest.mark.parametrize("k", PAIRED_KS)
def test_two_k_blocks_in_a_stage_change_no_bit(gemms: EmulatedGemms, k: int):
    """Each is added with one fma, in order, as where it has a stage to itself."""
    made, how = replace(PAIRED, k=k).make(), GatedQuant()
    alone = made.call(how, WgmmaPlan(64))
    for seed in range(6):
        gemms.seed, gemms.policy, gemms.sms = seed, seed % 3, (2, 4, 6)[seed // 2]
        early = seed % 2 == 1
        got = made.call(how, WgmmaPlan(256), prefetch_weights=early, programmatic_launch=early)
        assert got.same_bits(alone), seed


@pytest.mark.parametrize("policy", [LATE, AT_ONCE, AT_ANY_TIME])
@pytest.mark.parametrize(
    "name", ["contiguous", "masked", "normal", "mxfp4", "mxfp4, masked", "bf16", "bf16, high"]
)
def test_integers_are_exact(gemms: EmulatedGemms, name: str, policy: int):
    case = CASES[name]
    made, live = in_integers(case), case.live()
    wanted = made.oracle()[live].to(BF16 if case.fp8_rows else case.dtype)
    gemms.policy = policy
    for rows in block_ms(name):
        got = made.call(STORE, WgmmaPlan(rows)).numbers.reshape(case.rows, -1)
        assert torch.equal(got[live], wanted)
        assert bool((got[~live] == UNTOUCHED).all())


@pytest.mark.parametrize("name", ["contiguous", "mxfp4", "bf16"])
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_counts_are_served(gemms: EmulatedGemms, name: str, data: st.DataObject):
    """Borders of tiles are where the counts are drawn from, too."""
    edges = [0, 1, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 160, 161, 256, 257, 320, 321, 544]
    size = len(CASES[name].counts)
    drawn = st.lists(st.sampled_from(edges) | st.integers(0, 300), min_size=size, max_size=size)
    counts = data.draw(drawn)
    case = replace(CASES[name], counts=tuple(counts), align=1)
    rows = data.draw(st.sampled_from(block_ms(name)))
    gemms.seed, gemms.policy = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 2))
    gemms.sms = data.draw(st.sampled_from((2, 4, 6)))
    made, live = in_integers(case), case.live()
    got = made.call(STORE, WgmmaPlan(rows)).numbers.reshape(case.rows, -1)
    assert torch.equal(got[live], made.oracle()[live].to(BF16))
    assert bool((got[~live] == UNTOUCHED).all())


@pytest.mark.parametrize("epilogue", ["store", "gated"])
@pytest.mark.parametrize("name", PREFETCHED)
def test_weights_may_be_loaded_before_the_previous_kernel_ends(
    gemms: EmulatedGemms, name: str, epilogue: str
):
    """Rows, scales and dst_addr hold NaN until that end, which comes at any time."""
    made, (how, _) = CASES[name].make(), of(CASES[name], epilogue)
    for rows in block_ms(name):
        plain = made.call(how, WgmmaPlan(rows))
        for seed in range(6):
            gemms.seed, gemms.policy, gemms.sms = seed, seed % 3, (2, 4)[seed % 2]
            got = made.call(how, WgmmaPlan(rows), prefetch_weights=True, programmatic_launch=True)
            assert got.same_bits(plain), (rows, seed)


@pytest.mark.parametrize("epilogue", ["store", "gated"])
@pytest.mark.parametrize("name", ["contiguous", "mxfp4", "bf16"])
def test_no_order_changes_a_bit(gemms: EmulatedGemms, name: str, epilogue: str):
    """One cluster computes low and high tiles in turn, or several share them."""
    made, (how, _) = CASES[name].make(), of(CASES[name], epilogue)
    plan = WgmmaPlan(block_ms(name)[-1])
    first = made.call(how, plan)
    for seed in range(9):
        gemms.seed, gemms.policy, gemms.sms = seed, seed % 3, (2, 4, 12)[seed // 3]
        assert made.call(how, plan).same_bits(first), seed


@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("contiguous", BF16),
        ("contiguous", torch.float16),
        ("mxfp4", BF16),
        ("mxfp4", torch.float16),
        ("bf16", BF16),
    ],
)
def test_rows_are_pushed_to_dst_addr_or_nowhere(
    gemms: EmulatedGemms, name: str, tile: int, dtype: torch.dtype
):
    case = CASES[name]
    made, plan = case.make(), WgmmaPlan(BLOCK_MS[name][tile])
    whole = made.call(STORE, plan).numbers.reshape(case.rows, case.n)
    for gemms.policy in (LATE, AT_ANY_TIME):
        stored, came = made.pushed(plan, dtype)
        near = torch.allclose(stored[came].float(), whole[came].float(), rtol=2.0**-7, atol=0.02)
        assert near if dtype == torch.float16 else torch.equal(stored[came], whole[came])


@pytest.mark.parametrize("name", ["contiguous", "mxfp4"])
@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("aborted", [0, 5])
def test_rows_with_flag_in_data_are_pushed_unless_aborted(
    gemms: EmulatedGemms, name: str, tile: int, aborted: int
):
    """A NaN of the result is not the sentinel, a word of all ones, that the owner polls for."""
    case, plan = CASES[name], WgmmaPlan(BLOCK_MS[name][tile])
    made = case.make()
    made.a.view(torch.uint8)[case.live().nonzero()[0]] = 0x7F  # NaN
    whole = made.call(STORE, plan).numbers.reshape(case.rows, case.n)
    there = torch.full((case.rows, case.n // 2), -1, dtype=torch.int32)
    dst_addr = there.data_ptr() + torch.arange(case.rows) * (case.n * 2)
    abort_flag = torch.tensor([aborted], dtype=torch.int32)
    push = Push(dst_addr, BF16, flag_in_data=True, abort_flag=abort_flag)
    made.call(push, plan)
    came = case.live() & (aborted == 0)
    assert torch.equal(there[came], whole.view(torch.int32)[came])
    assert bool(whole[came].isnan().any()) == (aborted == 0)
    assert bool((there[came] != -1).all())
    assert bool((there[~came] == -1).all())


@pytest.mark.parametrize("rows", [32, 256])
def test_counts_and_starts_that_lie_touch_no_row_of_others(gemms: EmulatedGemms, rows: int):
    hold_to_rows(CASES["contiguous"].make(), WgmmaPlan(rows))


def test_damage_stays_in_its_row(gemms: EmulatedGemms):
    hold_damage_to_its_row(CASES["normal"].make(), WgmmaPlan(256))


def at_the_brink(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last that may be touched: the page behind it is closed."""
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
def test_nothing_is_touched_behind_its_end(gemms: EmulatedGemms, name: str, epilogue: str):
    case, (how, _) = CASES[name], of(CASES[name], epilogue)
    made = case.make()
    made = replace(
        made,
        a=at_the_brink(made.a),
        b=at_the_brink(made.b),
        given={name: at_the_brink(tensor) for name, tensor in made.given.items()},
    )
    for rows in block_ms(name):
        whole = made.call(how, WgmmaPlan(rows))
        numbers, out = at_the_brink(whole.numbers), None
        if whole.scales is not None:
            out = numbers, at_the_brink(whole.scales)
        made.call(how, WgmmaPlan(rows), out=numbers if out is None else out)
        assert torch.equal(numbers.view(torch.uint8), whole.numbers.view(torch.uint8))
