# SPDX-License-Identifier: Apache-2.0
"""Hopper's grouped GEMM compiled for a CPU, in place of the reference."""

import ctypes
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.emulator.emulate import Tree, build_library, emulated_tree, replace_bodies
from tests.emulator.instructions import translated
from tests.mutations import Mutation
from weft.gemm import Push, WgmmaPlan, kernels, reference
from weft.gemm.call import GemmCall
from weft.gemm.config import CLUSTER_N
from weft.gemm.kernels import THREADS

SHARED = "extern __shared__ __align__(1024) u8 memory[];"
MAP = "reinterpret_cast<const emulated::Map&>(map)"
FENCED = "emulated::machine->mine().fenced[emulated::cta->current] = true;"
ORDERED = "emulated::machine->mine().ordered[emulated::cta->current] = true;"
BODIES = {
    "copy.cuh": {
        "void store(uint4* at, uint4 v)": "emulated::store_vector(at, v);",
        "void post_vector(uint4* at, uint4 v)": "emulated::store_vector(at, v);",
    },
    "tma.cuh": {
        "void init(u32 count)": "emulated::make_barrier(&word, count);",
        "void arrive()": "emulated::arrive(&word);",
        "void arrive_expect_tx(u32 bytes)": "emulated::arrive(&word, bytes);",
        "void wait(u32 parity)": "emulated::await(&word, parity);",
        "bool is_complete(u32 parity)": "return emulated::is_complete(&word, parity);",
        "void fence_for_bulk()": FENCED,
        "void tma_load_2d(void* to, const TensorMap& map, u32 x, u32 y, Mbarrier& mbarrier,\n"
        "                         u64 hint)": (
            f"emulated::load_box(1u << emulated::cta->rank, to, {MAP}, {{i32(x), i32(y)}}, "
            "&mbarrier.word);"
        ),
        "void tma_load_2d_multicast(u16 ctas, void* to, const TensorMap& map, u32 x, u32 y,\n"
        "                                   Mbarrier& mbarrier, u64 hint)": (
            f"emulated::load_box(ctas, to, {MAP}, {{i32(x), i32(y)}}, &mbarrier.word);"
        ),
        "void tma_load_5d(void* to, const TensorMap& map, u32 x, u32 y, u32 z, "
        "Mbarrier& mbarrier,\n                         u64 hint)": (
            f"emulated::load_box(1u << emulated::cta->rank, to, {MAP}, "
            "{i32(x), 0, 0, i32(y), i32(z)}, &mbarrier.word);"
        ),
        "void bulk_load_hinted(void* to, const void* from, u32 bytes, Mbarrier& mbarrier, "
        "u64 hint)": ("(void)hint;\n    emulated::load_bytes(to, from, bytes, &mbarrier.word);"),
        "void arrive_remote(u32 cta, Mbarrier& mbarrier)": (
            "emulated::arrive_at(cta, &mbarrier.word);"
        ),
        "void store_remote(u32 cta, u32* at, u32 value, Mbarrier& mbarrier)": (
            "emulated::send_word(cta, at, value, &mbarrier.word);"
        ),
        "void sync_cluster_relaxed()": "emulated::arrive_cluster(); emulated::wait_cluster();",
        "void fence_mbarrier_init()": "emulated::machine->mine().published = 1;",
    },
    "team.cuh": {"void griddep_wait()": "emulated::follow();"},
}
MLP_BODIES = {"void await_count(u32* at, u32 count)": "emulated::await_count(at, count);"}
WGMMA_BODIES = {
    "void wgmma_fence()": ORDERED,
    "void wgmma_commit()": "emulated::commit();",
    "void wgmma_wait()": "emulated::settle_groups(pending);",
    "void wait_accumulator(float (&acc)[N])": "(void)acc;\n    wgmma_wait<pending>();",
    "void hold_registers(u32 (&a)[swizzle_bytes / 32][4])": "(void)a;",
    "void setmaxnreg_dec()": "",
    "void setmaxnreg_inc()": "",
    "void stmatrix_x4_trans(void* at, u32 a, u32 b, u32 c, u32 d)": (
        "emulated::store_matrices(at, true, {a, b, c, d});"
    ),
    "void stmatrix_x4(void* at, u32 a, u32 b, u32 c, u32 d)": (
        "emulated::store_matrices(at, false, {a, b, c, d});"
    ),
}
WGMMA = """\
template <weft::Operand O, weft::u32 N>
void weft::wgmma(float (&acc)[N / 2], u64 a, u64 b, bool accumulate) {
    static_assert(u32(weft::Operand::bf16) == emulated::bf16);
    static_assert(u32(weft::Operand::fp16) == emulated::fp16);
    emulated::multiply(u32(O), acc, N, a, b, accumulate);
}
template <weft::Operand O, weft::u32 N>
void weft::wgmma(float (&acc)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
    emulated::multiply(u32(O), acc, N, emulated::in_registers, b, accumulate, a);
}
"""
GEMM_HEAD = f"#include <weft/gemm/wgmma.cuh>\n{WGMMA}"  # before other headers of the GEMM
RULES = (
    *("deadlock", "gone", "unmade", "overrun", "misaligned", "unordered", "unlike", "unknown"),
    "outside",
    "hasty",
    "strangers",
    "unreset",
)
LATE, AT_ONCE, AT_ANY_TIME = range(3)  # when what is on its way lands
LATE_MEMORY = """\
static std::vector<emulated::Late> late;
extern "C" __attribute__((visibility("default"))) void write_late(
    unsigned regions, unsigned char* const* at, const unsigned long long* bytes) {
    late.clear();
    for (unsigned i = 0; i < regions; ++i) late.push_back({at[i], {at[i], at[i] + bytes[i]}});
}
"""
ENTRY = """\
extern "C" __attribute__((visibility("default"))) void grouped_gemm_{i}(
    const weft::GemmArgs* a, unsigned ctas, unsigned seed, unsigned policy, unsigned* broken) {{
    constexpr weft::GemmShape S = {literal};
    weft::TicketCounter tickets[2] = {{}};
    weft::TicketCounter* const counters = tickets;
    emulated::launch_pairs(ctas, {threads}, weft::gemm_shared_bytes<S>(), seed,
                           emulated::Policy(policy), broken, late,
                           [a, counters] {{ weft::grouped_gemm<S>(*a, counters); }});
    broken[emulated::unreset] += tickets[1].drawn != 0 || tickets[1].finished != 0;
}}
"""


