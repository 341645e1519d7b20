# SPDX-License-Identifier: Apache-2.0
"""The kernel's own source, run by Triton's interpreter on CPU tensors, against the oracle.

A script of its own, because TRITON_INTERPRET must be 1 before Triton is imported. Prints a line for
each case that agreed. The interpreter has no bfloat16: float16 stands for both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.gemm.cases import UNTOUCHED, Case, gated
from weft.gemm import (
    STORE,
    Epilogue,
    Gated,
    GatedQuant,
    GemmPlan,
    WgmmaPlan,
    reference,
)
from weft.gemm.call import GemmCall
from weft.gemm.config import FP8
from weft.gemm.triton_launch import Arguments, grouped_kernel, kernel_constants

HALF = torch.float16
CASES = {
    "contiguous": Case(counts=(5, 0, 35)),
    "masked": Case(masked=True, counts=(17, 0, 3)),
    "bias": Case(bias=True, counts=(1, 2)),
    "one expert": Case(counts=(70,)),
    "no rows": Case(counts=(0, 0, 0)),
    "k-major, masked": Case(k_major=True, masked=True),
}
ODD = Case(dtype=HALF, n=1000, k=200)  # neither columns nor k fill their last block


def plans(dtype: torch.dtype, gating: bool) -> list[GemmPlan]:
    """A tile of each kind."""
    block_k = 128 if dtype == FP8 else 64
    few = GemmPlan(16, 256 if gating else 128, block_k, swap=True, stages=2)
    return [few, GemmPlan(64, 256, block_k)]


def interpret(call: GemmCall, plan: GemmPlan | WgmmaPlan) -> None:
    """`launch`, with three CTAs one after the other."""
    assert isinstance(plan, GemmPlan)
    arguments = Arguments(call, plan).build(call.tensors, TensorDescriptor)
    grouped_kernel()[(3,)](*arguments, **kernel_constants(call, plan))


@contextmanager
def interpreting() -> Iterator[None]:
    """Calls go to the interpreter, not to the reference."""
    compute = reference.compute
    reference.compute = interpret
    yield
    reference.compute = compute


def agreed(case: Case, epilogue: Epilogue, plan: GemmPlan) -> None:
    """A call's numbers are the oracle's, and so are the reference's."""
    made = case.make()
    wanted = gated(epilogue, made.oracle()) if isinstance(epilogue, Gated) else made.oracle()
    tolerance = 0.08 if isinstance(epilogue, GatedQuant) else 2.0**-7
    made.call(epilogue, plan).agrees(wanted, tolerance)
    with interpreting():
        made.call(epilogue, plan).agrees(wanted, tolerance)


def pushed(case: Case, plan: GemmPlan) -> None:
    """Rows arrive at their dst_addr."""
    made = case.make()
    with interpreting():
        wanted = made.call(STORE, plan).numbers.reshape(case.rows, -1)
        stored, came = made.pushed(plan)
    assert torch.equal(stored[came], wanted[came])


def held() -> None:
    """A count above the rows there are counts as those."""
    made = Case(masked=True, counts=(4, 2), slack=0, dtype=HALF).make()
    whole = made.call().numbers
    made.given["counts"].copy_(torch.tensor([1000, 0]))
    with interpreting():
        got = made.call(plan=GemmPlan(16, block_k=64, swap=True)).numbers
    torch.testing.assert_close(got[0], whole[0])
    assert bool((got[1] == UNTOUCHED).all())


def exact_quantising() -> None:
    """Integers and alpha 0 make everything before the quantiser exact: its bits must be equal."""
    made = Case(counts=(16,), n=512, dtype=HALF).make()
    made.a.copy_(torch.randint(-3, 4, made.a.shape))
    made.b.copy_(torch.randint(-3, 4, made.b.shape))
    made.b[:, :128] = 0  # a block of zeros
    made.a[3, 0] = torch.nan  # rows that are broken
    made.a[5, 0] = torch.inf
    gating = GatedQuant(alpha=0.0, offset=0.5)
    theirs = made.call(gating)
    with interpreting():
        ours = made.call(gating, GemmPlan(16, 256, 64, swap=True))
    assert theirs.scales is not None
    assert ours.scales is not None
    assert torch.equal(ours.scales.nan_to_num(-1), theirs.scales.nan_to_num(-1))
    assert torch.equal(ours.read().nan_to_num(-1), theirs.read().nan_to_num(-1))
    assert bool(theirs.scales[[3, 5]].isnan().all())
    assert bool((theirs.scales[:3, 0] == 0).all())


def patched_index(original: Any) -> Any:
    """numpy 2.4 no longer turns an array of one number into an integer, which ranges ask for."""

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def patched_rounding(original: Any) -> Any:
    """Rounding to e4m3 that carries into the exponent, which the interpreter's loses."""

    def convert(numbers: Any, of: Any, to: Any, mode: Any) -> Any:
        if str(to) != "fp8e4nv":
            return original(numbers, of, to, mode)
        return torch.from_numpy(numbers.copy()).to(FP8).view(torch.uint8).numpy()

    return convert


def main() -> None:
    """Every case with every kind of tile and epilogue."""
    interpreter._patch_lang_tensor = patched_index(interpreter._patch_lang_tensor)
    interpreter._convert_float = patched_rounding(interpreter._convert_float)
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # NaN rows of no expert
    for dtype in (FP8, HALF):
        for name, case in CASES.items():
            for plan in plans(dtype, gating=False):
                agreed(replace(case, dtype=dtype), STORE, plan)
            print(f"agreed: {name}, {dtype}", flush=True)
        for gating in (Gated(), Gated(1.702, 1.0, 0.7), Gated(beta=0.5, linear_beta=3.0)):
            for plan in plans(dtype, gating=True):
                agreed(Case(dtype=dtype, n=512, bias=True), gating, plan)
        print(f"agreed: gated, {dtype}", flush=True)
    for plan in plans(FP8, gating=True):
        agreed(Case(n=512), GatedQuant(), plan)
    exact_quantising()
    print("agreed: quantised", flush=True)
    for plan in plans(HALF, gating=False):
        agreed(ODD, STORE, plan)
        pushed(Case(dtype=HALF), plan)
    agreed(replace(ODD, n=208), Gated(), plans(HALF, gating=True)[0])
    held()
    print("agreed: odd and pushed", flush=True)


if __name__ == "__main__":
    main()
