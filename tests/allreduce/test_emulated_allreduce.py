# SPDX-License-Identifier: Apache-2.0
"""The kernels in the emulator give the reference's bits in every launch; rows are divided right."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import every_call, make
from tests.emulator.emulate import EmulatedEntries, build_library, compile_emulated, emulated_tree
from tests.emulator.watch import watching, ways
from tests.headers import HEADER_BYTES
from tests.sums import BACKENDS, Sum, play, quant_specs
from weft.allreduce.kernels import ReducePlan
from weft.errors import PeerTimeout

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Launch:
    """Plans by backend and tokens, and the kernel that runs as "oneshot"."""

    plans: Mapping[tuple[str, int], ReducePlan]
    form: str = "oneshot"

    def install(self, ar: weft.AllReduce, library: str) -> EmulatedEntries:
        ar._kernels = entries = EmulatedEntries(Path(library))
        entries.plans |= self.plans
        entries.forms["oneshot"] = self.form
        return entries


FEW, MANY = 5, 13  # tokens


def grid(threads: int, cluster: int, resident: int | None) -> Launch:
    """Return one-shot launches of all sizes: of resident clusters, or for None one a token."""
    plans = {}
    for tokens in range(1, MANY + 1):
        ctas = min(tokens, resident or tokens) * cluster
        plans["oneshot", tokens] = ReducePlan(ctas, threads, cluster)
    return Launch(plans, "oneshot_resident" if resident else "oneshot")


def oneshot(threads: int, cluster: int) -> ReducePlan:
    return ReducePlan(FEW * cluster, threads, cluster)


def twoshot(threads: int, cluster: int, pushers: int, reducers: int) -> ReducePlan:
    return ReducePlan((pushers + reducers) * cluster, threads, cluster, pushers * cluster)


def backends(*plans: ReducePlan) -> Launch:
    return Launch({(name, FEW): plan for name, plan in zip(BACKENDS, plans, strict=True)})


WAVES, ALONE, PAIR, THREE = grid(32, 3, None), grid(64, 1, 1), grid(32, 2, 2), grid(32, 3, 3)
GRIDS = Sum(MANY, 640, special=True, bias=1.0)  # 80 vectors: two warps and a half
FP32 = GRIDS.next(dtype=torch.float32, hidden=384, special=False)
# 384 bf16 are 48 vectors: a warp and a half.
ALL = Sum(FEW, 384, special=True, bias=1.0)
SHAPES = (
    backends(oneshot(64, 1), twoshot(64, 1, 1, 1), twoshot(32, 1, 1, 1)),
    backends(oneshot(32, 2), twoshot(32, 2, 1, 1), twoshot(32, 1, 2, 1)),
    backends(oneshot(32, 3), twoshot(32, 2, 1, 2), twoshot(32, 2, 1, 1)),
    backends(oneshot(32, 4), twoshot(64, 1, 2, 1), twoshot(64, 1, 1, 2)),
)
OTHER = backends(oneshot(32, 2), twoshot(32, 2, 1, 2), twoshot(32, 1, 1, 1))
CASES = [
    *(([ALONE, ALONE], GRIDS), ([THREE, PAIR], GRIDS), ([PAIR, WAVES], GRIDS)),
    *(([PAIR, ALONE, THREE], case) for case in (GRIDS, FP32)),
    *(([shape] * 2, ALL.next(differ=differ)) for shape in SHAPES for differ in (False, True)),
    ([OTHER] * 3, Sum(FEW, 384, torch.float16, weight_dtype=torch.float32)),
    *(([OTHER] * 3, Sum(FEW, 256, torch.float32, differ=differ)) for differ in (False, True)),
]


def library(count: int, case: Sum) -> str:
    return str(compile_emulated(case.config(count, case.tokens)))


def emulated(group: weft.Group, library: str, launches: list[Launch], case: Sum) -> None:
    launch = launches[group.rank]
    sizes = (1, 2, 9, MANY) if case.tokens == MANY else (FEW,)
    with make(group, case.tokens, case) as ar:
        entries = launch.install(ar, library)
        with watching(group, entries.library, ar.site.stride) as watch:
            for backend in dict.fromkeys(backend for backend, _ in launch.plans):
                for seed, tokens in enumerate(sizes):
                    now = case.next(tokens=tokens, seed=seed)
                    specs = quant_specs(group.device, case.hidden, group.rank)
                    # At the receiver other threads write a row than those that have read it to
                    # send it: what the peers made of it orders them, and that no watch follows.
                    every_call(
                        ar, now, backend, specs if tokens == case.tokens else [None],
                        in_place=not case.differ,
                    )  # fmt: skip
                play(ar, case.next(seed=9), backend)
        # Rows, trailers and calls say themselves of which round they are.
        slots = {"slots": range(HEADER_BYTES, 1 << 40)}
        assert ways(watch.events(), slots) == {"slots": {"writes relaxed sys", "reads relaxed sys"}}


@pytest.mark.parametrize(("launches", "case"), CASES)
def test_every_launch_has_the_bits_of_the_reference(ranks, launches, case):
    count = len(launches)
    ranks(count, "threads")(emulated, library(count, case), launches, case)


def half_a_row(group: weft.Group, library: str, launch: Launch, case: Sum, backend: str) -> str:
    """Rank 1 sends only the first half of each row: some lanes receive theirs, others never."""
    with make(group, case.tokens, case, first_timeout=0.5) as ar:
        launch.install(ar, library)
        reported = ""
        if group.rank == 0:
            sizes = ar.config
            size = (2 * (sizes.direct + sizes.owned), sizes.row_bytes)
            slots = ar.heap.tensor(size, torch.uint8, offset=sizes.rows_offset)
            slots[:, : sizes.row_bytes // 2] = 0
            x, weight = case.rows(0, group.device), case.shared(group.device)[1]
            norm = torch.full_like(x, 7.0)
            with pytest.raises(PeerTimeout) as caught:
                ar.fused(x, weight=weight, norm_out=norm, backend=backend)
            reported = str(caught.value)
            if launch is PAIR:
                assert bool((norm[:, case.hidden // 2 :] == 7.0).all()), "made without its rows"
            with pytest.raises(PeerTimeout):
                ar.fused(x, backend=backend)
        group.barrier()
        return reported


PLAIN = Sum(FEW, 384)
HALVES = [
    (shape, PLAIN.next(differ=differ), backend)
    for shape in SHAPES[::2]
    for differ in (False, True)
    for backend in BACKENDS
]


@pytest.mark.parametrize(("launch", "case", "backend"), [*HALVES, (PAIR, GRIDS, "oneshot")])
def test_kernels_end_when_half_of_every_row_is_missing(ranks, launch, case, backend):
    reported = ranks(2, "threads")(half_a_row, library(2, case), launch, case, backend)
    assert "did not arrive from rank 1" in reported[0]


ENTRY = """\
extern "C" __attribute__((visibility("default")))
void divide(const float* amax, const float* x, float* scale, float* quotient, unsigned count) {
    for (unsigned i = 0; i < count; ++i) {
        const weft::BlockScale row = weft::row_scale(__builtin_bit_cast(unsigned, amax[i]));
        float one[1] = {x[i]};
        weft::divide_by(one, row);
        scale[i] = row.scale;
        quotient[i] = one[0];
    }
}
"""


@pytest.fixture(scope="module")
def divider() -> ctypes.CDLL:
    text = "#include <weft/allreduce/epilogue.cuh>\n" + ENTRY
    return ctypes.CDLL(str(build_library(emulated_tree(), text)))


def divided(
    divider: ctypes.CDLL, amax: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale, quotient = torch.empty_like(x), torch.empty_like(x)
    places = [ctypes.c_void_p(t.data_ptr()) for t in (amax, x, scale, quotient)]
    divider.divide(*places, x.numel())
    return scale, quotient


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def test_every_pair_of_bfloat16_significands(divider):
    """Test amax of every significand in three sizes, and every x down to 2^-20 of it."""
    significands = 1 + torch.arange(128) / 128
    for power in (-30, -8, 0, 100):
        amax = (significands * 2.0**power).float()
        x = significands[:, None] * 2.0 ** -torch.arange(21) * 2.0**power
        x = torch.cat((x.flatten(), -x.flatten(), torch.tensor([0.0, -0.0]))).float()
        amax, x = (t.contiguous() for t in torch.meshgrid(amax, x, indexing="ij"))
        scale, quotient = divided(divider, amax, x)
        expected = torch.maximum(amax * torch.tensor(1 / 448), torch.tensor(2.0**-9 / 448))
        assert torch.equal(scale, expected)
        there = x.abs() <= amax
        wrong = (quotient.view(torch.int32) != (x / scale).view(torch.int32)) & there
        assert int(wrong.sum()) == 0


def test_any_float32(divider):
    generator = torch.Generator().manual_seed(7)
    count = 1 << 20
    amax = torch.rand(count, generator=generator) + 1
    amax *= 2.0 ** torch.randint(-140, 127, (count,), generator=generator)
    x = amax * (2 * torch.rand(count, generator=generator) - 1)
    x *= 2.0 ** -torch.randint(0, 24, (count,), generator=generator)
    scale, quotient = divided(divider, amax, x)
    assert torch.equal(e4m3(quotient), e4m3(x / scale))


WAIT = """\
#include <weft/allreduce/wait.cuh>
#include <thread>
using namespace weft;
constexpr Reduction R = {reduction};

