# SPDX-License-Identifier: Apache-2.0
"""Print the tables of docs/user/sglang.md and docs/user/vllm.md from results of an engine's run.sh.

    report.py results.jsonl [...]

The newest line of each case counts. Each table has its machine, date and commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from weft.bench.machine import format_machine  # noqa: E402

Line = dict[str, Any]
SERVING = ("decode", "deepseek")
COLUMNS = (  # of serving: heading, field and decimals
    ("between tokens, median, ms", "median_itl_ms", 2),
    ("p99, ms", "p99_itl_ms", 2),
    ("decode step, ms", "step_ms", 2),
    ("first token, median, ms", "median_ttft_ms", 0),
    ("output tokens/s", "output_throughput", 0),
)


def read(files: Iterable[Path]) -> list[Line]:
    """Return the newest line of each case, in the order of the cases' first lines."""
    newest_of: dict[str, Line] = {}
    for file in files:
        for number, text in enumerate(file.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
                newest_of[case_of(line)] = newest(newest_of.get(case_of(line)), line)
            except (ValueError, KeyError, TypeError) as error:
                sys.exit(
                    f"{file}:{number} is not a result of run.sh: {type(error).__name__}: {error}"
                )
    return list(newest_of.values())


def case_of(line: Line) -> str:
    """Return the identity of a measurement."""
    words = ("bench", "variant", "model", "gpus", "layers", "requests", "batch", "input", "output")
    case = [line.get(word) for word in (*words, "against")]
    return json.dumps([*case, line["machine"]["gpus"]])


def newest(old: Line | None, new: Line) -> Line:
    """Return the line that was written last."""
    return new if old is None or new["date"] >= old["date"] else old


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: Any, decimals: int) -> str:
    """Format a cell; empty if not measured."""
    return "" if value is None else f"{value:.{decimals}f}"


def times(old: Any, new: Any) -> str:
    """Format the ratio of old to new."""
    return "" if not old or not new else f"{old / new:.2f}"


def serving(lines: list[Line]) -> str:
    """Return a row per variant and level, with the ratio to stock's time between tokens."""
    stock = {
        each["requests"]: each["result"]["median_itl_ms"]
        for each in lines
        if each["variant"] == "stock"
    }
    rows = []
    for each in sorted(lines, key=lambda line: line["requests"]):
        result = each["result"]
        cells = [number(result.get(field), decimals) for _, field, decimals in COLUMNS]
        faster = times(stock.get(each["requests"]), result["median_itl_ms"])
        rows.append([str(each["requests"]), each["variant"], *cells, faster])
    return table(["requests a rank", "way", *(c[0] for c in COLUMNS), "stock / it"], rows)


def tensor_parallel(lines: list[Line]) -> str:
    """Return a row per variant, with decode and prefill latency of each batch."""
    batches = sorted({each["batch"] for each in lines})
    rows = []
    for name in dict.fromkeys(each["variant"] for each in lines):
        own = {each["batch"]: each["result"] for each in lines if each["variant"] == name}
        cells = []
        for field in ("median_decode_latency", "prefill_latency"):
            cells += [
                number(own[batch][field] * 1e3 if batch in own else None, 2) for batch in batches
            ]
        rows.append([name, *cells])
    heads = [f"{what} {batch}, ms" for what in ("decode", "prefill") for batch in batches]
    return table(["all-reduce", *heads], rows)


def arithmetic(lines: list[Line]) -> str:
    """Return right answers of a trained model, and texts equal to the first server's."""
    rows = [
        [
            each["variant"],
            str(each["gpus"]),
            f"{100 * each['result']['right']:.1f} %" if "right" in each["result"] else "",
            f"{100 * each['result']['equal']:.1f} %",
            str(each["result"]["questions"]),
        ]
        for each in lines
    ]
    return table(["way", "GPUs", "right", "texts equal to the first row's", "questions"], rows)


def profile(lines: list[Line]) -> str:
    """Return the largest kernels of a decode step."""
    rows = []
    for each in lines:
        result = each["result"]
        top = sorted(result["kernels"].items(), key=lambda one: -one[1])[:5]
        named = ", ".join(f"{name.split('(')[0].split('<')[0][-40:]} {us:.0f}" for name, us in top)
        rows.append([each["variant"], str(each["requests"]), number(result["us"], 0), named])
    return table(["way", "requests a rank", "GPU us a step", "largest kernels, us"], rows)


TABLES: dict[str, Callable[[list[Line]], str]] = {
    **dict.fromkeys(SERVING, serving),
    "glm": tensor_parallel,
    "arithmetic": arithmetic,
    "profile": profile,
}


def report(lines: list[Line]) -> str:
    """Return all tables that these lines fill; `load` and `elastic` have none."""
    parts = []
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in (each for each in lines if each["bench"] in TABLES):
        any_gpus = line["bench"] == "arithmetic"  # its table has all numbers of GPUs
        sizes = () if any_gpus else (line["gpus"], line.get("layers"), line.get("input"))
        key = (line["bench"], line["model"], *sizes, *line["machine"]["gpus"][:1])
        groups.setdefault(key, []).append(line)
    for group in groups.values():
        first = group[0]
        about = [first["model"]]
        if first.get("layers"):
            about.append(f"{first['layers']} layers")
        if first.get("input"):
            about.append(f"{first['input']} tokens in, {first['output']} out")
        machines = dict.fromkeys(format_machine(each["machine"]) for each in group)
        caption = f"{first['bench']}: {', '.join(about)}; {'; '.join(machines)}."
        parts.append(f"{caption}\n\n{TABLES[first['bench']](group)}\n")
    return "\n".join(parts)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    print(report(read(parser.parse_args().files)), end="")


if __name__ == "__main__":
    main()
