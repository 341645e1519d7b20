"""What a run prints and writes: the table, the samples as JSON, and TensorRT-LLM's JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench.cases import Settings
from weft.bench.limits import PAIR_FIXED_US, link_rate, why_no_floor
from weft.bench.machine import machine_line
from weft.bench.moe import Report
from weft.bench.peers import Peer
from weft.bench.rivals import MEASURED, RivalRun
from weft.bench.summary import Row, rows_of
from weft.errors import InvalidArgument

# Names of the same thing in TensorRT-LLM's bench_moe_comm.
_TRTLLM_BACKENDS = {"onesided": "NVLINK_ONE_SIDED", "collective": "ALLGATHER"}
_TRTLLM_QUANT = {None: "NO_QUANT", "fp8": "FP8_BLOCK_SCALES", "mxfp8": "MXFP8"}
_TRTLLM_PROFILES = {"deepseek-v3": "deepseek_v3", "gpt-oss-120b": "gpt_oss"}


def print_report(
    console: Console, report: Report, peers: Sequence[Peer], runs: Sequence[RivalRun] = ()
) -> None:
    """Print the table of a run, and below it how the figures were taken.

    peers: what stands beside ours.  runs: what became of the libraries that were looked for.
    """
    rows = rows_of(report, peers)
    rivals = list(dict.fromkeys(name for row in rows for name in row.rivals))
    gpu = any(row.floor is not None for row in rows)
    several, cold = len(report.settings.backends) > 1, report.settings.cold
    table = Table(box=box.SIMPLE_HEAD, title=_title(report), title_justify="left", pad_edge=False)
    if several:
        table.add_column("backend", no_wrap=True)
    for name in ("tokens", "us", "min", "median", "p99", "max"):
        table.add_column(name, justify="left" if name == "us" else "right", no_wrap=True)
    for name in ("cold\nmedian",) * cold + ("logical\nGB/s", "wire\nGB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    if gpu:
        table.add_column("floor\nus", justify="right")
        table.add_column("x floor", justify="right")
    beside = report.settings.beside is not None
    for name in ("pair us\nbeside", "matmul\nx alone", "matmul\nx its SMs") * beside:
        table.add_column(name, justify="right")
    exact = {peer.label for peer in peers if not peer.fp8_home}
    for name in rivals:
        star = " *" if report.settings.combine_by == "fp8" and name in exact else ""
        table.add_column(f"{name}{star}\nus", justify="right", style="dim")
    for row in rows:
        cells = ([row.backend] if several else []) if row.phase == "dispatch" else [""] * several
        _add_row(table, row, cells, rivals, gpu=gpu, cold=cold, beside=beside)
    console.print(table)
    console.print(Text(_caption(report, peers if rivals else [], runs, gpu), style="dim"))


def _add_row(
    table: Table,
    row: Row,
    cells: Sequence[str],
    rivals: Sequence[str],
    *,
    gpu: bool,
    cold: bool,
    beside: bool,
) -> None:
    us = row.us
    texts = [
        *cells,
        str(row.tokens) if row.phase == "dispatch" else "",
        row.phase,
        *(us_text(value) for value in (us.min, us.median, us.p99, us.max)),
        *(["" if row.cold is None else us_text(row.cold)] * cold),
        rate_text(row.logical),
        rate_text(row.wire),
    ]
    if gpu:
        texts.append("" if row.floor is None else us_text(row.floor))
        texts.append("" if row.ratio is None else f"{row.ratio:.2f}")
    if beside:
        found = row.beside
        texts += (
            [us_text(found.pair), f"{found.slower:.2f}", f"{found.slower_limited:.2f}"]
            if found
            else [""] * 3
        )
    texts += [us_text(row.rivals[name]) if name in row.rivals else "" for name in rivals]
    pair = row.phase == "pair"
    table.add_row(*texts, style="bold" if pair else "", end_section=pair)


def _title(report: Report) -> Text:
    settings = report.settings
    name = f"{settings.case}: " if settings.case else ""
    return Text.assemble(
        ("weft bench moe  ", "bold"),
        f"{name}{settings.ranks} ranks, hidden {settings.hidden}, top {settings.top_k} of "
        f"{settings.experts} experts, router {settings.router}, ",
        settings.wire,
        *(f", {text}" for text in _options(settings)),
    )


def _options(settings: Settings) -> list[str]:
    """What differs from the defaults of the one-sided kernels."""
    limited = [] if settings.num_sms is None else [f"{settings.num_sms} SMs"]
    beside = [] if settings.beside is None else [f"beside matmul {settings.product_size}^3"]
    early = ["no programmatic launch"] * (not settings.programmatic_launch)
    return limited + early + ["also in halves"] * settings.halves + beside


def _caption(report: Report, peers: Sequence[Peer], runs: Sequence[RivalRun], gpu: bool) -> str:
    lines = [
        machine_line(report.machine),
        "Checked before timing: received rows and combined rows equal weft.reference bit by bit, "
        "memory poisoned before.",
        *(f"{text}." for text in _methods(report)),
        "Statistics over a rank's samples, slowest rank shown. wire: rows that the routing sends "
        "off the busiest rank; logical: tokens x top_k rows.",
    ]
    if gpu:
        lines.append(
            f"floor: wire bytes / {link_rate(report.settings.ranks):g} GB/s + "
            f"{PAIR_FIXED_US:g} us, from measurements on H200 (weft/bench/limits.py)."
        )
    lines += [text for text in (why_no_floor(report.machine["gpus"]),) if text]
    lines += _wire_lines(report.settings, rivals=bool(peers))
    lines += [
        f"{row.tokens} tokens beside the product: it takes {row.beside.product:.0f} us, alone "
        f"{row.beside.alone:.0f} us, alone on the SMs left to it {row.beside.limited:.0f} us."
        for row in rows_of(report, ())
        if row.beside
    ]
    recorded = [peer for peer in peers if not peer.measured]
    if recorded:
        lines.append(f"Recorded figures: {recorded[0].date} on {recorded[0].machine}.")
    for run in runs:
        how = f" in this run, {run.method}; sums checked within a tolerance"
        lines.append(f"{run.library}: {run.status}{how if run.status == MEASURED else ''}.")
    return "\n".join(lines)


def _wire_lines(settings: Settings, *, rivals: bool) -> list[str]:
    """The bytes behind floor and wire where a row is not simply hidden x dtype."""
    lines = []
    if settings.quantize or settings.combine_by == "fp8":
        lines.append(
            f"A row is {settings.sent_bytes} bytes out and {settings.returned_bytes} bytes back."
        )
    if len(settings.backends) > 1 and settings != settings.plain():
        plain = settings.plain()
        lines.append(f"The collective backend runs without these options: {plain.wire}.")
    if rivals and settings.combine_by == "fp8":
        lines.append(
            f"* Their rows come back as {settings.dtype}, {settings.plain().returned_bytes} bytes "
            "each, and are exact; ours are not."
        )
    return lines


def _methods(report: Report) -> list[str]:
    found = report.measurements
    methods = [each.method for each in found] + [each.cold_method for each in found]
    methods += [each.beside_method for each in found]
    return list(dict.fromkeys(method for method in methods if method))


def us_text(value: float) -> str:
    """A time in us, as tables show it."""
    return f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def rate_text(value: float) -> str:
    """GB/s, as tables show them; nothing for a half that moves no rows."""
    if value == 0:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write_json(
    path: Path, report: Report, peers: Sequence[Peer], runs: Sequence[RivalRun] = ()
) -> None:
    """Write settings, machine, every sample and the table's figures."""
    from weft import __version__

    results = []
    for found in report.measurements:
        entry = asdict(found)
        entry["samples_us"] = entry.pop("samples")
        entry["cold_samples_us"] = entry.pop("cold")
        entry["beside_samples_us"] = entry.pop("beside")
        results.append(entry)
    data = {
        "weft": __version__,
        "settings": asdict(report.settings),
        "wire": {
            "rows": report.settings.wire,
            "sent_bytes": report.settings.sent_bytes,
            "returned_bytes": report.settings.returned_bytes,
        },
        "machine": report.machine,
        "checked": "bitwise against weft.reference, before and after timing",
        "results": results,
        "peers": [asdict(run) for run in runs],
        "rows": [asdict(row) for row in rows_of(report, peers)],
    }
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_trtllm_json(path: Path, report: Report) -> None:
    """Write mean times per rank in the schema of TensorRT-LLM's `bench_moe_comm.py`.

    Its times are spans of kernels taken by CUPTI with a cold L2; `warning` says how these differ.
    """
    write_text(path, json.dumps(trtllm_report(report), indent=2) + "\n")


