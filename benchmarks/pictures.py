"""The pictures of the docs, drawn anew from the JSON files in benchmarks/.

python benchmarks/pictures.py [FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.series import Series, load  # noqa: E402
from benchmarks.tables import TABLES  # noqa: E402
from benchmarks.tables.allreduce import reduce_floors  # noqa: E402
from benchmarks.tables.alltoall import MOE_8  # noqa: E402
from benchmarks.tables.layer import EXCHANGES_4  # noqa: E402
from weft.bench.allreduce import ReduceCase  # noqa: E402
from weft.bench.case import Case  # noqa: E402
from weft.bench.layer import LayerCase  # noqa: E402
from weft.bench.limits import layer_floor_us, pair_floor_us  # noqa: E402
from weft.bench.moe import MoECase  # noqa: E402
from weft.bench.peers import matching  # noqa: E402
from weft.bench.plot import DASHES, line, plot, scale  # noqa: E402
from weft.bench.report import Row, read_rows  # noqa: E402
from weft.bench.style import (  # noqa: E402
    BASELINES,
    COLOURS,
    INK,
    QUIET,
    matplotlib_pyplot,
    plain,
    save,
)

IMAGES = ROOT / "docs" / "images"


def with_records(rows: Sequence[Row], case: Case) -> list[Row]:
    """Rows beside the records of this case, in place of those that stood beside them."""
    peers = matching(case)
    return [
        replace(row, baselines={p.label: p.us[row.tokens] for p in peers if row.tokens in p.us})
        for row in rows
    ]


def recorded_moe() -> tuple[MoECase, list[Row]]:
    """The recorded all-to-all of 8 ranks, beside the records of other libraries."""
    data = load(MOE_8)
    given, gpus = data["settings"], data["machine"]["gpus"]
    names = ("ranks", "hidden", "top_k", "experts", "dtype", "payload")
    case = MoECase(
        device="cuda",
        tokens=tuple(given["tokens"]),
        routing=given["router"],
        **{name: given[name] for name in names},
    )
    sent = {each["tokens"]: each["traffic"]["wire"] for each in data["results"]}
    rows = []
    for row in read_rows(data):
        if row.phase == "pair":
            wire = sent[row.tokens]
            out, back = wire * case.sent_bytes, wire * case.returned_bytes
            rows.append(replace(row, floor=pair_floor_us(out, back, gpus)))
    return case, with_records(rows, case)


def draw_layers(path: Path) -> None:
    """DeepSeek-V3's layer by expert on 4 ranks; published figures of 8 GPUs beside it."""
    data = load(EXCHANGES_4)[1]
    given, gpus = data["settings"], data["machine"]["gpus"]
    sizes = {name: given[name] for name in ("ranks", "model", "dtype", "experts", "routing")}
    sizes["mode"] = {"rank": "throughput", "expert": "low_latency"}[given["exchange"]]
    case = LayerCase(device="cuda", tokens=tuple(given["tokens"]), **sizes)
    rows = []
    for row in read_rows(data):
        load_ = data["loads"][str(row.tokens)]
        floor = layer_floor_us(load_["hbm_bytes"], load_["wire_bytes"], gpus)
        if floor is not None and row.tokens >= 8:  # nobody else has fewer
            rows.append(replace(row, floor=floor.least))
    title = (
        "deepseek-v3, fp8 experts, 4 ranks of 32 experts, low-latency mode, uniform routing\n"
        "published figures: 8 GPUs of 32 experts, neither router nor shared expert"
    )
    plot(path, with_records(rows, case), title, data["machine"])


def draw_reduces(path: Path) -> None:
    """Both hidden sizes on 8 ranks, the best launch shape of each size."""
    pyplot = matplotlib_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(13.0, 5.0), dpi=160, layout="constrained")
    for axes, hidden in zip(panels, (7168, 4096), strict=True):
        weft = dict(TABLES[f"allreduce-8-{hidden}"])["weft"]
        assert isinstance(weft, Series)
        sizes = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
        case = ReduceCase(ranks=8, device="cuda", tokens=tuple(sizes), hidden=hidden)
        for index, peer in enumerate(matching(case)):
            points = {tokens: peer.us[tokens] for tokens in sizes if tokens in peer.us}
            colour = BASELINES[index % len(BASELINES)]
            axes.plot(*line(points), color=colour, lw=1.4, marker="s", ms=3.5, label=peer.label)
        mine = {tokens: weft[tokens] for tokens in sizes}
        axes.plot(*line(mine), color=COLOURS[0], lw=2.2, marker="o", ms=4, label="weft")
        floors = reduce_floors(8, hidden)
        least = {tokens: floors[tokens] for tokens in sizes}
        axes.plot(*line(least), color=INK, lw=1.1, ls=DASHES, label="floor: NVLink bytes and ways")
        scale(axes, sizes, pyplot)
        plain(axes)
        axes.set_xlabel("tokens")
        axes.set_ylabel("one call, us")
        title = f"8 ranks, hidden {hidden}, bf16\nsum, residual and RMSNorm"
        axes.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
        axes.legend(frameon=False, loc="upper left", labelcolor=INK, fontsize=8)
    machine = (
        "8 x NVIDIA H200 (SXM, NVLink4), one host, multicast off, 2026-11-20; CUDA graphs, median, "
        "slowest rank. Reckoned: the sum's time and what torch's norm added to NCCL's."
    )
    figure.text(0.012, -0.035, machine, fontsize=7.5, color=QUIET)
    save(figure, path)
    pyplot.close(figure)


def main() -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=IMAGES)
    folder = parser.parse_args().folder
    case, rows = recorded_moe()
    plot(folder / "moe-8xH200.png", rows, case.title(), load(MOE_8)["machine"])
    draw_layers(folder / "layer-4xH200.png")
    draw_reduces(folder / "allreduce-8xH200.png")
    print(f"drew {folder}")


if __name__ == "__main__":
    main()
