# SPDX-License-Identifier: Apache-2.0
"""The commands of `weft bench`: parse options, run a case, and write its report.

The fields of a dataclass are the options of its command.
"""

from __future__ import annotations

import functools
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
import typer
from rich.console import Console
from rich.text import Text

from weft.bench import allreduce, baselines, layer, lowlatency, moe
from weft.bench.harness import DTYPES, Case, run
from weft.bench.plot import import_pyplot, plot
from weft.bench.report import STDOUT, build_rows, print_report, to_json, write_json
from weft.bench.routing import ROUTINGS
from weft.bench.trace import write_trace
from weft.cli.options import DEVICES, choice, chosen_device, wide_console, words
from weft.errors import InvalidArgument
from weft.lowlatency.config import REDUCES, SCALES
from weft.moe import MODELS, MODES, OVERLAPS
from weft.moe.layer.config import GEMMS

bench = typer.Typer(
    add_completion=False, help="Check, then time, weft's operations; without a name, moe."
)
Tokens = Annotated[str, typer.Option(help="tokens per rank: 1,8,64 or 1..512 (doubling)")]
Experts = Annotated[int | None, typer.Option(min=1, help="experts on all ranks [the model's]")]
Routing = Annotated[str, typer.Option(help=f"{', '.join(ROUTINGS)} or zipf:EXPONENT")]
Peers = Annotated[bool, typer.Option("--peers", help="also measure installed libraries")]
CombineDtype = Annotated[str | None, choice(("fp8",), "of rows that combine sends")]
Quantize = Annotated[str | None, choice(("fp8", "mxfp8"), "quantization by dispatch")]
NumSms = Annotated[int | None, typer.Option(min=1, help="SMs that the kernels may fill")]
_ITERS = "samples; 0: 15 replays of a graph (at least 11), or 20 calls on CPU"
_TRACE = "run the largest size again, profiled; write it for Perfetto"


@dataclass(frozen=True, kw_only=True)
class CaseOptions(ABC):
    """Options of every benchmark."""

    tokens: Tokens = "1,8,64"
    ranks: Annotated[int, typer.Option(min=0, help="ranks; 0: every GPU, or 4 on the CPU")] = 0
    device: Annotated[str, choice(DEVICES, "auto: cuda where there are GPUs")] = "auto"
    pdl: Annotated[bool, typer.Option("--pdl/--no-pdl", help="programmatic dependent launch")] = (
        True
    )
    iters: Annotated[int, typer.Option(min=0, help=_ITERS)] = 0
    graph: Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")] = True
    seed: Annotated[int, typer.Option(help="of inputs and routing")] = 0
    quiet: Annotated[bool, typer.Option("--quiet", help="do not print progress")] = False
    json: Annotated[Path | None, typer.Option(help="write all samples here; -: to stdout")] = None
    plot: Annotated[Path | None, typer.Option(help="write a picture here (.png, .svg, .pdf)")] = (
        None
    )

    @abstractmethod
    def case(self) -> Case:
        """Return the benchmark."""

    @property
    def libraries(self) -> Sequence[baselines.Baseline]:
        """Other libraries to measure."""
        return ()

    def select(self, *names: str) -> dict[str, Any]:
        """Return some options by name."""
        return {name: getattr(self, name) for name in names}

    def common(self) -> dict[str, Any]:
        """Return the arguments of every case."""
        device = chosen_device(self.device)
        return {
            "ranks": self.ranks or (torch.cuda.device_count() if device == "cuda" else 4),
            "device": device,
            "tokens": parse_sizes(self.tokens),
            "samples": self.iters or (15 if device == "cuda" else 20),
            "programmatic_launch": self.pdl,
            **self.select("graph", "seed"),
        }

    def run(self) -> None:
        """Run the case, and print and write its report. Samples are written before baselines."""
        case, timeline = self.case(), getattr(self, "trace", None)
        _check_outputs(self.json, self.plot, timeline)
        report = run(case, quiet=self.quiet)
        _exit_on(report.error)
        if self.json and self.json != STDOUT:
            write_json(self.json, to_json(report))
        runs = baselines.measure_baselines(case, self.libraries)
        if self.json and (runs or self.json == STDOUT):
            write_json(self.json, to_json(report, runs))
        print_report(wide_console(stderr=self.json == STDOUT), report, runs)
        if self.plot:
            plot(self.plot, build_rows(report, runs), case.describe(), report.machine)
        if timeline:
            assert isinstance(case, moe.MoECase | lowlatency.LowLatencyCase)
            _exit_on(write_trace(timeline, case))