def trtllm_report(report: Report) -> dict[str, Any]:
    """Return the report as that schema's dictionary."""
    settings, methods = report.settings, "; ".join(_methods(report))
    sent = "fp8" if settings.payload == "fp8" else settings.quantize
    backends = [_TRTLLM_BACKENDS[backend] for backend in settings.backends]
    cuda = bool(report.machine["gpus"])
    metadata = {
        "bench": "bench_moe_comm",
        "launcher": "weft",
        "profile": _TRTLLM_PROFILES.get(settings.case or ""),
        "backend": backends[0] if len(backends) == 1 else None,
        "ep_size": settings.ranks,
        "hidden_size": settings.hidden,
        "local_batch_size": list(settings.tokens),
        "top_k": settings.top_k,
        "dtype": str(settings.out_dtype),
        "quant_algo": _TRTLLM_QUANT[sent],
        "perfect_router": settings.router == "perfect",
        "experts_per_rank": settings.experts // settings.ranks,
        "num_experts_total": settings.experts,
        "max_num_tokens_per_rank": settings.max_tokens or max(settings.tokens),
        "random_seed": settings.seed,
        "device_count": len(report.machine["gpus"]),
        "weft": report.machine.get("weft"),
        "cuda_graph": settings.graph and cuda,
        "pdl": settings.programmatic_launch and cuda,
        "payload_in_workspace": True,
        "cupti_enabled": False,
        "warning": f"not CUPTI kernel spans: {methods}; warm L2; {settings.wire}",
    }
    results = [
        {
            "backend": _TRTLLM_BACKENDS[found.backend],
            "payload_in_workspace": True,
            "local_batch_size": found.tokens,
            **{
                f"{phase}_us": {
                    f"rank{rank}": statistics.fmean(samples)
                    for rank, samples in enumerate(found.samples[phase])
                }
                for phase in ("dispatch", "combine")
            },
        }
        for found in report.measurements
    ]
    return {"benchmark_metadata": metadata, "results": results}


def write_text(path: Path, text: str) -> None:
    """Write a result file; its directory is made if needed.

    Raises InvalidArgument naming the path where that fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error}") from error
