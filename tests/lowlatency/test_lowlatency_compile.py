# SPDX-License-Identifier: Apache-2.0
"""Every low-latency kernel compiles for every architecture without a GPU, and spills nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulator.machine_code import frames
from weft.errors import CompileError
from weft.lowlatency.config import CHUNK_TOKENS, LowShape
from weft.lowlatency.kernels import cuda_program, plan_low
from weft.runtime.timeline import DEFINE

pytestmark = pytest.mark.slow

PLAIN = LowShape(8, 128, 8, 256, 32, 7168, "bf16")
SHAPES = {
    "deepseek-v3": PLAIN,
    "reduced": replace(PLAIN, reduce="sender"),
    "reduced, fp8 back": replace(PLAIN, reduce="sender", combine_fp8=True),
    "reduced, fp8 back, four ranks": replace(
        PLAIN, ranks=4, local=64, reduce="sender", combine_fp8=True
    ),
    "fp8 back": replace(PLAIN, combine_fp8=True),
    "as they are": replace(PLAIN, group=0),
    "powers of two": replace(PLAIN, scales="ue8m0"),
    "by column, of 32": replace(PLAIN, scales="fp32_col", group=32),
    "as deep_ep": replace(PLAIN, scales="fp32_col", recipe="deep_ep"),
    "as deep_ep, powers of two": replace(PLAIN, scales="ue8m0", recipe="deep_ep"),
    "as triton_dist": replace(PLAIN, recipe="triton_dist"),
    "from other hosts": replace(PLAIN, recipe="quantised"),
    "from other hosts, weights beside": replace(PLAIN, reduce="sender", recipe="quantised"),
    "fp32, fp8 back": replace(PLAIN, dtype="fp32", combine_fp8=True),
    "four ranks, odd blocks": LowShape(4, 512, 4, 128, 32, 2944, "fp16"),
    "stored at owners": replace(PLAIN, gemm_push=True),
    "one of everything": LowShape(1, 1, 1, 1, 1, 128, "bf16"),
    "32 ranks, mapped": LowShape(
        *(32, 16, 32, 61, 2, 512, "fp32", 32, "ue8m0", "sender"), combine_fp8=True, mapped=True
    ),
}
# Every way of rows, once, in kernels that keep a trace.
PROFILED = (
    "deepseek-v3",
    "stored at owners",
    "as they are",
    "reduced",
    "reduced, fp8 back",
    "fp8 back",
)
# Bytes that the slow half of a wait costs kernels that trace, and those of rows as they are.
SLOW_HALF = 24
# 32 ranks with a top k of 32 use all registers.
TIGHT = ("32 ranks, mapped",)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_compile_to_the_layout_that_python_expects(name, arch):
    program = cuda_program(SHAPES[name], split_phase=not SHAPES[name].gemm_push)
    cubin = program.cubin(arch)
    assert all(name.encode() in cubin for name in program.entry_points)


@pytest.mark.parametrize(
    ("name", "defines"),
    [(name, ()) for name in SHAPES if name not in TIGHT] + [(name, (DEFINE,)) for name in PROFILED],
)
def test_nothing_is_spilled_on_hopper(name, defines):
    split_phase = not SHAPES[name].gemm_push
    program = cuda_program(SHAPES[name], split_phase=split_phase)
    found = frames(program.cubin("sm_90a", defines=defines))
    kernels = {name: size for name, size in found.items() if not name.startswith("$")}
    assert {"dispatch", "combine_receive" if split_phase else "combine"} <= kernels.keys()
    most = SLOW_HALF if defines or name == "as they are" else 0
    assert max(kernels.values()) <= most, kernels


@pytest.mark.parametrize("name", TIGHT)
def test_where_registers_are_short_few_words_are_spilled(name):
    assert max(frames(cuda_program(SHAPES[name]).cubin("sm_90a")).values()) <= 96


def test_where_room_is_short_senders_keep_half_of_it():
    def plan(resident: int) -> tuple[int, int]:
        found = plan_low(PLAIN, "combine", 128, 256, 132, resident)
        return found.senders, found.receivers

    assert plan(132 * 3 + 1) == (132, 264)
    assert plan(132 * 2) == (131, 132)
    assert plan(2) == (1, 1)
    one = plan_low(PLAIN, "combine_send", 128, 256, 132, 100)
    assert (one.senders, one.receivers) == (99, 0)


def test_a_compile_error_shows_the_generated_entry():
    with pytest.raises(CompileError) as caught:
        cuda_program(PLAIN).cubin("sm_90a", defines=("low_latency_dispatch=",))
    assert "__launch_bounds__" in str(caught.value)


@pytest.mark.parametrize("tokens", [0, 1, 8, 32, 33, 128, 512, 8192])
@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.parametrize("part", ["", "_send", "_receive"])
def test_plans_fit_on_the_gpu_and_leave_nobody_out(tokens, name, part):
    shape = replace(PLAIN, tokens=8192)
    threads = 128 if tokens <= 32 else 256
    resident = 132 * 3 * (256 // threads)
    plan = plan_low(shape, name + part, tokens, threads, 132, resident)
    assert plan.ctas >= 1
    waits = plan.senders + plan.receivers
    assert waits <= max(resident, 2)
    if part != "_send":
        assert plan.receivers >= 1  # peers' tokens come even where there are none of one's own
    if part != "_receive":
        assert plan.metadata + plan.senders >= 1  # one CTA sends credits
        assert plan.metadata * CHUNK_TOKENS >= tokens or name == "combine"
    else:
        assert plan.metadata == plan.senders == 0
