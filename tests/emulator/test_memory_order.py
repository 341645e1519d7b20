# SPDX-License-Identifier: Apache-2.0
"""In machine code every flag, counter, poll and posted row has the order and the scope it needs.

Which word is touched by which verb, the emulated kernels show (watch.py). Here is what the verbs
become, on each architecture, and that every operator's kernels have kept theirs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping

import pytest

from tests.allreduce.test_reduce_compile import REDUCTIONS
from tests.alltoall.test_compile import SHAPES
from tests.emulator.machine_code import strong_accesses, verbs
from tests.grouping.test_group_compile import CASES as GROUPINGS
from tests.lowlatency.test_lowlatency_compile import SHAPES as LOW_SHAPES
from weft.allreduce import kernels as reduce_kernels
from weft.alltoall.kernels import cuda_program
from weft.grouping import kernels as group_kernels
from weft.jit.nvrtc import compile_cubin
from weft.lowlatency import kernels as lowlatency_kernels

ARCHITECTURES = ("sm_90a", "sm_100a")
# Each as a kernel of its own: a statement, and all that it does to memory that others see.
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

FLAG = {"release ST.64.SYS": 1}
HEARD = {"acquire LD.64.SYS": 2}  # a peer's flag, and whether a peer asks this rank to leave
LAST = {"acq_rel ATOM.ADD.32.GPU": 1}
TOLD = {"relaxed ST.64.SYS": 1}  # words that name their round
ASKED = {"relaxed LD.64.SYS": 2}
POLLED, POSTED = {"relaxed LD.128.SYS": 8}, {"relaxed ST.128.SYS": 2}
SCALES = {"relaxed LD.32.SYS": 2, "relaxed ST.32.SYS": 2}
COUNTED = {"relaxed ATOM.ADD.32.GPU": 1}
WHOLE = {"dispatch": LAST | FLAG | HEARD, "combine": FLAG | HEARD}
LOW = FLAG | HEARD | COUNTED | POLLED | POSTED
LOW_HALVES = {
    "dispatch": LOW | TOLD | ASKED,
    "dispatch_send": LOW | TOLD,
    "dispatch_receive": LOW | ASKED,
    "combine": LOW | TOLD | ASKED,
    "combine_send": LOW | TOLD,
    "combine_receive": LOW | ASKED,
}
SUM = HEARD | COUNTED | POLLED | POSTED | TOLD | {"release ST.32.SYS": 2}
# The counter stands in front of the cluster's barrier, whose acquire follows it in the code.
OWN_SUM = HEARD | POLLED | POSTED | TOLD | {"release ST.32.SYS": 2, "acquire ATOM.ADD.32.GPU": 1}
SEND = LAST | FLAG
# What each kernel of an operator has at least. A shape is one that other tests compile, too.
KERNELS: dict[str, Mapping[str, Mapping[str, int]]] = {
    "pulled, in halves": WHOLE
    | {
        "dispatch_send": LAST | FLAG,
        "dispatch_receive": HEARD,
        "combine_send": FLAG,
        "combine_receive": HEARD,
    },
    "pushed": WHOLE | {"combine": LAST | FLAG | HEARD},
    "fp8 both ways": WHOLE
    | {
        "combine": LAST | FLAG | HEARD | POLLED | POSTED | SCALES | {"acquire LD.32.GPU": 1},
    },
    "choices": WHOLE,
    "statistics, pulled": WHOLE,
    "low latency": LOW_HALVES,
    "low latency, reduced, fp8 back": LOW_HALVES,
    "low latency, stored at owners": {
        "dispatch": LOW | TOLD | ASKED,
        "combine": LOW | {"acquire LD.64.SYS": 1},
    },
    "all-reduce": {
        name + end: OWN_SUM if name == "oneshot_resident" else SUM
        for name in reduce_kernels.KERNELS
        for end in ("", reduce_kernels.MOE)
    },
    "all-reduce, receiver": {
        name + end: SUM if name == "oneshot" else OWN_SUM
        for name in reduce_kernels.KERNELS
        for end in ("", reduce_kernels.MOE)
    },
    "sends, pushed": {"send": SEND, "group": LAST},
    "sends, fp8 of fp32": {
        "send": SEND | {"relaxed ST.32.SYS": 2},
        "group": LAST,
    },
    "sends, choices": {"send": SEND, "group": LAST},
}


def compiled(name: str, arch: str) -> bytes:
    """The kernels of an operator."""
    kind, _, rest = name.partition(", ")
    if kind == "all-reduce":
        reduction = REDUCTIONS["8 ranks, receiver" if rest == "receiver" else "8 ranks"]
        return reduce_kernels.cuda_program(reduction).cubin(arch)
    if kind == "low latency":
        shape = LOW_SHAPES[rest or "deepseek-v3"]
        program = lowlatency_kernels.cuda_program(shape, split_phase=not shape.gemm_push)
        return program.cubin(arch)
    if kind == "sends":
        sends, grouping = GROUPINGS[rest]
        return group_kernels.cuda_program(sends, grouping, sends=True).cubin(arch)
    if kind == "pulled":
        return cuda_program(SHAPES["deepseek-v3"], 3, split_phase=True).cubin(arch)
    return cuda_program(SHAPES[name], 1).cubin(arch)


@functools.cache
def found(name: str, arch: str) -> dict[str, Counter[str]]:
    """What each of its kernels does."""
    kernels = strong_accesses(compiled(name, arch))
    return {kernel: verbs(code) for kernel, code in kernels.items()}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_verbs_become_these_instructions(arch: str) -> None:
    source = "#include <weft/device/copy.cuh>\n" + "".join(
        f'extern "C" __global__ void verb_{i}({PARAMETERS}) {{ {statement}; }}\n'
        for i, statement in enumerate(VERBS)
    )
    cubin = compile_cubin(source, name="verbs", arch=arch, options=("-default-device",))
    code = strong_accesses(cubin)
    assert {s: code[f"verb_{i}"] for i, s in enumerate(VERBS)} == VERBS


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_keep_what_orders_them(name: str, arch: str) -> None:
    kernels = found(name, arch)
    for kernel, wanted in KERNELS[name].items():
        few = {
            verb: kernels[kernel][verb] for verb, n in wanted.items() if kernels[kernel][verb] < n
        }
        assert not few, f"{kernel} has too few of these: {few}, wanted {dict(wanted)}"
    for kernel, has in kernels.items():
        # Peers see nothing that stops at the GPU; nothing that is the GPU's own goes further.
        assert not [v for v in has if v.endswith((".64.GPU", ".128.GPU", "CTA", "CLUSTER"))], kernel
        assert not [v for v in has if "ATOM" in v and not v.endswith(".GPU")], kernel