@dataclass(frozen=True, kw_only=True)
class PairOptions(CaseOptions):
    """Options of both all-to-alls."""

    model: Annotated[str, choice(tuple(MODELS), "whose sizes are the defaults")] = "deepseek-v3"
    hidden: Annotated[int | None, typer.Option(help="elements of a row [the model's]")] = None
    top_k: Annotated[int | None, typer.Option(help="experts per token [the model's]")] = None
    experts: Experts = None
    dtype: Annotated[str, choice(tuple(DTYPES), "of combined rows")] = "bf16"
    combine_dtype: CombineDtype = None
    num_sms: NumSms = None
    trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None

    def common(self) -> dict[str, Any]:
        config = MODELS[self.model]
        sizes = {"hidden": config.hidden, "top_k": config.routing.top_k}
        sizes["experts"] = config.routing.num_experts
        passed = {name: size for name, size in self.select(*sizes).items() if size is not None}
        names = ("model", "dtype", "combine_dtype", "num_sms", "routing")
        return {**super().common(), **sizes, **passed, **self.select(*names)}


def _command(name: str) -> Callable[[type[CaseOptions]], type[CaseOptions]]:
    """Decorate the options of a benchmark: add the command that runs it."""

    def add(options: type[CaseOptions]) -> type[CaseOptions]:
        def command(**values: Any) -> None:
            options(**values).run()

        hints = get_type_hints(options, include_extras=True)
        keyword = functools.partial(Parameter, kind=Parameter.KEYWORD_ONLY)
        command.__annotations__ = hints
        command.__signature__ = Signature(  # type: ignore[attr-defined]
            [keyword(f.name, default=f.default, annotation=hints[f.name]) for f in fields(options)]
        )
        bench.command(name, help=options.__doc__)(command)
        return options

    return add


@_command("moe")
@dataclass(frozen=True, kw_only=True)
class MoEOptions(PairOptions):
    """Time dispatch and combine of an MoE layer, after checking every byte."""

    routing: Routing = "uniform"
    payload: Annotated[str, choice(("bf16", "fp8"), "rows of --dtype, or fp8 and scales")] = "bf16"
    combine: Annotated[str | None, choice(("pull", "push"), "who moves combined rows")] = None
    quantize: Quantize = None
    peers: Peers = False

    def case(self) -> Case:
        return moe.MoECase(**self.common(), **self.select("payload", "combine", "quantize"))

    @property
    def libraries(self) -> Sequence[baselines.Baseline]:
        return baselines.ALLTOALL_BASELINES if self.peers else ()


@_command("lowlatency")
@dataclass(frozen=True, kw_only=True)
class LowLatencyOptions(PairOptions):
    """Time the low-latency all-to-all, after checking every bit."""

    tokens: Tokens = "128"
    routing: Routing = "perfect"
    quantize: Annotated[str, choice(("none", "fp8"), "dispatched rows")] = "fp8"
    scale: Annotated[str, choice(SCALES, "layout of scales")] = "fp32_row"
    reduce: Annotated[str, choice(REDUCES, "who adds a token's rows")] = "receiver"

    def case(self) -> Case:
        quantize = None if self.quantize == "none" else self.quantize
        return lowlatency.LowLatencyCase(
            **self.common(), **self.select("scale", "reduce"), quantize=quantize
        )


