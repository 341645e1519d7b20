# SPDX-License-Identifier: Apache-2.0
"""tools/check_cpp.py: every rule refuses what breaks it and accepts the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import check_cpp
from tools.check_cpp import check

REFUSED = {
    "protocol includes kernels": (
        "weft/device/a.cuh",
        "#include <weft/alltoall/b.cuh>\n",
        "1: device/ includes <weft/alltoall/b.cuh>: it may include only device",
    ),
    "an operator includes another": (
        "weft/alltoall/a.cuh",
        "\n# include <weft/lowlatency/b.cuh>",
        "2: alltoall/",
    ),
    "quoted include": ("weft/device/a.cpp", '#include "order.cuh"', '1: includes "order.cuh"'),
    "a source": ("weft/alltoall/a.cuh", "#include <weft/device/a.cpp>", "1: includes <weft/"),
    "another library": (
        "weft/alltoall/a.cuh",
        "#include <cutlass/cutlass.h>",
        "1: includes <cut",
    ),
    "include after a comment": (
        "weft/alltoall/a.cuh",
        "/* two\nlines */ #include <nccl.h>",
        "2: includes <nccl.h>",
    ),
    "asm": ("weft/alltoall/dispatch.cuh", 'f();\nasm volatile("nop;");', "2: inline asm"),
    "asm after a string": ("weft/alltoall/a.cuh", 'f("// \\" "); asm("nop;");', "1: inline asm"),
    "a non-coherent load": (
        "weft/alltoall/copy.cuh",
        'asm("ld.global.nc.v4.u32 %0, [%1];");',
        "1: a non-coherent load",
    ),
    "layout": ("weft/device/a.cuh", "[[no_unique_address]] A a;", "1: no_unique_address: NVRTC"),
    "asm in generated source": (
        "weft/alltoall/kernels.py",
        "\nSOURCE = f'void f() {{ asm volatile(\"nop;\"); }}'\n",
        "2: inline asm",
    ),
    "a non-coherent load in generated source": (
        "weft/a.py",
        "SOURCE = 'x = __ldg(at);'",
        "1: a non-coherent load in generated source",
    ),
    "ldg": ("weft/alltoall/a.cuh", "x = __ldg(at);", "1: a non-coherent load"),
}
ALLOWED = {
    "protocol": ("weft/device/a.cuh", "#include <weft/device/b.cuh>\n#include <cstdint>\n"),
    "a header for hosts": ("weft/device/a.cpp", "#include <weft/device/b.hpp>\n"),
    "posix": ("weft/device/a.cpp", "#include <time.h>\n#include <atomic>\n"),
    "kernels": (
        "weft/alltoall/a.cuh",
        "#include <weft/device/b.cuh>\n#include <weft/alltoall/b.cuh>",
    ),
    "a test includes a source": ("tests/device/a.cpp", "#include <weft/device/b.cpp>"),
    "a program that stands alone": ("models/a/b.cu", '#include <cuda_runtime.h>\nasm("nop;");'),
    "asm where it belongs": ("weft/device/order.cuh", 'asm volatile("nop;");'),
    "asm in a comment": ("weft/alltoall/a.cuh", "// no asm here\n/* asm\n asm */ int x;"),
    "asm in a string": ("weft/alltoall/a.cuh", 'const char* s = "asm";'),
    "include in a comment": ("weft/alltoall/a.cuh", "// #include <nccl.h>"),
    "a name of asm in Python": ("weft/a.py", "why = 'inline asm'\nasm(3)\n"),
}


def judge(root: Path, name: str, text: str) -> list[str]:
    """What the tool says of a tree that has only this file."""
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return check(root)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, case: tuple[str, str, str]) -> None:
    name, text, wanted = case
    (said,) = judge(tmp_path, name, text)
    assert said.startswith(f"{name}:{wanted}")


@pytest.mark.parametrize("case", ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed(tmp_path: Path, case: tuple[str, str]) -> None:
    assert judge(tmp_path, *case) == []


def test_the_command_fails_where_a_rule_is_broken(tmp_path: Path) -> None:
    judge(tmp_path, "weft/device/a.cuh", "x = __ldg(at);")
    done = subprocess.run([sys.executable, check_cpp.__file__, str(tmp_path)], capture_output=True)
    assert done.returncode == 1
