# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM compared with an oracle: the reference on a CPU, and Triton's kernel.

The kernel runs on GPUs, and on CPU tensors in Triton's interpreter, for which TRITON_INTERPRET must
be 1 before Triton is imported: test_compile.py starts this file once more with it. The interpreter
has no bfloat16.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.gemm.cases import CASES, LARGE, UNTOUCHED, Case, CaseTensors, Output, applied
from weft.gemm import (
    STORE,
    Epilogue,
    Gated,
    GatedQuant,
    GemmPlan,
    Push,
    Store,
    StoreQuant,
    WgmmaPlan,
    grouped_gemm,
    plan,
    reference,
)
from weft.gemm.call import QUANTISING, GemmCall
from weft.gemm.config import FP8
from weft.moe.models import CLAMPED_SWIGLU, SWIGLU, Gating
from weft.reference import quantize

BF16, HALF = torch.bfloat16, torch.float16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOST = "interpreter" if INTERPRETED else "reference"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [FP8, HALF] if INTERPRETED else [FP8, BF16, HALF]
GATINGS = [Gated(), Gated(1.702, 1.0, 0.7), Gated(limit=0.5), Gated(beta=0.5, linear_beta=3.0)]
UNGATED = [STORE, Store("relu2"), StoreQuant("relu2")]
SMALL = {
    "contiguous": Case(counts=(5, 0, 35)),
    "masked": Case(masked=True, counts=(17, 0, 3)),
    "packed": Case(align=1, slack=0, counts=(3, 1, 7, 0, 2)),
    "one expert": Case(counts=(70,)),
    "no rows": Case(counts=(0, 0)),
    "bias": Case(bias=True, counts=(1, 2)),
    "k-major": Case(k_major=True),
    "k-major, masked": Case(k_major=True, masked=True),
}
ON_GPU = {name: case for name, case in (CASES | LARGE).items() if case.dtype == FP8}
ON_GPU["bias"] = Case(counts=(33, 2), bias=True, n=512)

pytestmark = pytest.mark.filterwarnings(
    # NaN in rows of no expert.
    *(["ignore::RuntimeWarning"] if INTERPRETED else [])
)
on_each = pytest.mark.parametrize("device", [HOST, CUDA])
by_kernel = pytest.mark.parametrize("device", [*([HOST] if INTERPRETED else []), CUDA])
by_reference = pytest.mark.skipif(INTERPRETED, reason="of the reference alone")


def make(case: Case, device: str) -> CaseTensors:
    return case.make("cuda" if device == "cuda" else "cpu")


def tiles(device: str, dtype: torch.dtype, *, gating: bool) -> list[GemmPlan | None]:
    """Return a plan of each kind; results must not depend on it."""
    block_k, block_n = 128 if dtype == FP8 else 64, 256 if gating else 128
    few = GemmPlan(16, block_n, block_k, swap=True, stages=3)
    many = GemmPlan(128, 256, block_k, stages=3, warps=8)
    if device != "cuda":
        return [few, GemmPlan(64, 256, block_k)] if INTERPRETED else [None]
    return [
        few,
        replace(few, block_m=32, flatten=False),
        replace(few, block_m=64, ctas_per_sm=2),
        GemmPlan(64, block_n, block_k, stages=3, ctas_per_sm=2),
        many,
        replace(many, flatten=False),
        GemmPlan(64, block_n, block_k, stages=3, flatten=False),
    ]


@contextmanager
def kernel(device: str) -> Iterator[None]:
    """Let calls on CPU tensors run the kernel in the interpreter, three CTAs in turn."""
    if device != "interpreter":
        yield
        return
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    from weft.gemm.triton_launch import (
        TritonArguments,
        build_kernel_constants,
        import_grouped_kernel,
    )

    patch_tensor, convert_float = interpreter._patch_lang_tensor, interpreter._convert_float

    def patched(tensor: Any, scope: Any) -> None:
        """Patch ranges: numpy 2.4 no longer converts an array of one number to an integer."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def converted(numbers: Any, of: Any, to: Any, mode: Any) -> Any:
        """Patch the interpreter's rounding to e4m3, which loses a carry into the exponent."""
        if str(to) != "fp8e4nv":
            return convert_float(numbers, of, to, mode)
        return torch.from_numpy(numbers.copy()).to(FP8).view(torch.uint8).numpy()

    def interpret(call: GemmCall, plan: GemmPlan | WgmmaPlan) -> None:
        assert isinstance(plan, GemmPlan)
        arguments = TritonArguments(call, plan).build(call.tensors, TensorDescriptor)
        import_grouped_kernel()[(3,)](*arguments, **build_kernel_constants(call, plan))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        patch.setattr(interpreter, "_convert_float", converted)
        patch.setattr(reference, "run_reference", interpret)
        yield


