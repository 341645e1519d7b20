# SPDX-License-Identifier: Apache-2.0
"""Plot a decode step by kernel, one bar per variant, from the results of `run.sh profile`.

profile_picture.py results.jsonl PICTURE.png
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from report import ROOT, Line, format_machine, read

sys.path.insert(0, str(ROOT))
from weft.bench.plot import (  # noqa: E402
    BASELINE_COLORS,
    TEXT_COLOR,
    WEFT_COLORS,
    import_pyplot,
    save_figure,
    style_axes,
)

# Substrings of kernel names; the first match counts, and other kernels are "other".
KINDS = {
    "router": ("topk", "gating", "moe_align", "count_and_sort", "bias_grouped", "route"),
    "experts": ("fused_moe", "grouped_", "silu", "act_and_mul", "moe_sum", "quantize_rows"),
    "weft's transfers": ("dispatch", "combine", "oneshot", "twoshot", "given"),
    "NCCL and other sums": ("nccl", "allreduce", "all_reduce", "cross_device", "allgather"),
    "attention": ("attn", "attention", "fwd_kernel", "rope", "rotary", "kv_buffer", "kv_cache"),
    "norms": ("norm",),
    "dense GEMMs": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitk"),
}


def kind_of(kernel: str) -> str:
    """Return a kernel's kind, by its name without template arguments."""
    name = kernel.lower().split("<")[0]
    matches = (kind for kind, words in KINDS.items() if any(word in name for word in words))
    return next(matches, "other")


def by_kind(result: dict[str, Any]) -> Counter[str]:
    """Return the us of a step by kind; kernels too short to be listed are "other"."""
    us_of_kind: Counter[str] = Counter()
    for kernel, us in result["kernels"].items():
        us_of_kind[kind_of(kernel)] += us
    us_of_kind["other"] += result["rest"]
    return us_of_kind


def draw(lines: list[Line], to: Path) -> None:
    """Draw stacked bars; the length is a step's GPU time."""
    plt = import_pyplot()
    figure, axes = plt.subplots(figsize=(8.0, 1.3 + 0.6 * len(lines)))
    kinds = [*KINDS, "other"]
    colours = dict(zip(kinds, [*WEFT_COLORS, *BASELINE_COLORS], strict=False))
    times = [by_kind(line["result"]) for line in lines]
    left = [0.0] * len(lines)
    for kind in kinds:
        widths = [each[kind] / 1e3 for each in times]
        if any(widths):
            axes.barh(range(len(lines)), widths, left=left, color=colours[kind], label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, length in enumerate(left):
        axes.text(length, row, f" {length:.2f}", va="center", color=TEXT_COLOR)
    names = [f"{line['variant']}, {line['requests']} a rank" for line in lines]
    axes.set_yticks(range(len(lines)), names)
    style_axes(axes)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.12)
    axes.set_xlabel("ms of GPU time in a decode step, rank 0")
    axes.set_title(f"{lines[0]['model']}: {format_machine(lines[0]['machine'])}", fontsize=7)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save_figure(figure, to)


def main() -> None:
    """Plot the results of one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    lines = [line for line in read([args.results]) if line["bench"] == "profile"]
    if not lines:
        sys.exit(f"{args.results} holds no line of run.sh profile")
    draw(lines, args.picture)


if __name__ == "__main__":
    main()