// Returns the recorded nanoseconds of a wait for a vector of rank 1 that arrives after `delay_ns`.
extern "C" __attribute__((visibility("default")))
u64 record_wait_of(u64 delay_ns, bool polls_one) {{
    static ReductionShare<R> shares[R.ranks];
    static Mailbox box;
    Header& header = shares[0].header;
    header.ranks = R.ranks;
    header.living = ranks_below(R.ranks);
    header.deadline_ns = header.first_deadline_ns = 1ull << 40;
    std::memset(header.waits, 0, sizeof header.waits);
    ReduceArgs a{{}};
    a.site.base = reinterpret_cast<u64>(shares), a.site.stride = sizeof(shares[0]);
    a.site.mailbox = reinterpret_cast<u64>(&box);
    auto& rows = shares[0].inbox.direct[0];
    uint4* slot = reinterpret_cast<uint4*>(rows[0][0]);
    restore_sentinel(slot);
    std::thread peer([=] {{
        std::this_thread::sleep_for(std::chrono::nanoseconds(delay_ns));
        for (u32 i = 0; i < 4; ++i) __atomic_store_n(&(&slot->x)[i], 0u, __ATOMIC_RELEASE);
    }});
    emulated::launch({{1, 1, 1}}, [&] {{
        const Call<R> call(a);
        const PeerSlots slots{{slot, sizeof(rows[0]), Slot::direct}};
        uint4 row[R.ranks]{{}};
        row[1] = sentinel_vector();
        polls_one ? await_vectors<R, true>(call, slots, 0, 0, row)
                  : await_vectors<R, false>(call, slots, 0, 0, row);
    }});
    peer.join();
    return header.waits[0][1].skew.total_ns;
}}
"""


@pytest.mark.parametrize("polls_one", [False, True])
def test_a_wait_shorter_than_a_check_is_recorded_in_full(polls_one: bool) -> None:
    tree, short, long = emulated_tree(), "polls_per_check = 32;", "polls_per_check = 1u << 30;"
    assert short in tree["device/order.cuh"]
    tree["device/order.cuh"] = tree["device/order.cuh"].replace(short, long)
    text = WAIT.format(reduction=ALL.config(2, FEW).to_cpp())
    record = ctypes.CDLL(str(build_library(tree, text))).record_wait_of
    record.argtypes, record.restype = (ctypes.c_uint64, ctypes.c_bool), ctypes.c_uint64
    delay = 500_000_000  # on a busy machine each of the untimed polls may last a time slice
    assert record(delay, polls_one) > delay / 10
