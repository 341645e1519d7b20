"""Hopper's product on a CPU: clusters, copies, tensor cores and barriers, in orders by chance.

The tensor cores' last bits are theirs; those that the GPU tests compare are not looked at here.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gemm.cases import SENTINEL, Case, Made, Output, gated
from tests.gemm.emulate import (
    AT_ANY_TIME,
    AT_ONCE,
    LATE,
    EmulatedProducts,
    compile_products,
    tensor_map,
)
from tests.recorded import reads
from weft.gemm import STORE, Epilogue, Gated, GatedQuant, Push, WgmmaPlan, hopper, reference
from weft.gemm.hopper import Kind
from weft.gemm.plan import FP8

pytestmark = [pytest.mark.usefixtures("one_thread"), reads("tests/emulator/*.hpp")]
BF16 = torch.bfloat16

# Odd steps of k, scales as vectors and one by one, rows up to the last of the tensor; of two bytes
# a number: steps and tiles that end beyond the tensor.
CASES = {
    "contiguous": Case(counts=(5, 0, 130, 1, 170), n=512, k=384),
    "masked": Case(counts=(17, 0, 3, 129), n=512, k=128, masked=True),
    "packed": Case(counts=(3, 1, 7, 0, 200), align=1, slack=0, n=256, k=512),
    "nobody": Case(counts=(0, 0, 0), n=256, k=128),
    "k-major": Case(counts=(40, 9), k_major=True, n=256, k=512),
    "k-major, masked": Case(counts=(40, 9), k_major=True, masked=True, n=256, k=512),
    "many experts": Case(counts=tuple(e % 5 for e in range(70)), n=256, k=128),
    "tall": Case(counts=(97, 128, 129, 192, 257, 300), n=256, k=640),
    "bf16": Case(BF16, counts=(5, 0, 130, 1, 64), n=272, k=200, bias=True),
    "bf16, high": Case(BF16, counts=(150, 257, 192, 48), n=256, k=320),
    "fp16, masked": Case(torch.float16, counts=(17, 0, 3, 200), n=512, k=64, masked=True),
}
HEIGHTS = {"contiguous": (32, 256), "tall": (96, 128, 256), "packed": (64, 160)}
HEIGHTS |= {"bf16": (32, 256), "bf16, high": (128, 192)}
FEW = (32,)
EPILOGUES: dict[str, Epilogue] = {
    "store": STORE,
    "gated": GatedQuant(),
    "limited": GatedQuant(1.702, 1.0, 0.7),
}
HALVES = {BF16: "bf16", torch.float16: "fp16"}
SETTLED = ("nobody", "tall", "bf16", "k-major")


def heights(name: str) -> tuple[int, ...]:
    return HEIGHTS.get(name, FEW)


def all_kinds() -> Iterator[Kind]:
    for name in CASES:
        for kind in kinds_of(name):
            yield kind
            if name in SETTLED:
                yield replace(kind, settled=True)


def kinds_of(name: str) -> Iterator[Kind]:
    case = CASES[name]
    for rows in heights(name):
        sizes = (len(case.counts), case.n, case.k, WgmmaPlan(rows))
        if word := HALVES.get(case.dtype):
            for finish in ("store", "gated", "push"):
                yield Kind(*sizes, finish, word, word, "bf16" if case.bias else "none")
            continue
        yield Kind(*sizes, "store")
        yield Kind(*sizes, "gated_fp8")
        if name == "contiguous":
            yield Kind(*sizes, "push", "bf16")
            yield Kind(*sizes, "push", "fp16")
            yield Kind(*sizes, "push", "bf16", tells=True)


def of(case: Case, name: str) -> tuple[Epilogue, float]:
    """An epilogue of EPILOGUES for a case's dtype, and how near its result must be."""
    how = EPILOGUES[name]
    if not isinstance(how, GatedQuant):
        return how, 2.0**-7
    if case.dtype == FP8:
        return how, 0.08
    return Gated(how.alpha, how.offset, how.limit), 2.0**-6


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> EmulatedProducts:
    kinds = tuple(dict.fromkeys(all_kinds()))
    folder = tmp_path_factory.mktemp("products") / "tree"
    return EmulatedProducts(ctypes.CDLL(str(compile_products(kinds, folder))), kinds)


@pytest.fixture
def products(library: EmulatedProducts, monkeypatch: pytest.MonkeyPatch) -> EmulatedProducts:
    """Calls with a WgmmaPlan and tensors of the CPU are emulated."""
    mine = replace(library)
    monkeypatch.setattr(reference, "compute", mine.compute)
    monkeypatch.setattr(hopper, "tensor_map", tensor_map)
    return mine


