"""Options that several commands of `weft bench` and `weft tune` share, as dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_type_hints

import torch
import typer

from weft.bench import layer
from weft.bench.case import DTYPES, parse_sizes
from weft.cli.options import DEVICES, Outputs, choice, chosen_device, words
from weft.moe import MODELS, OVERLAPS
from weft.moe.config import GEMMS

Text: TypeAlias = str | None
File: TypeAlias = Path | None
Number: TypeAlias = int | None
MaxTokens = Annotated[Number, typer.Option(min=1, help="capacity; default: what fits")]
Dtype = Annotated[str, choice(tuple(DTYPES), "{}: of rows that come back")]
CombineDtype = Annotated[Text, choice(("fp8",), "{}: rows travel back as FP8")]
NumSms = Annotated[Number, typer.Option(min=1, help="SMs that the kernels may fill")]
Cold = Annotated[bool, typer.Option("--cold", help="also time calls after a flush of the caches")]
Seed = Annotated[int, typer.Option(help="of inputs and routing")]
_ITERS = "samples; 0: 15 replays of a graph (at least 11), or 20 calls on CPU"


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Make options of a command's dataclass parameters: one of each field, with its default."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options: list[Parameter] = []
    for each in signature(command).parameters.values():
        if group := groups.get(each.name):
            types = get_type_hints(group, include_extras=True)
            options += [
                Parameter(
                    of.name, Parameter.KEYWORD_ONLY, default=of.default, annotation=types[of.name]
                )
                for of in fields(group)
            ]
        else:
            options.append(each.replace(annotation=hints[each.name]))

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            own = {of.name: given.pop(of.name) for of in fields(group) if of.name in given}
            given[name] = group(**own)
        command(**given)

    vars(run)["__signature__"] = Signature(options)
    run.__annotations__ = {each.name: each.annotation for each in options}
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What every command has that measures."""

    ranks: Annotated[int, typer.Option(min=0, help="ranks; 0: every GPU, or 4 on the CPU")] = 0
    device: Annotated[str, choice(DEVICES, "{}: cuda where there are GPUs")] = "auto"
    pdl: Annotated[bool, typer.Option("--pdl/--no-pdl", help="programmatic dependent launch")] = (
        True
    )
    iters: Annotated[int, typer.Option(min=0, help=_ITERS)] = 0
    quiet: Annotated[bool, typer.Option("--quiet", help="do not print progress")] = False

    def settings(self, tokens: str, *, graph: bool = True, seed: int = 0) -> dict[str, Any]:
        """What every case has. Raises InvalidArgument for a device or sizes that are none."""
        where = chosen_device(self.device)
        return {
            "ranks": self.ranks or (torch.cuda.device_count() if where == "cuda" else 4),
            "device": where,
            "tokens": parse_sizes(tokens),
            "samples": self.iters or (15 if where == "cuda" else 20),
            "graph": graph,
            "seed": seed,
            "programmatic_launch": self.pdl,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(RunOptions):
    """What every benchmark has."""

    graph: Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")] = True
    seed: Seed = 0
    recorded: Annotated[File, typer.Option(help="recorded figures to show beside")] = None
    json: Annotated[File, typer.Option(help="write all samples here; -: to stdout")] = None
    plot: Annotated[File, typer.Option(help="write a picture here (.png, .svg, .pdf)")] = None

    def case(self, tokens: str) -> dict[str, Any]:
        """What every case has."""
        return self.settings(tokens, graph=self.graph, seed=self.seed)

    def outputs(self, trace: Path | None = None) -> Outputs:
        """The files to write."""
        return Outputs(self.json, self.plot, trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What both all-to-alls have."""

    model: Annotated[Text, choice(tuple(MODELS), "sizes of {}; options given beside it win")] = None
    hidden: Annotated[Number, typer.Option(help="elements of a row [7168]")] = None
    top_k: Annotated[Number, typer.Option(help="experts per token [8]")] = None
    experts: Annotated[Number, typer.Option(help="experts on all ranks [256]")] = None
    max_tokens: MaxTokens = None
    dtype: Dtype = "bf16"
    combine_dtype: CombineDtype = None
    split_phase: Annotated[
        bool, typer.Option("--split-phase", help="with send and receive apart")
    ] = False
    num_sms: NumSms = None
    cold: Cold = False

    def case(self) -> dict[str, Any]:
        """These options, with the sizes of the model (deepseek-v3) where none were given."""
        config = MODELS[self.model or "deepseek-v3"]
        sizes = {
            "hidden": config.hidden,
            "top_k": config.routing.top_k,
            "experts": config.routing.num_experts,
        }
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return given | {name: size for name, size in sizes.items() if given[name] is None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """What a layer has."""

    model: Annotated[
        str, choice(layer.LAYER_MODELS, "{}; on CPU ranks its rules with few numbers")
    ] = "deepseek-v3"
    dtype: Annotated[str, choice(layer.WEIGHT_DTYPES, "{}: the experts' weights")] = "bf16"
    overlap: Annotated[
        str, choice(OVERLAPS, "some of {}, with commas; all if not given", several=True)
    ] = ""
    routing: Annotated[str, choice(layer.ROUTINGS, "{} or zipf:EXPONENT", free=True)] = "uniform"
    experts: Annotated[Number, typer.Option(min=1, help="experts of the layer [the model's]")] = (
        None
    )
    shared: Annotated[bool, typer.Option(help="with the model's shared expert")] = True
    gemm: Annotated[str, choice(GEMMS, "how the experts multiply: {}")] = "auto"

    def case(self) -> dict[str, Any]:
        """These options, as a case takes them."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return given | {"overlaps": words(given.pop("overlap"))}
