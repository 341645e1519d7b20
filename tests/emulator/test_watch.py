# SPDX-License-Identifier: Apache-2.0
"""The emulator's race detection: messages between ranks with each kind of fault."""

import ctypes

import pytest
import torch

from tests.emulator.emulate import build_library, emulated_tree
from tests.emulator.watch import Watch
from weft.heap.header import Site

STRIDE = 4096
ROWS, FLAG, COUNT = 0, 2048, 2176  # in the share of rank 1; the counter in that of rank 0
# Rank 0: two CTAs of two warps store a row each, and the last of them sets the flag.
SENDER = """\
    const weft::Block team;
    const unsigned lane = team.lane(), row = blockIdx.x * team.lanes() + lane;
    {store}
    {gather}
    if (lane == 0 && {last}) {publish};
"""
# Rank 1: each of two CTAs reads all rows.
READER = """\
    const weft::Block team;
    if (team.lane() == 0) while ({wait} == 0) {{}}
    {spread}
    for (unsigned row = team.lane(); row < 2 * team.lanes(); row += team.lanes()) (void){load};
"""
RIGHT = {
    "store": "weft::store(rows + row, make_uint4(1, 2, 3, 4));",
    "gather": "__syncthreads();",
    "last": "weft::add_acq_rel(count, 1) == 1",
    "publish": "weft::store_release(flag, 1u)",
    "wait": "weft::load_acquire(flag)",
    "spread": "__syncthreads();",
    "load": "weft::load_peer_row(rows + row)",
}
WRONG = {
    "no thread is the last": {"last": "weft::add_acq_rel(count, 1) == 0"},
    "a counter that orders nothing": {"last": "weft::add_relaxed(count, 1) == 1"},
    "no barrier before the count": {"gather": ""},
    "a barrier of warps before the count": {"gather": "__syncwarp();"},
    "a flag of the GPU": {
        "publish": "__nv_atomic_store_n(flag, 1u, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_DEVICE)"
    },
    "a flag that orders nothing": {"publish": "weft::store_relaxed(flag, 1u)"},
    "a plain flag": {
        "publish": "emulated::store_words<unsigned, 1>(flag, {1}, emulated::weak, {})"
    },
    "a wait that orders nothing": {"wait": "weft::load_relaxed(flag)"},
    "a wait for this GPU": {"wait": "weft::load_acquire_local(flag)"},
    "no barrier after the wait": {"spread": ""},
    "rows that are posted and read as they are": {
        "store": "weft::post_vector(rows + row, make_uint4(1, 2, 3, 4));",
        "publish": "weft::store_relaxed(flag, 1u)",
    },
    "rows that are polled and were not posted": {
        "publish": "weft::store_relaxed(flag, 1u)",
        "load": "weft::poll_vector(rows + row)",
    },
    "rows beside their places": {
        "store": "weft::store((uint4*)((char*)(rows + row) + 4), make_uint4(1, 2, 3, 4));"
    },
}
POSTED = {  # these need no flag
    "store": "weft::post_vector(rows + row, make_uint4(1, 2, 3, 4));",
    "publish": "weft::store_relaxed(flag, 1u)",
    "load": "weft::poll_vector(rows + row)",
}
CASES = {"right": {}, "posted": POSTED, **WRONG}
ENTRY = """\
extern "C" __attribute__((visibility("default"))) void message_{i}(const weft::Site* site) {{
    auto* rows = reinterpret_cast<uint4*>(site->base + site->stride + {rows});
    auto* flag = reinterpret_cast<unsigned*>(site->base + site->stride + {flag});
    auto* count = reinterpret_cast<unsigned*>(site->base + {count});
    (void)rows, (void)flag, (void)count;
    const emulated::Grid grid = emulated::seen_from(*site, 2, {{2, 1, 64}});
    if (site->rank == 0) emulated::launch(grid, [=] {{
{sender}    }});
    else emulated::launch(grid, [=] {{
{reader}    }});
}}
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    entries = []
    for i, changes in enumerate(CASES.values()):
        parts = {**RIGHT, **changes}
        sender, reader = SENDER.format(**parts), READER.format(**parts)
        places = {"rows": ROWS, "flag": FLAG, "count": COUNT}
        entries.append(ENTRY.format(i=i, sender=sender, reader=reader, **places))
    text = "#include <weft/device/quantize_warp.cuh>\n" + "".join(entries)
    return ctypes.CDLL(str(build_library(emulated_tree(), text)))


def race_of(library: ctypes.CDLL, name: str, rounds: int = 1) -> str:
    """Return the race that is found when one rank's kernel happens to follow the other's."""
    memory = torch.zeros(2 * STRIDE + 64, dtype=torch.uint8)
    base = -(-memory.data_ptr() // 64) * 64
    watch = Watch(library, STRIDE)
    watch.begin()
    for _ in range(rounds):
        for rank in (0, 1):
            site = Site(base=base, stride=STRIDE, rank=rank)
            getattr(library, f"message_{list(CASES).index(name)}")(ctypes.byref(site))
    watch.end()
    return watch.race


@pytest.mark.parametrize("name", ["right", "posted"])
def test_an_ordered_message_is_no_race(library: ctypes.CDLL, name: str) -> None:
    assert race_of(library, name) == ""


@pytest.mark.parametrize("name", WRONG)
def test_an_unordered_message_is_a_race(library: ctypes.CDLL, name: str) -> None:
    assert race_of(library, name) != ""


def test_rows_stored_before_an_acknowledgement_are_a_race(library: ctypes.CDLL) -> None:
    """Nothing shows rank 0 that its rows were read, so it may not store the next ones."""
    assert "which read it" in race_of(library, "right", rounds=2)
