"""The pictures of the docs, drawn anew from the JSON files in benchmarks/.

python benchmarks/pictures.py
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.series import Series, load  # noqa: E402
from benchmarks.tables import EXCHANGES_4, MOE_8, PEERS, TABLES, reduce_floors  # noqa: E402
from weft.bench.allreduce import ReduceMeasurement, ReduceReport  # noqa: E402
from weft.bench.allreduce_cases import ReduceSettings  # noqa: E402
from weft.bench.allreduce_plot import plot_reduce  # noqa: E402
from weft.bench.cases import Settings  # noqa: E402
from weft.bench.layer_cases import LayerSettings  # noqa: E402
from weft.bench.layer_plot import draw_layer  # noqa: E402
from weft.bench.layer_report import LayerRow  # noqa: E402
from weft.bench.limits import layer_floor_us  # noqa: E402
from weft.bench.moe import Measurement, Report  # noqa: E402
from weft.bench.peers import Peer, matching_layers, matching_peers, matching_reduces  # noqa: E402
from weft.bench.plot import line, plot, scale  # noqa: E402
from weft.bench.rivals import RivalRun, beside  # noqa: E402
from weft.bench.routing import Traffic  # noqa: E402
from weft.bench.style import (  # noqa: E402
    COLOURS,
    INK,
    QUIET,
    RIVALS,
    matplotlib_pyplot,
    plain,
    save,
)
from weft.bench.summary import Spread  # noqa: E402

IMAGES = ROOT / "docs" / "images"
_DASHES = (0, (4, 3))


def runs_of(data: dict[str, Any]) -> list[RivalRun]:
    """The other libraries of a run."""
    found = []
    for each in data["peers"]:
        samples = {int(tokens): phases for tokens, phases in each["samples_us"].items()}
        found.append(RivalRun(**{**each, "samples_us": samples}))
    return found


def moe_report(data: dict[str, Any]) -> Report:
    """A run of `weft bench moe` from its JSON."""
    results = []
    for each in data["results"]:
        known = {field.name for field in fields(Measurement)}
        found = {name: value for name, value in each.items() if name in known}
        found |= {"traffic": Traffic(**each["traffic"]), "samples": each["samples_us"]}
        found["cold"], found["beside"] = each.get("cold_samples_us"), each.get("beside_samples_us")
        results.append(Measurement(**found))
    return Report(settings_of(Settings, data), data["machine"], results)


def reduce_report(data: dict[str, Any]) -> ReduceReport:
    """A run of `weft bench allreduce` from its JSON."""
    results = []
    for each in data["results"]:
        found = {name: value for name, value in each.items() if name != "samples_us"}
        results.append(ReduceMeasurement(**found, samples=each["samples_us"]))
    refused, memory = data["refused"], data["memory_bytes"]
    settings = settings_of(ReduceSettings, data)
    return ReduceReport(settings, data["machine"], results, refused, memory)


def settings_of(kind: Any, data: dict[str, Any]) -> Any:
    """Settings from JSON: lists were tuples."""
    found = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data["settings"].items()
    }
    return kind(**found)


def draw_moe(path: Path, data: dict[str, Any]) -> None:
    """One run beside what stood in it, and beside the records of what did not."""
    report = moe_report(data)
    day = str(report.machine["date"])[:10]
    peers = beside(matching_peers(report.settings), runs_of(data), day)
    plot(path, report, peers)


def draw_reduce(path: Path, data: dict[str, Any]) -> None:
    """The same for an all-reduce."""
    report = reduce_report(data)
    day = str(report.machine["date"])[:10]
    plot_reduce(path, report, beside(matching_reduces(report.settings), runs_of(data), day))


def draw_layers(path: Path) -> None:
    """DeepSeek-V3's layer by expert on 4 ranks; published figures of 8 GPUs beside it."""
    data = load(EXCHANGES_4)[1]
    settings = settings_of(LayerSettings, data)
    peers = matching_layers(settings)
    rows = []
    for row in data["rows"]:
        tokens, found = row["tokens"], data["loads"][str(row["tokens"])]
        if tokens < 8:
            continue  # nobody else has these
        floor = layer_floor_us(found["hbm_bytes"], found["wire_bytes"], data["machine"]["gpus"])
        us = Spread(**row["us"])
        assert floor is not None
        others = {peer.label: peer.us[tokens] for peer in peers if tokens in peer.us}
        rows.append(
            LayerRow(
                tokens=tokens,
                overlap=row["overlap"],
                us=us,
                gain=row["gain"],
                floor=floor,
                ratio=us.median / floor.least,
                imbalance=row["imbalance"],
                rivals=others,
                stages={},
                hiding=None,
            )
        )
    title = (
        "deepseek-v3, fp8 experts, 4 ranks of 32 experts, rows by expert, uniform routing\n"
        "published figures: 8 GPUs of 32 experts, neither router nor shared expert"
    )
    draw_layer(path, rows, title, data["machine"])


def draw_reduces(path: Path) -> None:
    """Both hidden sizes on 8 ranks, by the ladder of launch shapes."""
    pyplot = matplotlib_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(13.0, 5.0), dpi=160, layout="constrained")
    for axes, hidden in zip(panels, (7168, 4096), strict=True):
        rows = dict(TABLES[f"allreduce-8-{hidden}"])
        weft = rows["weft"]
        assert isinstance(weft, Series)
        sizes = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
        for index, peer in enumerate(reduces_beside(hidden)):
            points = {tokens: peer.us[tokens] for tokens in sizes if tokens in peer.us}
            colour = RIVALS[index % len(RIVALS)]
            axes.plot(*line(points), color=colour, lw=1.4, marker="s", ms=3.5, label=peer.label)
        mine = {tokens: weft[tokens] for tokens in sizes}
        orange = COLOURS["onesided"]
        axes.plot(*line(mine), color=orange, lw=2.2, marker="o", ms=4, label="weft")
        floors = reduce_floors(8, hidden)
        least = {tokens: floors[tokens] for tokens in sizes}
        axes.plot(*line(least), color=INK, lw=1.1, ls=_DASHES, label="floor: NVLink bytes and ways")
        scale(axes, sizes, pyplot)
        plain(axes)
        axes.set_xlabel("tokens")
        axes.set_ylabel("one call, µs")
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


def reduces_beside(hidden: int) -> list[Peer]:
    """The records of 8 ranks with the norm."""
    given: dict[str, Any] = load("allreduce-4xH200-2026-11-21.json")["runs"][0]["settings"]
    settings = settings_of(ReduceSettings, {"settings": {**given, "ranks": 8, "hidden": hidden}})
    assert load(PEERS)["allreduce"]
    return matching_reduces(settings)


def main() -> None:
    """Draw all of them."""
    draw_moe(IMAGES / "moe-8xH200.png", {**load(MOE_8), "peers": load(MOE_8).get("peers", [])})
    draw_layers(IMAGES / "layer-4xH200.png")
    draw_reduces(IMAGES / "allreduce-8xH200.png")
    for record in sorted((ROOT / "benchmarks").glob("rivals-*.json")):
        data, gpus = load(record.name), record.stem.split("-")[1]
        draw_moe(IMAGES / f"rivals-moe-{gpus}.png", data["moe"])
        draw_moe(IMAGES / f"rivals-moe-fp8-{gpus}.png", data["moe-fp8-both"])
        draw_reduce(IMAGES / f"rivals-allreduce-{gpus}.png", data["allreduce"])
    print(f"drew {IMAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