def agreed(
    made: CaseTensors, wanted: torch.Tensor, epilogue: Epilogue, tile: GemmPlan | None, device: str
) -> Output:
    """Return the result of a call after comparing it with the oracle."""
    with kernel(device):
        out = made.call(epilogue, tile, num_sms=5 if device == "cuda" else None)
    wanted = applied(epilogue, wanted)
    # FP8 tensor cores leave out about 2^-13 of a sum, which a gate multiplies.
    coarse = epilogue != STORE and device == "cuda"
    out.agrees(wanted, 0.08 if isinstance(epilogue, QUANTISING) else 2.0 ** (-6 if coarse else -7))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", [*UNGATED, GatedQuant(), *GATINGS], ids=repr)
@on_each
def test_every_tile_gives_the_same_bits(device: str, epilogue: Epilogue, dtype: torch.dtype):
    case = CASES["contiguous"] if device == "cuda" else Case(n=512, bias=True)
    made = make(replace(case, dtype=dtype), device)
    expected, first = made.oracle(), None
    for tile in tiles(device, dtype, gating=isinstance(epilogue, Gated)):
        got = agreed(made, expected, epilogue, tile, device)
        first = first or got
        assert device != "cuda" or got.same_bits(first), tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("device", "name"),
    [*((HOST, name) for name in SMALL)]
    + [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ON_GPU],
)
def test_layouts(device: str, name: str, dtype: torch.dtype):
    made = make(replace((ON_GPU if device == "cuda" else SMALL)[name], dtype=dtype), device)
    expected = made.oracle()
    if device != "cuda":
        for tile in tiles(device, dtype, gating=False):
            agreed(made, expected, STORE, tile, device)
        return
    for rows in (16, 128):
        for epilogue in (STORE, GatedQuant()) if dtype == FP8 else (STORE,):
            chosen = plan(4, rows, 512, 1024, dtype, gated=epilogue is not STORE)
            agreed(made, expected, epilogue, chosen, device)


@by_kernel
@pytest.mark.parametrize(
    "epilogue", [GatedQuant(alpha=0.0, offset=0.5), StoreQuant("relu2")], ids=["gated", "relu2"]
)
def test_quantising_has_the_bits_of_the_reference(device: str, epilogue: Epilogue):
    """With integers, and alpha 0, all earlier steps are exact."""
    dtype = HALF if INTERPRETED else BF16
    made = make(Case(counts=(150 if device == "cuda" else 16,), n=512, dtype=dtype), device)
    made.a.copy_(torch.randint(-3, 4, made.a.shape))
    made.b.copy_(torch.randint(-3, 4, made.b.shape))
    made.b[:, :128] = 0  # a block of zeros
    made.a[3, 0], made.a[5, 0] = torch.nan, torch.inf  # rows that are broken
    inputs = {name: tensor.cpu() for name, tensor in made.given.items()}
    theirs = CaseTensors(made.case, made.a.cpu(), made.b.cpu(), inputs).call(epilogue)
    assert theirs.scales is not None
    assert bool(theirs.scales[[3, 5]].isnan().all())
    assert bool((theirs.scales[:3, 0] == 0).all())
    for tile in tiles(device, dtype, gating=isinstance(epilogue, Gated)):
        with kernel(device):
            ours = made.call(epilogue, tile)
        assert ours.scales is not None
        assert torch.equal(ours.scales.cpu().nan_to_num(-1), theirs.scales.nan_to_num(-1))
        assert torch.equal(ours.read().nan_to_num(-1), theirs.read().nan_to_num(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@on_each
def test_rows_are_pushed_to_their_dst_addr(device: str, masked: bool, dtype: torch.dtype):
    case = Case(counts=(40, 0, 19), n=512) if device == "cuda" else Case()
    made = make(replace(case, masked=masked, dtype=dtype), device)
    with kernel(device):
        for tile in tiles(device, dtype, gating=False):
            expected = made.call(plan=tile).numbers.reshape(made.case.rows, -1)
            stored, received = made.pushed(tile)
            assert torch.equal(stored[received], expected[received])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != FP8])
@on_each
def test_odd_n_and_k(device: str, dtype: torch.dtype):
    made = make(Case(counts=(70, 3), n=208, k=200, dtype=dtype, bias=True), device)
    for epilogue in (STORE, Gated()):
        for tile in tiles(device, dtype, gating=epilogue is not STORE):
            agreed(made, made.oracle(), epilogue, tile, device)


@on_each
def test_counts_are_clamped_to_the_rows(device: str):
    made = make(Case(masked=True, counts=(4, 2), slack=0, dtype=DTYPES[1]), device)
    for tile in tiles(device, DTYPES[1], gating=False):
        with kernel(device):
            whole = made.call(plan=tile).numbers
            made.given["counts"].copy_(torch.tensor([1000, 0]))
            got = made.call(plan=tile).numbers
            made.given["counts"].copy_(torch.tensor([4, 2]))
        assert torch.equal(got[0], whole[0])
        assert bool((got[1] == UNTOUCHED).all())


