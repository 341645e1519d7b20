# SPDX-License-Identifier: Apache-2.0
"""Compile the grouped kernel without a GPU, and read the machine code."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.gemm import STORE, Epilogue, Gated, GatedQuant, GemmPlan, Push
from weft.gemm.call import GemmCall
from weft.gemm.config import FP8
from weft.gemm.triton_launch import Arguments, grouped_kernel, kernel_constants

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
    gated, quant = isinstance(made[epilogue], Gated), epilogue == "quant"
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
    """Compile for sm_90a; the cubin is written to `folder`."""
    function = grouped_kernel()
    arguments = Arguments(call, plan).build(
        call.tensors, lambda t, _shape, _strides, block: (t, block)
    )
    constants = kernel_constants(call, plan)
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
