# SPDX-License-Identifier: Apache-2.0
"""The machine code of every kernel: it exists, spills nothing, and keeps its memory order.

The emulated kernels show which word is accessed by which verb (watch.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.emulator.machine_code import disassemble, frames, strong_accesses, verbs
from tests.faults import FAULTS
from weft.allreduce import kernels as allreduce
from weft.allreduce.config import ReduceConfig
from weft.alltoall import kernels as alltoall
from weft.grouping import kernels as grouping
from weft.grouping.config import GroupConfig
from weft.jit.nvrtc import compile_cubin
from weft.lowlatency import kernels as lowlatency
from weft.lowlatency.config import LowLatencyShape
from weft.runtime.timeline import DEFINE
from weft.shape import Shape

ARCHITECTURES = ("sm_90a", "sm_100a")
# Statements, each compiled as a kernel, and their accesses to memory that others see.
VERBS = {
    "weft::store_release(words, wide)": ["fence.SYS", "ST.64.SYS"],
    "weft::store_release(word, narrow)": ["fence.SYS", "ST.32.SYS"],
    "weft::store_relaxed(words, wide)": ["ST.64.SYS"],
    "weft::store_relaxed(word, narrow)": ["ST.32.SYS"],
    "*to = weft::load_acquire(words)": ["LD.64.SYS", "drop"],
    "*to = weft::load_acquire(word)": ["LD.32.SYS", "drop"],
    "*to = weft::load_acquire_local(word)": ["LD.32.GPU", "drop"],
    "*to = weft::load_relaxed(words)": ["LD.64.SYS"],
    "*to = weft::load_relaxed(word)": ["LD.32.SYS"],
    "*to = weft::add_acq_rel(word, narrow)": ["fence.GPU", "ATOM.ADD.32.GPU", "drop"],
    "*to = weft::add_relaxed(word, narrow)": ["ATOM.ADD.32.GPU"],
    "weft::add_relaxed(words, wide)": ["ATOM.ADD.64.GPU"],
    "*to = weft::claim(word, 0, 1)": ["fence.GPU", "ATOM.CAS.32.GPU", "drop"],
    "weft::raise_to(words, wide)": ["ATOM.MAX.64.GPU"],
    "*row = weft::poll_vector(from)": ["LD.128.SYS"],
    "weft::post_vector(row, vector)": ["ST.128.SYS"],
    "*row = weft::poll_u64_pair(from)": ["LD.128.SYS"],
    "weft::post_u64_pair(row, vector)": ["ST.128.SYS"],
}
PARAMETERS = (
    "weft::u64* words, weft::u64 wide, weft::u32* word, weft::u32 narrow, weft::u64* to, "
    "uint4* row, const uint4* from, uint4 vector"
)

FLAG_STORES = {"release ST.64.SYS": 1}
FLAG_LOADS = {"acquire LD.64.SYS": 2}  # a peer's flag, and whether a peer asks this rank to leave
LAST_ADD = {"acq_rel ATOM.ADD.32.GPU": 1}
TAGGED_STORES = {"relaxed ST.64.SYS": 1}  # words that name their round
TAGGED_LOADS = {"relaxed LD.64.SYS": 2}
VECTOR_LOADS, VECTOR_STORES = {"relaxed LD.128.SYS": 8}, {"relaxed ST.128.SYS": 2}
SCALES = {"relaxed LD.32.SYS": 2, "relaxed ST.32.SYS": 2}
COUNTER_ADDS = {"relaxed ATOM.ADD.32.GPU": 1}
WHOLE = {"dispatch": LAST_ADD | FLAG_STORES | FLAG_LOADS, "combine": FLAG_STORES | FLAG_LOADS}
LOW = FLAG_STORES | FLAG_LOADS | COUNTER_ADDS | VECTOR_LOADS | VECTOR_STORES
LOW_HALVES = {
    "dispatch": LOW | TAGGED_STORES | TAGGED_LOADS,
    "dispatch_send": LOW | TAGGED_STORES,
    "dispatch_receive": LOW | TAGGED_LOADS,
    "combine": LOW | TAGGED_STORES | TAGGED_LOADS,
    "combine_send": LOW | TAGGED_STORES,
    "combine_receive": LOW | TAGGED_LOADS,
}
SUM = (
    FLAG_LOADS
    | COUNTER_ADDS
    | VECTOR_LOADS
    | VECTOR_STORES
    | TAGGED_STORES
    | {"release ST.32.SYS": 2}
)
# The counter precedes the cluster's barrier, whose acquire follows it in the code.
OWN_SUM = (
    FLAG_LOADS
    | VECTOR_LOADS
    | VECTOR_STORES
    | TAGGED_STORES
    | {"release ST.32.SYS": 2, "acquire ATOM.ADD.32.GPU": 1}
)
SEND = LAST_ADD | FLAG_STORES
# Waits that a rank records for tools (record_duration in device/wait.cuh).
RECORDS = {"relaxed ATOM.ADD.64.GPU", "relaxed ATOM.MAX.64.GPU"}
Verbs = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Code:
    """A program, and the requirements of its machine code.

    verbs: what kernels do at least to memory that others see.
    frame: bytes of local memory that a kernel may have; `profiled`: that one with a timeline may.
    """

    program: Any
    verbs: Verbs = field(default_factory=dict)
    frame: int = 0
    profiled: int | None = None


V3 = Shape(8, 2048, 8, 256, 7168, "bf16", (14336,))
FEW = replace(V3, tokens=128)
PUSHED = WHOLE | {"combine": LAST_ADD | FLAG_STORES | FLAG_LOADS}
PUSHED_FP8 = PUSHED | {
    "combine": LAST_ADD
    | FLAG_STORES
    | FLAG_LOADS
    | VECTOR_LOADS
    | VECTOR_STORES
    | SCALES
    | {"acquire LD.32.GPU": 1}
}
PULLED = WHOLE | {
    "dispatch_send": LAST_ADD | FLAG_STORES,
    "dispatch_receive": FLAG_LOADS,
    "combine_send": FLAG_STORES,
    "combine_receive": FLAG_LOADS,
}


def all_to_all(shape: Shape, verbs: Verbs = WHOLE) -> Code:
    program = alltoall.build_cuda_program(shape, 1, split_phase=True)
    return Code(program, verbs, profiled=0)


def low_latency(**changes: Any) -> Code:
    shape = replace(LowLatencyShape(8, 128, 8, 256, 32, 7168, "bf16"), **changes)
    program = lowlatency.build_cuda_program(shape, split_phase=not shape.gemm_push)
    verbs = LOW_HALVES
    if shape.gemm_push:
        verbs = {
            "dispatch": LOW | TAGGED_STORES | TAGGED_LOADS,
            "combine": LOW | {"acquire LD.64.SYS": 1},
        }
    # The slow path of a wait takes 24 bytes of the stack in kernels that trace.
    return Code(program, verbs, profiled=24)


def all_reduce(config: ReduceConfig) -> Code:
    receiver = config.epilogue_at == "receiver"
    plain = {"oneshot"} if receiver else set(allreduce.KERNELS) - {"oneshot_resident"}
    verbs = {
        name + end: SUM if name in plain else OWN_SUM
        for name in allreduce.KERNELS
        for end in ("", allreduce.MOE)
    }
    program = allreduce.build_cuda_program(config)
    assert set(program.entry_points) == verbs.keys()
    # A wait's record is handed to the slow path by its address: that is no spill.
    return Code(program, verbs, frame=96)


def groups(shape: Shape, layout: str, *sizes: int) -> Code:
    sends = shape.combine != "pull"
    program = grouping.build_cuda_program(shape, GroupConfig(layout, *sizes), sends=sends)
    send = SEND | ({"relaxed ST.32.SYS": 2} if shape.combine == "push_fp8" else {})
    return Code(program, {"send": send, "group": LAST_ADD} if sends else {})


# One shape of each list of verbs.
KERNELS = {
    "pulled": lambda: all_to_all(V3, PULLED),
    "pushed": lambda: all_to_all(replace(FEW, combine="push"), PUSHED),
    "fp8 dispatch and combine": lambda: all_to_all(
        replace(FEW, row_bytes=(7168, 224), combine="push_fp8", quant="fp8"), PUSHED_FP8
    ),
    "gemm_push": lambda: all_to_all(replace(FEW, combine="gemm_push")),
    "gemm_push, receiver": lambda: all_to_all(replace(FEW, combine="gemm_push", reduce="receiver")),
    "low latency": low_latency,
    "low latency, reduced, fp8 combine": lambda: low_latency(reduce="sender", combine_fp8=True),
    "low latency, gemm_push": lambda: low_latency(gemm_push=True),
    "all-reduce": lambda: all_reduce(ReduceConfig(8, 2048, 32, 7168, "bf16")),
    "all-reduce, receiver": lambda: all_reduce(ReduceConfig(8, 2048, 32, 7168, "bf16", "receiver")),
    "groups": lambda: groups(replace(V3, tokens=4096), "contiguous", 32, 8 * 4096 * 8, 1),
    "sends": lambda: groups(replace(FEW, combine="push"), "contiguous", 32, 8 * 128 * 8, 16),
    "sends, fp8 of fp32": lambda: groups(
        replace(FEW, combine="push_fp8", dtype="fp32"), "masked", 32, 1024, 16
    ),
}


def largest_frame(cubin: bytes) -> int:
    return max(size for name, size in frames(cubin).items() if not name.startswith("$"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_exist_do_not_spill_and_keep_their_order(name: str, arch: str) -> None:
    code = KERNELS[name]()
    cubin = code.program.compile_cubin(arch)
    assert all(
        code.program.kernel_name(entry).encode() in cubin for entry in code.program.entry_points
    )
    if arch == "sm_90a" or code.profiled is None:
        assert largest_frame(cubin) <= code.frame, frames(cubin)
    if arch == "sm_90a" and code.profiled is not None:
        profiled = code.program.compile_cubin(arch, defines=(DEFINE,))
        assert largest_frame(profiled) <= code.profiled, frames(profiled)
    kernels = {kernel: verbs(each) for kernel, each in strong_accesses(cubin).items()}
    for kernel, expected in code.verbs.items():
        has = kernels[kernel]
        few = {verb: has[verb] for verb, n in expected.items() if has[verb] < n}
        assert not few, f"{kernel} has too few of these: {few}, wanted {dict(expected)}"
    for kernel, has in kernels.items():
        # Peers see nothing that stops at the GPU; nothing that is the GPU's own goes further.
        narrow = [v for v in has if v.endswith((".64.GPU", ".128.GPU", "CTA", "CLUSTER"))]
        assert not set(narrow) - RECORDS, kernel
        assert not [v for v in has if "ATOM" in v and not v.endswith(".GPU")], kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pulled", "low latency", "all-reduce"])
def test_kernels_compile_with_fault_points(name: str) -> None:
    assert KERNELS[name]().program.compile_cubin("sm_90a", defines=FAULTS)


@pytest.mark.slow
def test_a_lane_takes_the_time_of_its_wait_before_it_meets_the_others() -> None:
    """Lanes that wait for different peers meet where the loop ends: at the longest wait."""
    program = all_to_all(V3).program
    code = disassemble(program.compile_cubin("sm_90a"))
    code = code.partition(f".text.{program.kernel_name('dispatch_receive')}:")[2]
    poll = code.partition("CCTL.IVALL")[2].partition(" BRA ")[0]
    assert "SR_GLOBALTIMERLO" in poll


@pytest.mark.slow
@pytest.mark.parametrize("combine", ["push", "push_fp8", "gemm_push"])
def test_all_rows_of_a_token_are_loaded_before_the_first_is_used(combine: str) -> None:
    program = groups(replace(FEW, combine=combine), "contiguous", 32, 8192, 1).program
    code = disassemble(program.compile_cubin("sm_90a")).partition(
        f".text.{program.kernel_name('send')}:"
    )[2]
    code = code.partition(".text.")[0]
    used = re.search(r"\bSTG\.E\.NA\.128|\bFMUL", code)
    assert used
    assert len(re.findall(r"\bLDG\.E\.NA\.128", code[: used.start()])) == FEW.top_k


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_accesses_compile_to_these_instructions(arch: str) -> None:
    source = "#include <weft/device/copy.cuh>\n" + "".join(
        f'extern "C" __global__ void verb_{i}({PARAMETERS}) {{ {statement}; }}\n'
        for i, statement in enumerate(VERBS)
    )
    cubin = compile_cubin(source, name="verbs", arch=arch, options=("-default-device",))
    code = strong_accesses(cubin)
    assert {s: code[f"verb_{i}"] for i, s in enumerate(VERBS)} == VERBS
