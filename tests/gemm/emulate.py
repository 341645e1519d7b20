"""The grouped product for Hopper compiled for a CPU, in the place of the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.emulator.emulate import build_library, emulated_tree, replace_bodies
from tests.emulator.instructions import translated
from weft.gemm import Push, WgmmaPlan, hopper
from weft.gemm.hopper_source import THREADS
from weft.gemm.request import Request

HERE = Path(__file__).parents[1] / "emulator"
SHARED = "extern __shared__ __align__(1024) u8 memory[];"
MAP = "reinterpret_cast<const emulated::Map&>(map)"
FENCED = "emulated::machine->mine().fenced[emulated::cta->current] = true;"
ORDERED = "emulated::machine->mine().ordered[emulated::cta->current] = true;"
BODIES = {
    "bulk.cuh": {
        "void init(u32 count)": "emulated::make_barrier(&word, count);",
        "void arrive()": "emulated::arrive(&word);",
        "void expect(u32 bytes)": "emulated::arrive(&word, bytes);",
        "void await(u32 parity)": "emulated::await(&word, parity);",
        "void fence_for_bulk()": FENCED,
    },
    "copy.cuh": {
        "void store(uint4* at, uint4 v)": "emulated::store_vector(at, v);",
        "void post_vector(uint4* at, uint4 v)": "emulated::store_vector(at, v);",
    },
    "tensor_copy.cuh": {
        "void load_box(void* to, const TensorMap& map, u32 x, u32 y, Arrival& arrival, u64 hint)": (
            f"emulated::load_box(1u << emulated::cta->rank, to, {MAP}, {{i32(x), i32(y)}}, "
            "&arrival.word);"
        ),
        "void load_box_for(u16 ctas, void* to, const TensorMap& map, u32 x, u32 y, "
        "Arrival& arrival,\n                          u64 hint)": (
            f"emulated::load_box(ctas, to, {MAP}, {{i32(x), i32(y)}}, &arrival.word);"
        ),
        "void load_box4(void* to, const TensorMap& map, u32 x, u32 y, u32 z, Arrival& arrival,\n"
        "                       u64 hint)": (
            f"emulated::load_box(1u << emulated::cta->rank, to, {MAP}, "
            "{i32(x), i32(y), 0, i32(z)}, &arrival.word);"
        ),
        "void load_box5(void* to, const TensorMap& map, u32 x, u32 y, u32 z, Arrival& arrival,\n"
        "                       u64 hint)": (
            f"emulated::load_box(1u << emulated::cta->rank, to, {MAP}, "
            "{i32(x), 0, 0, i32(y), i32(z)}, &arrival.word);"
        ),
        "void arrive_at(u32 cta, Arrival& arrival)": "emulated::arrive_at(cta, &arrival.word);",
        "void send_word(u32 cta, u32* at, u32 value, Arrival& arrival)": (
            "emulated::send_word(cta, at, value, &arrival.word);"
        ),
        "void meet_cluster()": "emulated::arrive_cluster(); emulated::wait_cluster();",
        "void publish_arrivals()": "emulated::machine->mine().published = 1;",
    },
    "team.cuh": {"void wait_for_predecessor()": "emulated::follow();"},
    "wgmma.cuh": {
        "void begin_products()": ORDERED,
        "void commit_products()": "emulated::commit();",
        "void await_products()": "emulated::settle_groups(but);",
        "void await_step(float (&part)[N])": "(void)part;\n    await_products<but>();",
        "void give_registers()": "",
        "void take_registers()": "",
        "void store_transposed(void* at, u32 a, u32 b, u32 c, u32 d)": (
            "emulated::store_matrices(at, true, {a, b, c, d});"
        ),
        "void store_blocks(void* at, u32 a, u32 b, u32 c, u32 d)": (
            "emulated::store_matrices(at, false, {a, b, c, d});"
        ),
    },
}
UNUSED = {  # of the engine that few SMs have: nobody calls them here
    "void bulk_load(void* to, const void* from, u32 bytes, Arrival& arrival)": "",
    "void bulk_store(void* to, const void* from, u32 bytes)": "",
    "void bulk_commit()": "",
    "void bulk_wait_read()": "",
    "void bulk_wait_written()": "",
    "void fence_shared_for_bulk()": "",
}
MULTIPLY = """\
template <weft::Operand O, weft::u32 N>
void weft::multiply(float (&sum)[N / 2], u64 a, u64 b, bool add) {
    static_assert(u32(weft::Operand::bf16) == emulated::bf16);
    static_assert(u32(weft::Operand::fp16) == emulated::fp16);
    emulated::multiply(u32(O), sum, N, a, b, add);
}
"""
RULES = (
    *("deadlock", "gone", "unmade", "overrun", "misaligned", "unordered", "unlike", "unknown"),
    "outside",
    "hasty",
    "strangers",
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
DOOR = """\
extern "C" __attribute__((visibility("default"))) void product_{i}(
    const weft::ProductArgs* a, unsigned ctas, unsigned seed, unsigned policy, unsigned* broken) {{
    constexpr weft::Product P = {literal};
    emulated::launch_pairs(ctas, {threads}, weft::product_shared_bytes<P>(), seed,
                           emulated::Policy(policy), broken, late, [a] {{ weft::product<P>(*a); }});
}}
"""


def compile_products(
    kinds: Iterable[hopper.Kind], folder: Path, mutation: Mapping[str, str] | None = None
) -> Path:
    """The shared library of some kinds of product.

    mutation: texts of the kernel, and what they become, wherever they stand in it.
    """
    root = emulated_tree(folder)
    for name, bodies in (BODIES | {"bulk.cuh": BODIES["bulk.cuh"] | UNUSED}).items():
        replace_bodies(root / "weft/device" / name, bodies)
    path = root / "weft/gemm/wgmma.cuh"
    path.write_text(translated(path.read_text()))
    path = root / "weft/gemm/grouped_gemm.cuh"
    text = path.read_text()
    assert SHARED in text
    path.write_text(text.replace(SHARED, "u8* const memory = emulated::dynamic_shared();"))
    for old, new in (mutation or {}).items():
        _mutate(root / "weft/gemm", old, new)
    doors = "".join(
        DOOR.format(i=i, literal=kind.literal, threads=THREADS) for i, kind in enumerate(kinds)
    )
    emulator = "".join((HERE / f"{name}.hpp").read_text() for name in ("cluster", "tensor"))
    includes = "#include <weft/gemm/wgmma.cuh>\n", "#include <weft/gemm/grouped_gemm.cuh>\n"
    return build_library(
        root, f"{emulator}{LATE_MEMORY}{includes[0]}{MULTIPLY}{includes[1]}{doors}"
    )


def _mutate(kernels: Path, old: str, new: str) -> None:
    texts = {path: path.read_text() for path in kernels.glob("*.cuh")}
    assert any(old in text for text in texts.values()), f"the kernel has no {old!r}"
    for path, text in texts.items():
        path.write_text(text.replace(old, new))


@dataclass
class EmulatedProducts:
    """Kinds of product that stand for the reference on a GPU of `sms`; keeps broken rules."""

    library: ctypes.CDLL
    kinds: tuple[hopper.Kind, ...]
    seed: int = 1
    policy: int = LATE
    sms: int = 4

    def compute(self, request: Request, plan: WgmmaPlan) -> None:
        """Run one product to its end. Asserts that no rule was broken."""
        assert isinstance(plan, WgmmaPlan)
        rows, experts = len(request.a), len(request.b)
        clusters = plan.max_row_blocks(rows, experts) * -(-request.b.shape[1] // hopper.PAIR)
        args, broken = hopper._arguments(request), (ctypes.c_uint32 * len(RULES))()
        self._write_late(request)
        number = self.kinds.index(hopper.Kind.of(request, plan))
        getattr(self.library, f"product_{number}")(
            ctypes.byref(args), min(self.sms // 2, clusters) * 2, self.seed, self.policy, broken
        )
        assert not any(broken), {r: n for r, n in zip(RULES, broken, strict=True) if n}

    def _write_late(self, request: Request) -> None:
        """What the kernel in front writes until it ends: rows, their scales, their homes."""
        home = request.epilogue.home if isinstance(request.epilogue, Push) else None
        found = [t for t in (request.a, request.a_scale, home) if t is not None]
        at = (ctypes.c_void_p * len(found))(*(t.data_ptr() for t in found))
        spans = [
            (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
            * t.element_size()
            for t in found
        ]
        self.library.write_late(len(found), at, (ctypes.c_uint64 * len(found))(*spans))


def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> tuple[int, ...]:
    """What tensor.hpp reads; asserts what the driver would insist on."""
    assert address % 16 == 0
    assert len(strides) == len(sizes) - 1 == len(box) - 1
    assert all(stride % 16 == 0 and stride < 2**40 for stride in strides)
    assert box[0] == 128
    assert all(0 < edge <= 256 for edge in box)
    assert all(0 < size <= 2**32 for size in sizes)
    words = [address, len(sizes)]
    for values, room in ((sizes, 5), (strides, 4), (box, 5)):
        words += [*values, *(0,) * (room - len(values))]
    return tuple(words)
