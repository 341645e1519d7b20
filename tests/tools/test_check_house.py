"""tools/check_house.py: every rule refuses what it should and lets the rest pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_house.py"

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
    "ldg": ("weft/alltoall/a.cuh", "x = __ldg(at);", "1: a non-coherent load"),
    "pickle": ("weft/a.py", "def f() -> None:\n    import pickle\n", "2: imports pickle"),
    "from pickle": ("tests/a.py", "from pickle import loads\n", "1: imports pickle"),
    "marshal": ("tools/a.py", "import marshal as m\n", "1: imports marshal"),
    "eval": ("weft/a.py", "x = eval('1')\n", "1: calls eval"),
    "exec": ("weft/a.py", "\nexec('1')\n", "2: calls exec"),
    "torch.load": ("weft/a.py", "import torch\ntorch.load('a')\n", "2: calls torch.load"),
    "from torch import load": ("weft/a.py", "from torch import load\n", "1: imports torch.load"),
    "shell": ("weft/a.py", "import subprocess as s\ns.run('ls', shell=True)\n", "2: passes shell"),
    "shell by name": ("weft/a.py", "run('ls', shell=flag)\n", "1: passes shell=flag"),
    "utils.py": ("weft/utils.py", "", "1: the name has 'utils'"),
    "a folder": ("weft/core/a.cuh", "", "1: the name has 'core'"),
    "a second version": ("weft/heap_v2.py", "", "1: the name has 'v2'"),
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
    "names of a package that is stood in for": ("tests/a/standin/b/utils/base.py", ""),
    "asm where it belongs": ("weft/device/order.cuh", 'asm volatile("nop;");'),
    "asm in a comment": ("weft/alltoall/a.cuh", "// no asm here\n/* asm\n asm */ int x;"),
    "asm in a string": ("weft/alltoall/a.cuh", 'const char* s = "asm";'),
    "include in a comment": ("weft/alltoall/a.cuh", "// #include <nccl.h>"),
    "evaluation mode": ("weft/a.py", "model.eval()\ntl.load(x)\nrun(shell=False)\n"),
    "a file just short enough": ("weft/a.py", "x = 1\n" * 349),
    "pickle between a launcher and its children": ("weft/memory/launch.py", "import pickle\n"),
    "a function just short enough": ("weft/a.py", "def f():\n" + "    x = 1\n" * 58),
    "a long test": ("tests/test_a.py", "def test_f():\n" + "    x = 1\n" * 100),
    "not a word of its own": ("weft/database.py", ""),
}


def judge(root: Path, name: str, text: str) -> tuple[int, str]:
    """The tool's exit status and output for a tree that has only this file."""
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    done = subprocess.run([sys.executable, str(TOOL), str(root)], capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, case: tuple[str, str, str]) -> None:
    name, text, wanted = case
    status, said = judge(tmp_path, name, text)
    assert said.startswith(f"{name}:{wanted}")
    assert status == 1


@pytest.mark.parametrize("case", ALLOWED.values(), ids=ALLOWED.keys())
def test_allowed(tmp_path: Path, case: tuple[str, str]) -> None:
    assert judge(tmp_path, *case) == (0, "house rules: clean\n")
