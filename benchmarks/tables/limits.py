"""What the machine allows: bandwidths, and costs that no kernel avoids."""

from __future__ import annotations

from benchmarks.series import load, series
from benchmarks.tables.sources import PROBES, Tables

LIMITS = load(PROBES)


def limit(name: str) -> float:
    """One number of what the machine allows."""
    return float(LIMITS[name])


TABLES: Tables = {
    "probes": [
        ("push, 16-byte stores", series(PROBES + "/gb_per_s_by_ctas/push, 16-byte stores/*")),
        ("pull, 16-byte loads", series(PROBES + "/gb_per_s_by_ctas/pull, 16-byte loads/*")),
        (
            "TMA bulk store (1 thread a CTA, 16 KiB chunks, 8 stages)",
            series(PROBES + "/gb_per_s_by_ctas/TMA bulk store/*"),
        ),
    ],
    "costs": [
        ("barrier of 8 GPUs inside a kernel", [limit("barrier_of_8_gpus_in_a_kernel_us")]),
        ("empty kernel in a graph", [limit("empty_kernel_in_a_graph_us")]),
        (
            "launch from the host: `cuda.bindings`, ctypes, C",
            [tuple(LIMITS["host_launch_us"].values())],
        ),
        ("HBM read", [limit("hbm_read_tb_per_s")]),
    ],
}
