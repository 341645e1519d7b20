# SPDX-License-Identifier: Apache-2.0
"""PTX and cubin of Hopper's kernel, without a GPU."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.gemm import STORE, Epilogue, Gated, GatedQuant, GemmPlan, Push, StoreQuant, plan
from weft.gemm.call import GemmCall
from weft.gemm.config import FP8
from weft.gemm.triton_launch import TritonArguments, build_kernel_constants, import_grouped_kernel

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
ROWS = (8, 32, 64, 128, 256)  # one for each of the default plans
SHARED, REGISTERS = 228 * 1024, 65536  # of an SM
BLOCK = 1024  # of shared memory that each CTA takes besides


TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    FP8: "fp8e4nv",
}


@dataclass(frozen=True)
class Compiled:
    ptx: str
    registers: int
    stack: int
    shared: int

    @property
    def wgmma(self) -> set[str]:
        """Return the shapes of its matrix instructions, such as m64n16k32."""
        return set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", self.ptx))


def described(
    dtype: torch.dtype,
    epilogue: str = "store",
    *,
    experts: int = 32,
    n: int = 4096,
    k: int = 7168,
    bias: bool = False,
    masked: bool = False,
    k_major: bool = False,
) -> GemmCall:
    """Return a call without memory."""

    def empty(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    rows, scaled = experts * 128, dtype == FP8
    made: dict[str, Epilogue] = {"store": STORE, "gated": Gated(), "quant": GatedQuant()}
    made["situ"] = Gated(beta=4.0, linear_beta=25.0)
    made["push"] = Push(empty(rows, of=torch.int64))
    made["relu2"] = StoreQuant("relu2")
    gated, quant = isinstance(made[epilogue], Gated), epilogue in ("quant", "relu2")
    width = n // 2 if gated else n
    out_dtype = FP8 if quant else torch.bfloat16 if scaled else dtype
    a_scale = empty(k // 128, rows).T if k_major else empty(rows, k // 128)
    return GemmCall(
        a=empty(rows, k, of=dtype),
        b=empty(experts, n, k, of=dtype),
        counts=empty(experts, of=torch.int32),
        starts=None if masked else empty(experts + 1, of=torch.int32),
        max_rows=128 if masked else rows,
        a_scale=a_scale if scaled else None,
        b_scale=empty(experts, n // 128, k // 128) if scaled else None,
        bias=empty(experts, n, of=torch.bfloat16) if bias else None,
        out=None if epilogue == "push" else empty(rows, width, of=out_dtype),
        out_scale=empty(rows, width // 128) if quant else None,
        out_dtype=out_dtype,
        epilogue=made[epilogue],
    )


def compiled(call: GemmCall, plan: GemmPlan, folder: Path) -> Compiled:
    function = import_grouped_kernel()
    arguments = TritonArguments(call, plan).build(
        call.tensors, lambda t, _shape, _strides, block: (t, block)
    )
    constants = build_kernel_constants(call, plan)
    names = function.arg_names
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(names):
        value = constants[name] if name in constants else arguments[place]
        if name in constants or value is None or (type(value) is int and value == 1):
            signature[name], fixed[(place,)] = "constexpr", value
        elif isinstance(value, tuple):
            tensor, block = value
            signature[name] = f"tensordesc<{TYPES[tensor.dtype]}{block}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=fixed, attrs=attributes)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": plan.warps, "num_stages": plan.stages},
    )
    cubin = folder / "grouped.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    result = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert result, usage.stdout
    return Compiled(made.asm["ptx"], int(result[1]), int(result[2]), made.metadata.shared)


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache, so that no test depends on another run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def chosen(rows: int, dtype: torch.dtype, epilogue: str, k: int = 7168) -> GemmPlan:
    return plan(32, rows, 4096, k, dtype, gated=epilogue in ("gated", "situ", "quant"))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("epilogue", ["store", "gated", "situ", "quant", "push", "relu2"])
@pytest.mark.parametrize("dtype", [FP8, BF16])
def test_default_plans_fit_the_sm_and_store_16_bytes(dtype, epilogue, rows, tmp_path):
    made = chosen(rows, dtype, epilogue)
    code = compiled(described(dtype, epilogue), made, tmp_path)
    narrow = made.block_m if made.swap else 128
    assert code.wgmma == {f"m64n{narrow}k{32 if dtype == FP8 else 16}"}
    assert "cp.async.bulk.tensor" in code.ptx
    fits(code, made)
    widths = stores(code)
    assert "v4.b32" in widths
    assert widths <= {"v4.b32", "b32"}, "a store of less than four bytes"
    assert ("b32" in widths) == (epilogue in ("quant", "relu2"))  # their scales


def fits(code: Compiled, made: GemmPlan) -> None:
    """Assert that nothing spills and that as many CTAs fit on an SM as the plan says."""
    assert (
        code.stack <= 88
    )  # a frame that Triton 3.7 makes with FP8 and "quant", but not 3.6 or 3.8
    assert ".local" not in code.ptx
    assert made.ctas_per_sm * (code.shared + BLOCK) <= SHARED
    assert made.ctas_per_sm * made.warps * 32 * code.registers <= REGISTERS


def stores(code: Compiled) -> set[str]:
    """Return the widths of the stores to global memory."""
    return set(re.findall(r"st\.global\.((?:v\d\.)?\w+)", code.ptx))


def test_loads_run_ahead_over_tiles(tmp_path: Path):
    made = chosen(32, FP8, "store")
    code = compiled(described(FP8), made, tmp_path)
    assert code.shared >= made.stages * (32 + 128) * 128


@pytest.mark.parametrize("k_major", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_layouts_and_odd_sizes_compile(masked: bool, k_major: bool, tmp_path: Path):
    fits(
        compiled(
            described(FP8, masked=masked, k_major=k_major), chosen(64, FP8, "store"), tmp_path
        ),
        chosen(64, FP8, "store"),
    )
    odd = described(BF16, "gated", experts=1, n=5760, k=2880, bias=True, masked=masked)
    code = compiled(odd, chosen(32, BF16, "gated"), tmp_path)
    assert "v4.b32" in stores(code)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rows_to_fp8_compile(dtype: str):
    from weft.gemm.triton_kernels import weft_quantize_rows

    source = ASTSource(
        weft_quantize_rows,
        signature={
            **{"x": f"*{dtype}", "out": "*fp8e4nv", "out_scale": "*fp32", "rows": "i32"},
            **dict.fromkeys(("K", "BLOCK_M", "PROGRAMMATIC"), "constexpr"),
        },
        constexprs={(4,): 7168, (5,): 8, (6,): True},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(3)},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert "ld.global.v4" in made.asm["ptx"]
    assert "griddepcontrol.wait" in made.asm["ptx"]
    assert ".local" not in made.asm["ptx"]


def test_the_source_agrees_with_the_oracle_in_the_interpreter():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run(
        [*command, "tests/gemm/test_grouped_gemm.py"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert re.search(r"^40 passed, ", run.stdout, re.MULTILINE), run.stdout
