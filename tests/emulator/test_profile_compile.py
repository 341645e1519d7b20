"""Profiled kernels compile everywhere, and what profiling keeps costs no registers that spill."""

from __future__ import annotations

import re
import struct
from dataclasses import replace

import pytest

from tests.alltoall.test_compile import SHAPES
from tests.recorded import NVRTC, reads
from weft.alltoall.kernels import cuda_program
from weft.runtime.timeline import DEFINE

pytestmark = reads(tools=(NVRTC,))

FRAME_SIZE = 0x11  # attribute of a kernel in .nv.info: bytes of local memory, where spills go
PLAIN = SHAPES["deepseek-v3"]
# 32 ranks with a top k of 32 use all registers: there 8 bytes are spilled, once for each CTA.
TIGHT = ("32 ranks, mapped",)


def frames(cubin: bytes) -> dict[str, int]:
    """Bytes of local memory of each kernel in a cubin, by its entry."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQII", cubin, start + size * i) for i in range(count)]
    names = heads[names_at][4]
    by_name = {_text(cubin, names + head[0]): head for head in heads}
    symbols = next(head for head in heads if head[1] == 2)
    strings = heads[symbols[6]][4]
    at, found = by_name[".nv.info"][4], {}
    end = at + by_name[".nv.info"][5]
    while at < end:
        kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if kind == 4 and attribute == FRAME_SIZE:
            symbol, value = struct.unpack_from("<II", cubin, at + 4)
            (name,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
            found[re.sub(r"^weft_[a-z]+_", "", _text(cubin, strings + name))] = value
        at += 4 + (length if kind == 4 else 0)
    return found


def _text(raw: bytes, at: int) -> str:
    return raw[at : raw.index(b"\0", at)].decode()


@pytest.mark.parametrize(
    "shape",
    [
        *(SHAPES[name] for name in SHAPES if name not in TIGHT),
        replace(PLAIN, combine="push"),
        replace(PLAIN, combine="push_fp8"),
        replace(PLAIN, quant="fp8", row_bytes=(7168, 224)),
    ],
)
def test_profiling_spills_nothing_on_hopper(shape):
    program = cuda_program(shape, 1, split_phase=True)
    plain = frames(program.cubin("sm_90a"))
    profiled = frames(program.cubin("sm_90a", defines=(DEFINE,)))
    assert {"dispatch", "combine"} <= plain.keys()
    assert profiled == plain == dict.fromkeys(plain, 0)


@pytest.mark.parametrize("name", TIGHT)
def test_where_registers_are_short_profiling_spills_one_word(name):
    profiled = frames(cuda_program(SHAPES[name], 1).cubin("sm_90a", defines=(DEFINE,)))
    assert max(profiled.values()) <= 16
