# SPDX-License-Identifier: Apache-2.0
"""tools/check_cpp.py: every rule refuses its violations and accepts the rest."""

from pathlib import Path

import pytest

from tools.check_cpp import check

KERNELS, DEVICE = "weft/alltoall/a.cuh", "weft/device/a.cuh"
REFUSED = [
    (DEVICE, "#include <weft/alltoall/b.cuh>\n",
     "1: device/ includes <weft/alltoall/b.cuh>: it may include only device"),
    (KERNELS, "\n# include <weft/lowlatency/b.cuh>", "2: alltoall/"),
    ("weft/device/a.cpp", '#include "order.cuh"', '1: includes "order.cuh"'),
    (KERNELS, "#include <weft/device/a.cpp>", "1: includes <weft/"),
    (KERNELS, "#include <cutlass/cutlass.h>", "1: includes <cut"),
    (KERNELS, "/* two\nlines */ #include <nccl.h>", "2: includes <nccl.h>"),
    (KERNELS, 'f();\nasm volatile("nop;");', "2: inline asm"),
    (KERNELS, 'f("// \\" "); asm("nop;");', "1: inline asm"),
    (KERNELS, 'asm("ld.global.nc.v4.u32 %0, [%1];");', "1: a non-coherent load"),
    (KERNELS, "x = __ldg(at);", "1: a non-coherent load"),
    (DEVICE, "[[no_unique_address]] A a;", "1: no_unique_address: NVRTC"),
    ("weft/alltoall/kernels.py", "\nSOURCE = f'void f() {{ asm volatile(\"nop;\"); }}'\n",
     "2: inline asm"),
    ("weft/a.py", "SOURCE = 'x = __ldg(at);'", "1: a non-coherent load in generated source"),
]  # fmt: skip
ALLOWED = [
    (DEVICE, "#include <weft/device/b.cuh>\n#include <cstdint>\n"),
    ("weft/device/a.cpp", "#include <weft/device/b.hpp>\n#include <time.h>\n#include <atomic>\n"),
    (KERNELS, "#include <weft/device/b.cuh>\n#include <weft/alltoall/b.cuh>"),
    ("tests/device/a.cpp", "#include <weft/device/b.cpp>"),
    ("models/a/b.cu", '#include <cuda_runtime.h>\nasm("nop;");'),  # a program that stands alone
    ("weft/device/order.cuh", 'asm volatile("nop;");'),  # where it belongs
    (KERNELS, "// no asm here\n/* asm\n asm */ int x;"),
    (KERNELS, 'const char* s = "asm";'),
    (KERNELS, "// #include <nccl.h>"),
    ("weft/a.py", "why = 'inline asm'\nasm(3)\n"),
]


def judge(root: Path, name: str, text: str) -> list[str]:
    """Return the errors of a tree with only this file."""
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return check(root)


@pytest.mark.parametrize(("name", "text", "error"), REFUSED)
def test_refused(tmp_path: Path, name: str, text: str, error: str) -> None:
    (result,) = judge(tmp_path, name, text)
    assert result.startswith(f"{name}:{error}")


def test_allowed(tmp_path: Path) -> None:
    for number, (name, text) in enumerate(ALLOWED):
        assert judge(tmp_path / str(number), name, text) == []
