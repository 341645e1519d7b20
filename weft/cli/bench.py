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
from weft.cli.options import DEVICES, choice_option, create_console, select_device, split_words
from weft.errors import InvalidArgument
from weft.lowlatency.config import SCALES
from weft.moe import MODELS, MODES, OVERLAPS
from weft.moe.layer.config import GEMMS
from weft.shape import REDUCES

bench = typer.Typer(
    add_completion=False, help="Check, then time, weft's operations; without a name, moe."
)
Tokens = Annotated[str, typer.Option(help="tokens per rank: 1,8,64 or 1..512 (doubling)")]
Experts = Annotated[int | None, typer.Option(min=1, help="experts on all ranks [the model's]")]
Routing = Annotated[str, typer.Option(help=f"{', '.join(ROUTINGS)} or zipf:EXPONENT")]
Peers = Annotated[bool, typer.Option("--peers", help="also measure installed libraries")]
CombineDtype = Annotated[str | None, choice_option(("fp8",), "of rows that combine sends")]
Quantize = Annotated[str | None, choice_option(("fp8", "mxfp8"), "quantization by dispatch")]
NumSms = Annotated[int | None, typer.Option(min=1, help="SMs that the kernels may fill")]
_ITERS = "samples; 0: 15 replays of a graph (at least 11), or 20 calls on CPU"
_TRACE = "run the largest size again, profiled; write it for Perfetto"


@dataclass(frozen=True, kw_only=True)
class CaseOptions(ABC):
    """Options of every benchmark."""

    tokens: Tokens = "1,8,64"
    ranks: Annotated[int, typer.Option(min=0, help="ranks; 0: every GPU, or 4 on the CPU")] = 0
    device: Annotated[str, choice_option(DEVICES, "auto: cuda where there are GPUs")] = "auto"
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
    def create_case(self) -> Case:
        """Create the benchmark."""

    @property
    def libraries(self) -> Sequence[baselines.Baseline]:
        """Other libraries to measure."""
        return ()

    def get_options(self, *names: str) -> dict[str, Any]:
        """Return the values of the named options."""
        return {name: getattr(self, name) for name in names}

    def build_case_args(self) -> dict[str, Any]:
        """Build the arguments that every case has."""
        device = select_device(self.device)
        return {
            "ranks": self.ranks or (torch.cuda.device_count() if device == "cuda" else 4),
            "device": device,
            "tokens": parse_sizes(self.tokens),
            "samples": self.iters or (15 if device == "cuda" else 20),
            "programmatic_launch": self.pdl,
            **self.get_options("graph", "seed"),
        }

    def run(self) -> None:
        """Run the case, and print and write its report.

        Samples are written before baselines run.
        """
        case, trace_path = self.create_case(), getattr(self, "trace", None)
        _check_outputs(self.json, self.plot, trace_path)
        report = run(case, quiet=self.quiet)
        _exit_on_error(report.error)
        if self.json and self.json != STDOUT:
            write_json(self.json, to_json(report))
        runs = baselines.measure_baselines(case, self.libraries)
        if self.json and (runs or self.json == STDOUT):
            write_json(self.json, to_json(report, runs))
        print_report(create_console(stderr=self.json == STDOUT), report, runs)
        if self.plot:
            plot(self.plot, build_rows(report, runs), case.describe(), report.machine)
        if trace_path:
            assert isinstance(case, moe.MoECase | lowlatency.LowLatencyCase)
            _exit_on_error(write_trace(trace_path, case))


@dataclass(frozen=True, kw_only=True)
class AllToAllOptions(CaseOptions):
    """Options of the benchmarks of all-to-alls."""

    model: Annotated[str, choice_option(tuple(MODELS), "whose sizes are the defaults")] = (
        "deepseek-v3"
    )
    hidden: Annotated[int | None, typer.Option(help="elements of a row [the model's]")] = None
    top_k: Annotated[int | None, typer.Option(help="experts per token [the model's]")] = None
    experts: Experts = None
    dtype: Annotated[str, choice_option(tuple(DTYPES), "of combined rows")] = "bf16"
    combine_dtype: CombineDtype = None
    num_sms: NumSms = None
    trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None

    def build_case_args(self) -> dict[str, Any]:
        config = MODELS[self.model]
        sizes = {"hidden": config.hidden, "top_k": config.routing.top_k}
        sizes["experts"] = config.routing.num_experts
        passed = {name: size for name, size in self.get_options(*sizes).items() if size is not None}
        names = ("model", "dtype", "combine_dtype", "num_sms", "routing")
        return {**super().build_case_args(), **sizes, **passed, **self.get_options(*names)}


def _add_command(name: str) -> Callable[[type[CaseOptions]], type[CaseOptions]]:
    """Return a class decorator that adds the command of a benchmark from its options."""

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