@by_reference
def test_gating_parameters_equal_the_layers() -> None:
    y = torch.randn(7, 64) * 5
    for theirs in (SWIGLU, CLAMPED_SWIGLU, Gating(beta=0.5, linear_beta=3.0)):
        ours = reference.apply_gating(Gated(**asdict(theirs)), y)
        torch.testing.assert_close(ours, theirs.apply(y.clone()), rtol=1e-6, atol=1e-6)


@by_reference
def test_quantised_gating_has_the_bits_of_the_quantiser() -> None:
    made = Case(counts=(6, 0, 3), n=512).make()
    live = made.case.live()
    wide = torch.full((made.case.rows, 256), torch.nan)
    grouped_gemm(made.a, made.b, epilogue=Gated(), out=wide, **made.given)
    numbers, scales = quantize(wide[live], "fp8")
    got = made.call(GatedQuant())
    assert got.scales is not None
    assert torch.equal(got.numbers[live].view(torch.uint8), numbers.view(torch.uint8))
    assert torch.equal(got.scales[live], scales)


@by_reference
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("aborted", [0, 1])
def test_rows_with_flag_in_data_have_no_sentinel(dtype: torch.dtype, aborted: int) -> None:
    """A NaN of all ones loses its sign bit; with the abort flag set, nothing is stored."""
    made = Case(counts=(3, 2), dtype=BF16, n=256).make()
    case, live = made.case, made.case.live()
    made.a.view(torch.int16)[live.nonzero()[0]] = -1  # a NaN of all ones
    stored = made.call().numbers.reshape(case.rows, -1)
    remote = torch.full((case.rows, case.n), -1.0).to(dtype)
    remote.view(torch.int32).fill_(-1)
    dst_addr = remote.data_ptr() + torch.arange(case.rows) * case.n * remote.element_size()
    dst_addr[live.nonzero()[1]] = 0
    abort_flag = torch.tensor([aborted], dtype=torch.int32)
    made.call(Push(dst_addr, dtype, flag_in_data=True, abort_flag=abort_flag))
    received = live & (dst_addr != 0) & (aborted == 0)
    words = remote.view(torch.int32)
    assert bool((words[received] != -1).all())
    assert bool((words[~received] == -1).all())
    assert torch.equal(remote[received].isnan(), stored[received].isnan())
    kept, expected = remote[received].float(), stored[received].float()
    torch.testing.assert_close(kept, expected, rtol=2.0**-7, atol=0.02, equal_nan=True)


@by_reference
def test_results_may_be_of_any_width() -> None:
    made = Case(dtype=HALF).make()
    for dtype in (torch.float32, BF16, HALF):
        out = torch.full((made.case.rows, made.case.n), UNTOUCHED, dtype=dtype)
        assert grouped_gemm(made.a, made.b, out=out, **made.given) is out
        assert torch.equal(out[~made.case.live()].float().unique(), torch.tensor([UNTOUCHED]))
    assert grouped_gemm(made.a, made.b, **made.given).dtype == HALF  # type: ignore[union-attr]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("device", [*([] if INTERPRETED else [HOST]), CUDA])
def test_no_experts_or_rows_give_empty_results(device: str, masked: bool):
    where = "cuda" if device == "cuda" else "cpu"
    for experts in (0, 3):
        shape = (experts, 0, 128) if masked else (0, 128)
        a = torch.empty(shape, dtype=BF16, device=where)
        b = torch.empty((experts, 256, 128), dtype=BF16, device=where)
        counts = torch.zeros(experts, dtype=torch.int32, device=where)
        offsets = None if masked else torch.zeros(experts + 1, dtype=torch.int32, device=where)
        out = grouped_gemm(a, b, counts=counts, offsets=offsets)
        assert isinstance(out, torch.Tensor)
        assert out.shape == (*shape[:-1], 256)


@pytest.mark.gpu
def test_a_rows_bits_do_not_depend_on_its_neighbours():
    many = Case(counts=(130,), n=512, k=1024).make("cuda")
    whole = many.call().numbers
    for count in (1, 33, 100):
        many.given["counts"].fill_(count)
        for tile in tiles("cuda", FP8, gating=False):
            part = many.call(plan=tile).numbers
            assert torch.equal(part[:count], whole[:count])


@pytest.mark.gpu
def test_results_beyond_two_to_the_31():
    rows, n = 300_000, 8192
    a = torch.ones(rows, 128, device="cuda", dtype=BF16)
    a[-1] = 2
    b = torch.ones(1, n, 128, device="cuda", dtype=BF16)
    counts = torch.tensor([rows], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0], dtype=torch.int32, device="cuda")
    out = grouped_gemm(a, b, counts=counts, offsets=offsets)
    assert isinstance(out, torch.Tensor)
    assert out[:-1].amin().item() == out[:-1].amax().item() == 128
    assert out[-1].amin().item() == 256