@_command("allreduce")
@dataclass(frozen=True, kw_only=True)
class AllReduceOptions(CaseOptions):
    """Time the fused all-reduce, after checking every bit."""

    hidden: Annotated[int, typer.Option(help="elements of a row")] = 7168
    dtype: Annotated[str, choice(tuple(DTYPES), "of rows")] = "bf16"
    backend: Annotated[str, choice(allreduce.BACKENDS, "backends", several=True)] = "auto"
    epilogue: Annotated[str, choice(tuple(allreduce.EPILOGUES), "what follows the sum")] = "norm"
    peers: Peers = False

    def case(self) -> Case:
        options = self.select("hidden", "dtype", "epilogue")
        return allreduce.AllReduceCase(**self.common(), **options, backends=words(self.backend))

    @property
    def libraries(self) -> Sequence[baselines.Baseline]:
        return baselines.ALLREDUCE_BASELINES if self.peers else ()


@_command("layer")
@dataclass(frozen=True, kw_only=True)
class LayerOptions(CaseOptions):
    """Time whole MoE layers, from router logits to output, after checking them."""

    tokens: Tokens = "8,64,128"
    model: Annotated[str, choice(layer.LAYER_MODELS, "scaled down on CPU ranks")] = "deepseek-v3"
    dtype: Annotated[str, choice(layer.WEIGHT_DTYPES, "of the experts' weights")] = "bf16"
    overlap: Annotated[str, choice(OVERLAPS, "default: all", several=True)] = ""
    mode: Annotated[str, choice(MODES, "rank-major or expert-major rows")] = "throughput"
    routing: Annotated[str, typer.Option(help="uniform, zipf or zipf:EXPONENT")] = "uniform"
    experts: Experts = None
    shared: Annotated[bool, typer.Option(help="with the model's shared expert")] = True
    gemm: Annotated[str, choice(GEMMS, "how the experts multiply")] = "auto"
    quantize: Quantize = None
    combine_dtype: CombineDtype = None
    num_sms: NumSms = None

    def case(self) -> Case:
        names = ("model", "dtype", "mode", "routing", "experts", "shared", "gemm", "quantize")
        options = self.select(*names, "combine_dtype", "num_sms")
        return layer.LayerCase(**self.common(), **options, overlaps=words(self.overlap))


@bench.callback(invoke_without_command=True)
def bench_default(context: typer.Context) -> None:
    """Run `moe` with its defaults when no benchmark is named."""
    if context.invoked_subcommand is None:
        MoEOptions().run()


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes named by `"1,8,64"`, by `"1..4096"` (doubling), or by a mix of both.

    Raises InvalidArgument for anything else.
    """
    sizes: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part)
        if match is None:
            raise InvalidArgument(f"{part!r} is not a size; write 1,8,64 or 1..4096")
        size, last = int(match[1]), int(match[2] or match[1])
        if match[2] and (size < 1 or last < size):
            raise InvalidArgument(f"{part!r} is empty; write e.g. 1..4096")
        sizes.append(size)
        while match[2] and (size := 2 * size) <= last:
            sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def _check_outputs(json: Path | None, picture: Path | None, timeline: Path | None) -> None:
    """Raise InvalidArgument before the run if an output cannot be written."""
    for path in (json, picture, timeline):
        if path is None or path == STDOUT:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise InvalidArgument(f"cannot write {path}: {error}") from error
    if STDOUT in (picture, timeline):
        raise InvalidArgument("only --json writes to stdout: name a file for --plot and --trace")
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidArgument(
            f"--plot is {picture}; its suffix chooses the format: .png, .svg, .pdf"
        )
    if picture is not None:
        import_pyplot()


def _exit_on(problem: str | None) -> None:
    """Exit with code 1 after printing a failed check's problem, if any."""
    if problem is not None:
        Console(stderr=True).print(Text(f"check failed, nothing timed: {problem}", "red"))
        raise typer.Exit(1)
