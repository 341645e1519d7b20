"""What baselines.sh measured, as one file in benchmarks/ and as a section of the notebook."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks"
DOCUMENT = RECORDS / "notebook.md"
WIDTH = 140  # columns of prose in docs
BEGIN, END = "<!-- baselines: begin -->", "<!-- baselines: end -->"
PARTS = ("moe", "moe-fp8-out", "moe-fp8-both", "allreduce", "lowlatency", "lowlatency-reduced")


def take_in(out_dir: Path) -> Path:
    """Put what lies in a folder of baselines.sh into one file, and its section into the document.

    What a later step did not write is left out. Raises FileNotFoundError where nothing was written.
    """
    paths = {part: out_dir / f"baselines-{part}.json" for part in PARTS}
    found = {part: json.loads(path.read_text()) for part, path in paths.items() if path.is_file()}
    if not found:
        names = ", ".join(path.name for path in paths.values())
        raise FileNotFoundError(f"{out_dir} has none of {names}")
    machine = next(iter(found.values()))["machine"]
    name = machine["gpus"][0].removeprefix("NVIDIA ")
    record = RECORDS / f"baselines-{len(machine['gpus'])}x{name}-{machine['date'][:10]}.json"
    for old in records():
        old.unlink()
    record.write_text(json.dumps(_rounded(found), indent=None, separators=(", ", ": ")) + "\n")
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{section(record)}{after}")
    return record


def records() -> list[Path]:
    """The files that are there; those of before 2026-11-23 are named rivals."""
    return sorted([*RECORDS.glob("baselines-*.json"), *RECORDS.glob("rivals-*.json")])


def latest() -> Path | None:
    """The file that is there, or None."""
    return next(iter(records()), None)


def section(record: Path | None) -> str:
    """The section between its marks, made of the record."""
    if record is None:
        return f"{BEGIN}\n{END}"
    data = json.loads(record.read_text())
    first = next(iter(data.values()))["machine"]
    code = first.get("weft") or {}
    commit, headers = str(code.get("commit", "unknown"))[:12], str(code.get("headers"))[:12]
    source = f"kernels of digest {headers}" if commit == "unknown" else f"weft {commit}"
    lines = [
        BEGIN,
        f"### Other libraries in the same run, {len(first['gpus'])} GPUs",
        "",
        textwrap.fill(
            f"{len(first['gpus'])} x {first['gpus'][0]}, driver {first['driver']}, "
            f"CUDA {first['cuda']}, torch {first['torch']}, {first['date'][:10]}, {source}; "
            "`benchmarks/baselines.sh`, us, median, slowest rank, graphs of 50 calls, 15 replays; "
            "weft's bits are compared with the reference before and after, others' sums before, "
            f"within a tolerance (`benchmarks/{record.name}`).",
            WIDTH,
            break_on_hyphens=False,
        ),
        "",
    ]
    moe = [part for part in ("moe", "moe-fp8-out", "moe-fp8-both") if part in data]
    if moe:
        lines += [
            "us for a pair of dispatch and combine, perfect routing. FlashInfer runs without its "
            "sanitize kernel; with FP8 out it is given",
            "numbers and scales, where weft quantises in dispatch; its low-precision combine casts "
            "to e4m3 without scales, in its workspace",
            'or, "staged", from the experts\' own tensor:',
            "",
        ]
        rows = [row for part in moe for row in _moe_rows(data[part])]
        lines += [*_table("Tokens a rank", rows), ""]
    if "allreduce" in data:
        found = data["allreduce"]
        lines += [
            "us for one all-reduce with residual and RMSNorm, hidden "
            f"{found['settings']['hidden']}, bf16. torch's sums are followed by its own add and "
            "`rms_norm`:",
            "",
            *_table("Tokens", _reduce_rows(found)),
            "",
        ]
    reduced = "weft, sums at the sender, FP8 back"
    # Records of before 2026-11-23 name the reduced traffic lean.
    names = {"lowlatency": "weft", "lowlatency-reduced": reduced, "lowlatency-lean": reduced}
    low = [part for part in names if part in data]
    if low:
        rows = [(names[part], _medians(data[part], "pair")) for part in low]
        lines += [
            "us for a pair of the low-latency all-to-all, perfect routing, FP8 out:",
            "",
            *_table("Tokens a rank", rows),
            "",
        ]
    if failed := _failed(data):
        lines += ["No figure of: " + "; ".join(failed) + ".", ""]
    return "\n".join([*lines, END])


def _moe_rows(run: dict[str, Any]) -> list[tuple[str, dict[int, float]]]:
    wire = run["facts"]["wire"] if "facts" in run else run["wire"]["rows"]
    ours = (("onesided", f"weft: {wire}"), ("collective", "weft on NCCL, bf16 back"))
    rows = [(name, _medians(run, "pair", backend)) for backend, name in ours]
    return [*(row for row in rows if row[1]), *_others(run, "pair")]


def _reduce_rows(run: dict[str, Any]) -> list[tuple[str, dict[int, float]]]:
    return [("weft, auto", _medians(run, "call")), *_others(run, "call")]


def _others(run: dict[str, Any], phase: str) -> list[tuple[str, dict[int, float]]]:
    found = []
    for each in run["peers"]:
        if each["status"] == "measured":
            times = {
                int(tokens): max(statistics.median(rank) for rank in phases[phase])
                for tokens, phases in each["samples_us"].items()
            }
            found.append((_name(each), times))
    return found


def _name(run: dict[str, Any]) -> str:
    name = f"{run['name']} {run['version']}".strip()
    return f"{name}, {run['setting']}" if run.get("setting") else name


def _medians(run: dict[str, Any], phase: str, variant: str | None = None) -> dict[int, float]:
    """Of one variant by tokens; records before 2026-11-23 have it as backend, and samples apart."""
    found = {}
    for each in run["results"]:
        if variant in (None, each.get("variant", each.get("backend"))):
            samples = each.get("samples_us") or each["samples"]
            ranks = samples[phase] if isinstance(samples, dict) else samples
            found[each["tokens"]] = max(statistics.median(rank) for rank in ranks)
    return found


def _failed(data: dict[str, Any]) -> list[str]:
    """Other libraries that are installed and have no figure, and why."""
    quiet = ("measured", "not installed", "not compared")
    found = [
        f"{_name(each)} ({part}: {each['status']})"
        for part, run in data.items()
        for each in run.get("peers", [])
        if not each["status"].startswith(quiet)
    ]
    return list(dict.fromkeys(found))


def _table(corner: str, rows: list[tuple[str, dict[int, float]]]) -> list[str]:
    sizes = sorted({tokens for _, times in rows for tokens in times})
    head = f"| {corner} | " + " | ".join(map(str, sizes)) + " |"
    lines = [head, "|---" * (len(sizes) + 1) + "|"]
    for name, times in rows:
        cells = [f"{times[size]:.1f}" if size in times else "" for size in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _rounded(value: Any) -> Any:
    """Samples to a nanosecond: more is no figure."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
