# SPDX-License-Identifier: Apache-2.0
"""The kernels of the fused all-reduce compile everywhere, and keep their rows in registers."""

from __future__ import annotations

import pytest

from tests.emulator.machine_code import frames
from weft.allreduce.config import ReduceConfig
from weft.allreduce.kernels import KERNELS, MOE, cuda_program

pytestmark = pytest.mark.slow

REDUCTIONS = {
    "8 ranks": ReduceConfig(8, 2048, 32, 7168, "bf16"),
    "3 ranks, odd rows": ReduceConfig(3, 100, 64, 2888, "fp16"),
    "2 ranks, fp32": ReduceConfig(2, 64, 64, 4096, "fp32"),
    "8 ranks, receiver": ReduceConfig(8, 2048, 32, 7168, "bf16", "receiver"),
}
# A wait's record is handed to the slow path by its address: that is no spill.
WAIT_BYTES = 48


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_kernels_compile_to_what_python_expects(name, arch):
    program = cuda_program(REDUCTIONS[name])
    cubin = program.cubin(arch)
    assert all(program.kernel(name).encode() in cubin for name in program.entry_points)
    found = frames(cubin)
    kernels = set(KERNELS) - ({"oneshot_resident"} if "odd rows" in name else set())
    assert set(program.entry_points) == {name + end for name in kernels for end in ("", MOE)}
    for kernel in kernels:
        assert found[kernel] <= 2 * WAIT_BYTES, f"{kernel} spills"


def test_they_compile_with_fault_points():
    assert cuda_program(REDUCTIONS["8 ranks"]).cubin("sm_90a", defines=("WEFT_FAULTS=1",))
