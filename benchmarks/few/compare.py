"""Time the kernels for few SMs beside what they were before, and beside single changes to them.

    python benchmarks/few/compare.py [--ranks 4,2] [--sms 8,16] [--tokens 256,2048]
        [--variants before,now,fence,own] [--beside matmul] [--limit 540] [--json FILE]

A variant is a copy of the package with another few.cuh. `weft bench moe` runs on it, and checks
every byte before and after timing. `--cpu` rehearses the script on CPU ranks; they run no few.cuh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROW = 14336  # bytes of a row of 7168 bf16
WHOLE = "fence_for_bulk();  // behind the peers' flags, and the adders' reads of this stage"
SEND = """        if (lane == 0) {
            ring.loaded[i % stages].await(i / stages & 1);
            store_row<S>(ring, a.site, i, token, r.destinations);
            bulk_wait_read<RowRing<S>::leaving>();
            if (token + ahead * stride < count)
                load_row<S>(ring, a, i + ahead, token + ahead * stride);
        }
"""
OWN = """        const bool here = r.destinations >> a.site.rank & 1;
        ring.loaded[i % stages].await(i / stages & 1);
        if (lane == 0) {
            store_row<S>(ring, a.site, i, token, r.destinations & ~(1u << a.site.rank));
            bulk_wait_read<RowRing<S>::leaving>();
            if (token + ahead * stride < count) {
                fence_shared_for_bulk();
                load_row<S>(ring, a, i + ahead, token + ahead * stride);
            }
        }
        if (here) {
            const uint4* row = reinterpret_cast<const uint4*>(ring.row[i % stages]);
            uint4* slot = slot_in<S, 0, uint4>(a.site, a.site.rank, token);
#pragma unroll 7
            for (u32 v = lane; v < S.row_bytes[0] / 16; v += warp_lanes) store(slot + v, row[v]);
        }
"""
FORMAT = (
    "{ranks:5} {sms:3} {tokens:6} {variant:9} {pair:8.1f} {dispatch:7.1f} {dispatch_gbs:6.1f}"
    " {dispatch_sm:9.1f} {combine:8.1f} {combine_gbs:6.1f} {combine_sm:9.1f}"
)
FEW, SOURCE = "weft/kernels/few.cuh", "weft/ops/source.py"
NARROW = "if (turn == 0) fence_for_bulk(); else fence_shared_for_bulk();"
# name: is few.cuh as it was before, and what is changed: file, old text, new text
VARIANTS: dict[str, tuple[bool, tuple[tuple[str, str, str], ...]]] = {
    "before": (True, ()),
    "now": (False, ()),
    # Before, with one fence of the GPU's memory: what the fence alone cost.
    "fence": (True, ((FEW, WHOLE, NARROW),)),
    # Now, with a dispatch that stores this rank's own rows with plain stores.
    "own": (False, ((FEW, SEND, OWN),)),
    # Now, with pieces of half and of twice as many bytes.
    "14K": (False, ((FEW, "stage_vectors = 1792", "stage_vectors = 896"),)),
    "56K": (False, ((FEW, "stage_vectors = 1792", "stage_vectors = 3584"),)),
    # Now, with sixteen adding warps.
    "warps": (
        False,
        (
            (FEW, "adders = 256", "adders = 512"),
            (SOURCE, "threads=256 + 32", "threads=512 + 32"),
        ),
    ),
}


def main() -> None:
    """Run every variant in turn and print a line for each size."""
    options = parse()
    begin, found = time.monotonic(), []
    print(f"{'':34}  dispatch                  combine (pair less dispatch)")
    print("ranks SMs tokens variant    pair us     us   GB/s  of an SM      us   GB/s  of an SM")
    with tempfile.TemporaryDirectory() as folder:
        trees = {name: tree(Path(folder) / name, name) for name in options.variants}
        for ranks in options.ranks:
            for sms in options.sms:
                for name in options.variants:
                    if time.monotonic() - begin > options.limit:
                        print(f"not run, {options.limit} s are over: {ranks} ranks, {sms}, {name}")
                        continue
                    found += rows(measure(trees[name], options, ranks, sms), name, ranks, sms)
                    if options.json:
                        Path(options.json).write_text(json.dumps(found, indent=1))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers, names = (lambda t: [int(n) for n in t.split(",")]), (lambda t: t.split(","))
    parser.add_argument("--ranks", type=numbers, default=[4, 2])
    parser.add_argument("--sms", type=numbers, default=[8, 16])
    parser.add_argument("--tokens", default="256,2048")
    parser.add_argument("--variants", type=names, default=["before", "now", "fence", "own"])
    parser.add_argument("--router", default="perfect")
    parser.add_argument("--beside", default=None)
    parser.add_argument("--limit", type=float, default=540.0, help="start nothing after these s")
    parser.add_argument("--json", default=None)
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def tree(folder: Path, name: str) -> Path:
    """A copy of the package with the variant's few.cuh."""
    shutil.copytree(ROOT / "weft", folder / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    before, changes = VARIANTS[name]
    if before:
        shutil.copy(Path(__file__).with_name("before.cuh"), folder / FEW)
    for file, old, new in changes:
        text = (folder / file).read_text()
        if text.count(old) != 1:
            sys.exit(f"{name}: {file} has not one, but {text.count(old)} of {old!r}")
        (folder / file).write_text(text.replace(old, new))
    return folder


def measure(folder: Path, options: argparse.Namespace, ranks: int, sms: int) -> dict[str, Any]:
    """The report of `weft bench moe` on one variant; ends this run where its check fails."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = ["bench", "moe", "--quiet", "--router", options.router, "--json", str(report)]
    command += ["--case", "deepseek-v3", "--ranks", str(ranks), "--tokens", options.tokens]
    command += ["--device", "cpu"] if options.cpu else ["--device", "cuda", "--num-sms", str(sms)]
    command += ["--beside", options.beside] if options.beside else []
    program = (
        "import weft, weft.cli, pathlib; "
        "assert pathlib.Path(weft.__file__).is_relative_to(pathlib.Path.cwd()), weft.__file__; "
        "weft.cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not report.exists():
        sys.exit(f"{folder.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return dict(json.loads(report.read_text()))


def rows(report: dict[str, Any], name: str, ranks: int, sms: int) -> list[dict[str, Any]]:
    """One line for each size: medians of the slowest rank."""
    found = []
    for result in report["results"]:
        us = {p: max(map(statistics.median, s)) for p, s in result["samples_us"].items()}
        wire, own = result["traffic"]["wire"] * ROW, result["tokens"] * ROW
        line = {"ranks": ranks, "sms": sms, "tokens": result["tokens"], "variant": name}
        line |= {"pair": us["pair"], "dispatch": us["dispatch"]}
        line["combine"] = us["pair"] - us["dispatch"]
        for phase in ("dispatch", "combine"):
            line[f"{phase}_gbs"] = wire / max(line[phase], 1e-3) / 1e3
            line[f"{phase}_sm"] = (wire + own) / max(line[phase], 1e-3) / 1e3 / sms
        print(FORMAT.format(**line), flush=True)
        beside = result.get("beside_samples_us") or {}
        if beside:
            line |= {f"beside_{n}": max(map(statistics.median, s)) for n, s in beside.items()}
            print("      beside: " + ", ".join(f"{n} {line['beside_' + n]:.1f}" for n in beside))
        found.append(line)
    return found


if __name__ == "__main__":
    main()