MLP_ENTRY = """\
extern "C" __attribute__((visibility("default"))) void grouped_mlp_{i}(
    const weft::GemmArgs* up, const weft::GemmArgs* down, void* state, unsigned ctas, unsigned seed,
    unsigned policy, bool at_once, unsigned* broken) {{
    constexpr weft::GemmShape U = {up};
    constexpr weft::GemmShape D = {down};
    auto* const own = static_cast<weft::MlpState<U.experts>*>(state);
    const auto kernel = [up, down, own] {{ weft::grouped_mlp<U, D>(*up, *down, *own); }};
    const unsigned bytes = weft::gemm_shared_bytes<U>();
    const auto order = emulated::Policy(policy);
    if (at_once)
        emulated::launch_pairs_at_once(ctas, {threads}, bytes, seed, order, broken, kernel);
    else
        emulated::launch_pairs(ctas, {threads}, bytes, seed, order, broken, {{}}, kernel);
}}
"""


def compile_mlps(shapes: Iterable[kernels.MlpShape], mutation: Mutation | None = None) -> Path:
    """Return the shared library of kernels of two GEMMs, optionally with a fault."""
    entries = "".join(
        MLP_ENTRY.format(i=i, up=s.up.cpp_value, down=s.down.cpp_value, threads=THREADS)
        for i, s in enumerate(shapes)
    )
    text = f"{GEMM_HEAD}#include <weft/gemm/grouped_mlp.cuh>\n{entries}"
    return build_library(gemm_tree(mutation), text)


def compile_gemms(shapes: Iterable[kernels.GemmShape], mutation: Mutation | None = None) -> Path:
    """Return the shared library of the kernels of some shapes, optionally with a fault."""
    entries = "".join(
        ENTRY.format(i=i, literal=shape.cpp_value, threads=THREADS)
        for i, shape in enumerate(shapes)
    )
    text = f"{GEMM_HEAD}{LATE_MEMORY}#include <weft/gemm/grouped_gemm.cuh>\n{entries}"
    return build_library(gemm_tree(mutation), text)