def same_bits(ours: Output, theirs: Output) -> bool:
    pairs = [(ours.numbers, theirs.numbers)]
    if ours.scales is not None and theirs.scales is not None:
        pairs.append((ours.scales, theirs.scales))
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_oracle(products: EmulatedProducts, name: str, epilogue: str):
    made, (how, tolerance) = CASES[name].make(), of(CASES[name], epilogue)
    wanted = made.product()
    if isinstance(how, Gated):
        wanted = gated(how, wanted)
    for products.seed, rows in enumerate(heights(name)):
        products.policy = (products.seed + len(epilogue)) % 3
        made.call(how, WgmmaPlan(rows)).agrees(wanted, tolerance)


def in_integers(case: Case) -> Made:
    """Operands whose products are exact in fp32, in any order of sums."""
    made, seed = case.make(), torch.Generator().manual_seed(3)
    live = case.live().view(made.a.shape[:-1])

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randint(-3, 4, like.shape, generator=seed).to(like.dtype)

    a = made.a.clone()
    a[live] = draw(made.a)[live]
    if case.dtype != FP8:
        if case.bias:
            made.given["bias"].copy_(draw(made.given["bias"]))
        return replace(made, a=a, b=draw(made.b))
    for name in ("a_scale", "b_scale"):
        powers = torch.exp2(torch.randint(-3, 1, made.given[name].shape, generator=seed).float())
        kept = made.given[name].isnan()
        made.given[name].copy_(torch.where(kept, torch.nan, powers))
    return replace(made, a=a, b=draw(made.b))


@pytest.mark.parametrize("policy", [LATE, AT_ONCE, AT_ANY_TIME])
@pytest.mark.parametrize("name", ["contiguous", "masked", "tall", "bf16", "bf16, high"])
def test_integers_are_exact(products: EmulatedProducts, name: str, policy: int):
    case = CASES[name]
    made, live = in_integers(case), case.live()
    wanted = made.product()[live].to(BF16 if case.dtype == FP8 else case.dtype)
    products.policy = policy
    for rows in heights(name):
        got = made.call(STORE, WgmmaPlan(rows)).numbers.reshape(case.rows, -1)
        assert torch.equal(got[live], wanted)
        assert bool((got[~live] == SENTINEL).all())


@pytest.mark.parametrize("name", ["contiguous", "bf16"])
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_counts_are_served(products: EmulatedProducts, name: str, data: st.DataObject):
    """Borders of tiles are where the counts are drawn from, too."""
    edges = [0, 1, 15, 16, 17, 32, 33, 64, 127, 128, 129, 160, 161, 256, 257, 288, 289, 544, 545]
    size = len(CASES[name].counts)
    drawn = st.lists(st.sampled_from(edges) | st.integers(0, 300), min_size=size, max_size=size)
    counts = data.draw(drawn)
    case = replace(CASES[name], counts=tuple(counts), align=1)
    rows = data.draw(st.sampled_from(heights(name)))
    products.seed, products.policy = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 2))
    products.sms = data.draw(st.sampled_from((2, 4, 6)))
    made, live = in_integers(case), case.live()
    got = made.call(STORE, WgmmaPlan(rows)).numbers.reshape(case.rows, -1)
    assert torch.equal(got[live], made.product()[live].to(BF16))
    assert bool((got[~live] == SENTINEL).all())


@pytest.mark.parametrize("epilogue", ["store", "gated"])
@pytest.mark.parametrize("name", SETTLED)
def test_weights_may_come_before_the_kernel_in_front_ends(
    products: EmulatedProducts, name: str, epilogue: str
):
    """Rows, scales and homes hold NaN until that end, which comes at any time."""
    made, (how, _) = CASES[name].make(), of(CASES[name], epilogue)
    for rows in heights(name):
        plain = made.call(how, WgmmaPlan(rows))
        for seed in range(6):
            products.seed, products.policy, products.sms = seed, seed % 3, (2, 4)[seed % 2]
            got = made.call(how, WgmmaPlan(rows), settled=True, programmatic_launch=True)
            assert same_bits(got, plain), (rows, seed)