@_add_command("moe")
@dataclass(frozen=True, kw_only=True)
class MoEOptions(AllToAllOptions):
    """Time dispatch and combine of an MoE layer, after checking every byte."""

    routing: Routing = "uniform"
    payload: Annotated[
        str, choice_option(("bf16", "fp8"), "rows of --dtype, or fp8 and scales")
    ] = "bf16"
    combine: Annotated[str | None, choice_option(("pull", "push"), "who moves combined rows")] = (
        None
    )
    quantize: Quantize = None
    peers: Peers = False

    def create_case(self) -> Case:
        return moe.MoECase(
            **self.build_case_args(), **self.get_options("payload", "combine", "quantize")
        )

    @property
    def libraries(self) -> Sequence[baselines.Baseline]:
        return baselines.ALLTOALL_BASELINES if self.peers else ()


@_add_command("lowlatency")
@dataclass(frozen=True, kw_only=True)
class LowLatencyOptions(AllToAllOptions):
    """Time the low-latency all-to-all, after checking every bit."""

    tokens: Tokens = "128"
    routing: Routing = "perfect"
    quantize: Annotated[str, choice_option(("none", "fp8"), "dispatched rows")] = "fp8"
    scale: Annotated[str, choice_option(SCALES, "layout of scales")] = "fp32_row"
    reduce: Annotated[str, choice_option(REDUCES, "who adds a token's rows")] = "sender"

    def create_case(self) -> Case:
        quantize = None if self.quantize == "none" else self.quantize
        return lowlatency.LowLatencyCase(
            **self.build_case_args(), **self.get_options("scale", "reduce"), quantize=quantize
        )


@_add_command("allreduce")
@dataclass(frozen=True, kw_only=True)
class AllReduceOptions(CaseOptions):
    """Time the fused all-reduce, after checking every bit."""

    hidden: Annotated[int, typer.Option(help="elements of a row")] = 7168
    dtype: Annotated[str, choice_option(tuple(DTYPES), "of rows")] = "bf16"
    backend: Annotated[str, choice_option(allreduce.BACKENDS, "backends", several=True)] = "auto"
    epilogue: Annotated[str, choice_option(tuple(allreduce.EPILOGUES), "what follows the sum")] = (
        "norm"
    )
    peers: Peers = False

    def create_case(self) -> Case:
        options = self.get_options("hidden", "dtype", "epilogue")
        return allreduce.AllReduceCase(
            **self.build_case_args(), **options, backends=split_words(self.backend)
        )

    @property
    def libraries(self) -> Sequence[baselines.Baseline]:
        return baselines.ALLREDUCE_BASELINES if self.peers else ()


@_add_command("layer")
@dataclass(frozen=True, kw_only=True)
class LayerOptions(CaseOptions):
    """Time whole MoE layers, from router logits to output, after checking them."""

    tokens: Tokens = "8,64,128"
    model: Annotated[str, choice_option(layer.LAYER_MODELS, "scaled down on CPU ranks")] = (
        "deepseek-v3"
    )
    dtype: Annotated[str, choice_option(layer.WEIGHT_DTYPES, "of the experts' weights")] = "bf16"
    overlap: Annotated[str, choice_option(OVERLAPS, "default: all", several=True)] = ""
    mode: Annotated[str, choice_option(MODES, "rank-major or expert-major rows")] = "throughput"
    routing: Annotated[str, typer.Option(help="uniform, zipf or zipf:EXPONENT")] = "uniform"
    experts: Experts = None
    shared: Annotated[bool, typer.Option(help="with the model's shared expert")] = True
    gemm: Annotated[str, choice_option(GEMMS, "how the experts multiply")] = "auto"
    quantize: Quantize = None
    combine_dtype: CombineDtype = None
    num_sms: NumSms = None
    batch_invariant: Annotated[bool, typer.Option(help="also with batch_invariant=True")] = False

    def create_case(self) -> Case:
        names = ("model", "dtype", "mode", "routing", "experts", "shared", "gemm", "quantize")
        options = self.get_options(*names, "combine_dtype", "num_sms", "batch_invariant")
        return layer.LayerCase(
            **self.build_case_args(), **options, overlaps=split_words(self.overlap)
        )


@bench.callback(invoke_without_command=True)
def bench_default(context: typer.Context) -> None:
    """Run `moe` with its defaults when no benchmark is named."""
    if context.invoked_subcommand is None:
        MoEOptions().run()


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes such as `"1,8,64"`, `"1..4096"` (doubling), or a mix of both.

    Raises InvalidArgument for any other text.
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


def _check_outputs(json: Path | None, plot_path: Path | None, trace_path: Path | None) -> None:
    """Raise InvalidArgument before the run if an output cannot be written."""
    for path in (json, plot_path, trace_path):
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
    if STDOUT in (plot_path, trace_path):
        raise InvalidArgument("only --json writes to stdout: name a file for --plot and --trace")
    if plot_path is not None and plot_path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidArgument(
            f"--plot is {plot_path}; its suffix selects the format: .png, .svg, .pdf"
        )
    if plot_path is not None:
        import_pyplot()


def _exit_on_error(error: str | None) -> None:
    """Print the error of a failed check and exit with code 1, if there is one."""
    if error is not None:
        Console(stderr=True).print(Text(f"check failed, nothing timed: {error}", "red"))
        raise typer.Exit(1)