def gemm_tree(mutation: Mutation | None = None) -> Tree:
    """Like `emulated_tree`, with the instructions of the GEMM replaced as well."""
    tree = emulated_tree(mutation)
    for name, bodies in BODIES.items():
        replace_bodies(tree, f"device/{name}", bodies)
    replace_bodies(tree, "gemm/publish.cuh", MLP_BODIES)
    replace_bodies(tree, "gemm/wgmma.cuh", WGMMA_BODIES)
    tree["gemm/wgmma.cuh"] = translated(tree["gemm/wgmma.cuh"])
    dynamic = "u8* const memory = emulated::dynamic_shared();"
    for name in ("gemm/grouped_gemm.cuh", "gemm/grouped_mlp.cuh"):
        assert SHARED in tree[name]
        tree[name] = tree[name].replace(SHARED, dynamic)
    return tree


def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """Return what tensor.hpp reads, and assert what the driver requires."""
    assert address % 16 == 0
    assert len(strides) == len(sizes) - 1 == len(box) - 1
    assert all(stride % 16 == 0 and stride < 2**40 for stride in strides)
    assert box[0] == 128
    assert all(0 < edge <= 256 for edge in box)
    assert all(0 < size <= 2**32 for size in sizes)
    words = [address, len(sizes)]
    for values, room in ((sizes, 5), (strides, 4), (box, 5)):
        words += [*values, *(0,) * (room - len(values))]
    return struct.pack("=16Q", *words)


@dataclass
class EmulatedHopper:
    """Kernels of many shapes in place of the reference, on a GPU of `sms`; a library a problem."""

    shapes: Iterable[kernels.GemmShape]
    mutation: Mutation | None = None
    seed: int = 1
    policy: int = LATE
    sms: int = 4

    def __post_init__(self) -> None:
        self._libraries: dict[tuple[object, ...], ctypes.CDLL] = {}
        self._problems: dict[tuple[object, ...], list[kernels.GemmShape]] = {}
        for shape in dict.fromkeys(self.shapes):
            self._problems.setdefault(_problem(shape), []).append(shape)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Let calls with a WgmmaPlan and CPU tensors run the kernels."""
        patch.setattr(reference, "run_reference", self.compute)
        patch.setattr(kernels, "encode_tensor_map", tensor_map)

    def compute(self, call: GemmCall, plan: WgmmaPlan) -> None:
        """Run one grouped GEMM to its end. Asserts that no rule was broken."""
        assert isinstance(plan, WgmmaPlan)
        shape = kernels.GemmShape.from_call(call, plan)
        problem = _problem(shape)
        shapes = self._problems[problem]
        if problem not in self._libraries:
            self._libraries[problem] = ctypes.CDLL(str(compile_gemms(shapes, self.mutation)))
        library, broken = self._libraries[problem], (ctypes.c_uint32 * len(RULES))()
        clusters = plan.max_m_blocks(len(call.a), len(call.b)) * -(-call.sizes[1] // CLUSTER_N)
        args = kernels.HopperArguments(call).fill_addresses(call.addresses)
        args.ticket_slot = self.seed % 2 if shape.draws_tickets else 0
        write_late(library, call)
        getattr(library, f"grouped_gemm_{shapes.index(shape)}")(
            ctypes.byref(args), min(self.sms // 2, clusters) * 2, self.seed, self.policy, broken
        )
        assert not any(broken), {r: n for r, n in zip(RULES, broken, strict=True) if n}


def write_late(library: ctypes.CDLL, call: GemmCall) -> None:
    """Write what the previous kernel writes until it ends: rows, scales and dst_addr."""
    dst_addr = call.epilogue.dst_addr if isinstance(call.epilogue, Push) else None
    result = [t for t in (call.a, call.a_scale, dst_addr) if t is not None]
    at = (ctypes.c_void_p * len(result))(*(t.data_ptr() for t in result))
    spans = [
        (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()
        for t in result
    ]
    library.write_late(len(result), at, (ctypes.c_uint64 * len(result))(*spans))


def _problem(shape: kernels.GemmShape) -> tuple[object, ...]:
    return shape.experts, shape.n, shape.k, shape.operand
