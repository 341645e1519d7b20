"""What the hardware allows, as far as it was measured: the floor that every row is held against.

Source: one host of 8 x NVIDIA H200 (NVLink4, NVSwitch), 2026-11-20; the file in benchmarks/ names
driver and torch. Plain 16-byte stores of 132 CTAs push 334 GB/s per GPU and direction; loads pull
306, so a combine that pulls cannot quite reach a floor that counts 334 both ways. A pair of
dispatch and combine cannot do without two barriers of 8 GPUs (1.5 us each) and two kernels in a
graph (0.8 us each): 4.6 us, rounded to 5. An all-reduce is one kernel and one or two such ways
through the links: 2.3 and 3.8 us. Its memory was read at 4.37 TB/s; its data sheet says 4.8.
"""

from __future__ import annotations

from dataclasses import dataclass

NVLINK_GB_PER_S = 334.0
PAIR_FIXED_US = 5.0
ONE_WAY_FIXED_US, TWO_WAY_FIXED_US = 2.3, 3.8
HBM_READ_TB_PER_S, HBM_SHEET_TB_PER_S = 4.37, 4.8
GPU = "H200"


def pair_floor_us(dispatch_bytes: int, combine_bytes: int, gpus: list[str]) -> float | None:
    """Return the least time in us of one dispatch + combine, or None where nothing was measured.

    dispatch_bytes, combine_bytes: bytes that leave or enter the busiest rank, each way.
    gpus: the ranks' GPU names; empty for CPU ranks.
    """
    if not gpus or any(GPU not in name for name in gpus):
        return None
    return (dispatch_bytes + combine_bytes) / (NVLINK_GB_PER_S * 1e3) + PAIR_FIXED_US


def allreduce_floor_us(payload: int, ranks: int, gpus: list[str]) -> float | None:
    """Return the least time in us of one all-reduce, or None where nothing was measured.

    payload: bytes of one rank's rows.  gpus: as in pair_floor_us.

    The least over what a rank may do: send its rows to every peer, one way through the links; or
    send each row to an owner and each sum to all, two ways.
    """
    if not gpus or any(GPU not in name for name in gpus):
        return None
    once, twice = (ranks - 1) * payload, 2 * (ranks - 1) / ranks * payload
    return min(
        once / (NVLINK_GB_PER_S * 1e3) + ONE_WAY_FIXED_US,
        twice / (NVLINK_GB_PER_S * 1e3) + TWO_WAY_FIXED_US,
    )


@dataclass(frozen=True, slots=True)
class LayerFloor:
    """Least times in us of one MoE layer: for its memory as measured and by the data sheet, and for
    its links. Work that overlaps perfectly takes the largest of them, none less."""

    memory: float
    memory_sheet: float
    links: float

    @property
    def least(self) -> float:
        """What was measured allows no layer to be faster."""
        return max(self.memory, self.links)


def layer_floor_us(hbm_bytes: int, wire_bytes: int, gpus: list[str]) -> LayerFloor | None:
    """Return the floors of one MoE layer, or None where nothing was measured.

    hbm_bytes: that the busiest rank moves through its memory.   wire_bytes: that leave or enter the
    busiest rank, both ways added.   gpus: as in pair_floor_us.
    """
    if not gpus or any(GPU not in name for name in gpus):
        return None
    return LayerFloor(
        memory=hbm_bytes / (HBM_READ_TB_PER_S * 1e6),
        memory_sheet=hbm_bytes / (HBM_SHEET_TB_PER_S * 1e6),
        links=wire_bytes / (NVLINK_GB_PER_S * 1e3),
    )