@pytest.mark.parametrize("epilogue", ["store", "gated"])
@pytest.mark.parametrize("name", ["contiguous", "bf16"])
def test_no_order_changes_a_bit(products: EmulatedProducts, name: str, epilogue: str):
    """One cluster makes low and high tiles in turn, or several share them."""
    made, (how, _) = CASES[name].make(), of(CASES[name], epilogue)
    plan = WgmmaPlan(256)
    first = made.call(how, plan)
    for seed in range(9):
        products.seed, products.policy, products.sms = seed, seed % 3, (2, 4, 12)[seed // 3]
        assert same_bits(made.call(how, plan), first), seed


@pytest.mark.parametrize("rows", HEIGHTS["contiguous"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("contiguous", BF16), ("contiguous", torch.float16), ("bf16", BF16)]
)
def test_rows_go_home_or_nowhere(
    products: EmulatedProducts, name: str, rows: int, dtype: torch.dtype
):
    case = CASES[name]
    made, plan = case.make(), WgmmaPlan(rows)
    whole = made.call(STORE, plan).numbers.reshape(case.rows, case.n)
    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(1))
    for policy in (LATE, AT_ANY_TIME):
        products.policy = policy
        there = torch.full((case.rows, case.n), SENTINEL, dtype=dtype)
        home = there.data_ptr() + order * (case.n * 2)
        nowhere = torch.arange(case.rows) % 7 == 3
        home[nowhere] = 0
        made.call(Push(home, dtype), plan)
        live, stored = case.live() & ~nowhere, there[order]
        near = torch.allclose(stored[live].float(), whole[live].float(), rtol=2.0**-7, atol=0.02)
        assert near if dtype == torch.float16 else torch.equal(stored[live], whole[live])
        assert bool((stored[~live] == SENTINEL).all())


@pytest.mark.parametrize("rows", HEIGHTS["contiguous"])
@pytest.mark.parametrize("broken", [0, 5])
def test_rows_that_tell_of_themselves_go_home_unless_the_group_is_broken(
    products: EmulatedProducts, rows: int, broken: int
):
    """A NaN of the result is not a word of all ones, which is what an owner waits to see go."""
    case, plan = CASES["contiguous"], WgmmaPlan(rows)
    made = case.make()
    made.a.view(torch.uint8)[case.live().nonzero()[0]] = 0x7F  # NaN
    whole = made.call(STORE, plan).numbers.reshape(case.rows, case.n)
    there = torch.full((case.rows, case.n // 2), -1, dtype=torch.int32)
    home = there.data_ptr() + torch.arange(case.rows) * (case.n * 2)
    unless = torch.tensor([broken], dtype=torch.int32)
    made.call(Push(home, BF16, tells=True, unless=unless), plan)
    came = case.live() & (broken == 0)
    assert torch.equal(there[came], whole.view(torch.int32)[came])
    assert bool(whole[came].isnan().any()) == (broken == 0)
    assert bool((there[came] != -1).all())
    assert bool((there[~came] == -1).all())


@pytest.mark.parametrize("rows", [32, 256])
def test_counts_and_starts_that_lie_touch_no_row_of_others(products: EmulatedProducts, rows: int):
    """Counts below zero and beyond the rows, starts outside: as many rows as there are, or none."""
    case, plan = CASES["contiguous"], WgmmaPlan(rows)
    made, starts, total = case.make(), case.starts, case.rows
    honest = made.call(plan=plan).numbers
    lying = with_given(
        made, counts=[-5, -(2**31), 2**31 - 1, 1, 30], offsets=[*starts[:3], -7, total]
    )
    got = lying.call(plan=plan).numbers
    assert bool((got[: starts[2]] == SENTINEL).all())
    assert torch.equal(got[starts[2] :][:130], honest[starts[2] :][:130])
    starts = [total, total + 9, 2**30, -(2**31), 2**31 - 1]
    beyond = with_given(made, counts=[40, 9, 20, 30, 2**31 - 1], offsets=starts)
    assert bool((beyond.call(plan=plan).numbers == SENTINEL).all())


def with_given(made: Made, **numbers: list[int]) -> Made:
    changed = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
    return replace(made, given=made.given | changed)


def test_damage_stays_in_its_row(products: EmulatedProducts):
    made, plan = CASES["tall"].make(), WgmmaPlan(256)
    clean = made.call(GatedQuant(), plan)
    made.given["a_scale"][5, 1] = torch.nan
    made.given["a_scale"][500, 0] = torch.inf
    got = made.call(GatedQuant(), plan)
    assert got.scales is not None
    assert clean.scales is not None
    assert bool(got.scales[[5, 500]].isnan().all())
    got.scales[[5, 500]], got.numbers[[5, 500]] = clean.scales[[5, 500]], clean.numbers[[5, 500]]
    assert same_bits(got, clean)


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
@pytest.mark.parametrize("name", ["contiguous", "packed", "bf16"])
def test_nothing_is_touched_behind_its_end(products: EmulatedProducts, name: str, epilogue: str):
    case, (how, _) = CASES[name], of(CASES[name], epilogue)
    made = case.make()
    made = replace(
        made,
        a=at_the_brink(made.a),
        b=at_the_brink(made.b),
        given={name: at_the_brink(tensor) for name, tensor in made.given.items()},
    )
    for rows in heights(name):
        whole = made.call(how, WgmmaPlan(rows))
        numbers, out = at_the_brink(whole.numbers), None
        if whole.scales is not None:
            out = numbers, at_the_brink(whole.scales)
        made.call(how, WgmmaPlan(rows), out=numbers if out is None else out)
        assert torch.equal(numbers.view(torch.uint8), whole.numbers.view(torch.uint8))
