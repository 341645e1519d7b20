"""Hopper's product compiles without a GPU, keeps its sums in registers and waits for no memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.alltoall.test_compile import numbers_of
from tests.emulator.machine_code import disassemble
from tests.recorded import NVRTC, reads
from weft.gemm.hopper import FP8_ROWS, SHARED_BYTES, Kind, WgmmaPlan
from weft.gemm.hopper_source import (
    SHARED,
    TABLE,
    ProductArgs,
    cuda_source,
    widths,
)
from weft.jit.args import verify
from weft.jit.cache import Cache
from weft.jit.nvrtc import CUDA_OPTIONS, compile_cubin

pytestmark = reads(tools=(NVRTC,))

FINISHES = ("store", "push", "gated_fp8")
TOLD = (64, 128, 256)  # heights whose pushed rows tell of themselves here


def kind_of(finish: str, rows: int, experts: int = 32) -> Kind:
    n, k = (4096, 7168) if finish == "gated_fp8" else (7168, 2048)
    return Kind(experts, n, k, WgmmaPlan(rows), finish, tells=finish == "push" and rows in TOLD)


def halves_of(finish: str, rows: int, operand: str, experts: int = 32) -> Kind:
    n, k = (5760, 2880) if finish == "gated" else (2880, 2880)
    return Kind(experts, n, k, WgmmaPlan(rows), finish, operand, operand, operand)


def compiled(kind: Kind, folder: Path) -> tuple[bytes, str]:
    """(cubin, what ptxas said)."""
    cubin = compile_cubin(
        cuda_source(kind.literal, kind.plan.block_rows, kind.operand),
        name="product",
        arch="sm_90a",
        options=(*CUDA_OPTIONS, "--ptxas-options=-v"),
        cache=Cache(folder),
    )
    (sidecar,) = folder.rglob("*.json")
    return cubin, json.loads(sidecar.read_text())["log"]


@pytest.mark.parametrize("rows", FP8_ROWS)
@pytest.mark.parametrize("finish", FINISHES)
def test_every_kind_compiles_into_registers_and_shared_memory(
    finish: str, rows: int, tmp_path: Path
):
    cubin, log = compiled(kind_of(finish, rows), tmp_path)
    verify(ProductArgs, numbers_of(cubin, TABLE.encode()))
    (shared,) = numbers_of(cubin, SHARED.encode())
    stage = 128 * (128 + rows) + 8 * rows + 32
    assert shared <= SHARED_BYTES
    assert WgmmaPlan(rows).stages(32) == 10 or shared + stage > SHARED_BYTES - 8 * 1024
    spills = [int(bytes_) for bytes_ in re.findall(r"(\d+) bytes spill stores", log)]
    assert sum(spills) <= (0 if rows <= 128 else 16), log
    assert "serialized" not in log, log


@pytest.mark.parametrize("rows", [32, 160, 256])
@pytest.mark.parametrize("finish", ["store", "push", "gated"])
def test_numbers_of_two_bytes_stay_on_the_tensor_cores(finish: str, rows: int, tmp_path: Path):
    """Nothing spills, and no sum leaves the tensor cores' registers before a tile's end."""
    operand, type_ = ("fp16", "") if rows == 160 else ("bf16", "BF16")
    cubin, log = compiled(halves_of(finish, rows, operand), tmp_path)
    verify(ProductArgs, numbers_of(cubin, TABLE.encode()))
    (shared,) = numbers_of(cubin, SHARED.encode())
    assert shared <= SHARED_BYTES
    full = shared + 128 * (128 + rows) > SHARED_BYTES - 8 * 1024
    assert WgmmaPlan(rows).stages(32, operand) == 10 or full
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}, log
    assert "serialized" not in log, log
    code = disassemble(cubin)
    found = re.findall(r"\bHGMMA\.64x(\d+)x16\.F32\.?(BF16|)\b", code)
    assert {(int(n), kind) for n, kind in found} == {(n, type_) for n in widths(rows)}
    assert "UTMALDG.2D.MULTICAST" in code
    assert ("UTMALDG.5D" in code) == (finish == "gated")
    assert re.search(r"STG?\.E\.\S*128", code) or re.search(r"ST\.E\.128", code)
    assert len(re.findall(r"MEMBAR\.\S*GPU", code)) <= 1


@pytest.mark.parametrize(
    "kind",
    [
        kind_of("gated_fp8", 128, 512),
        halves_of("push", 192, "bf16", 256),
    ],
    ids=lambda kind: f"{kind.operand}, {kind.experts} experts",
)
def test_shared_memory_suffices_for_any_number_of_experts(kind: Kind, tmp_path: Path):
    cubin, _ = compiled(kind, tmp_path)
    assert numbers_of(cubin, SHARED.encode())[0] <= SHARED_BYTES


@pytest.mark.parametrize("finish", FINISHES)
def test_its_code_is_tensor_cores_and_whole_vectors(finish: str, tmp_path: Path):
    """Every width of a product is there, rows leave by 16 bytes, no fence stands in a loop."""
    code = disassemble(compiled(kind_of(finish, 128), tmp_path)[0])
    shapes = {int(n) for n in re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3", code)}
    assert shapes == set(widths(128))
    assert "UTMALDG.2D.MULTICAST" in code
    assert ("UTMALDG.4D" in code) == (finish == "gated_fp8")
    strong = re.findall(r"STG?\.E\.128\.STRONG\.SYS", code)
    assert bool(strong) == (finish == "push"), "rows that tell are stored at system scope"
    assert re.search(r"STG?\.E\.\S*128", code) or re.search(r"ST\.E\.128", code)
    # One, before the first load; each would wait for all of a warp's stores.
    assert len(re.findall(r"MEMBAR\.\S*GPU", code)) <= 1
