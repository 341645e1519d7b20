# SPDX-License-Identifier: Apache-2.0
"""Arguments and processes of vLLM engines for this folder's measurements."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import job as command_of
from job import (
    OUT,
    Job,
    Variant,
    begin_command,
    fewer_layers,
    folder_of,
    free_port,
    in_turn,
    of_command,
    run,
)

HERE = Path(__file__).parent
# Default layers: as many as one GPU of 80 GB holds with 256 requests.
LAYERS = {"qwen3-30b-a3b": 24, "deepseek-v3": 5}
ON_CPU = {"enforce_eager": True, "dtype": "float32"}


def arguments(about: str, model: str, variants: list[str]) -> argparse.ArgumentParser:
    """Return a parser of common arguments."""
    parser = command_of.arguments(about, model, variants, memory=0.9, layers=LAYERS)
    parser.add_argument("--more", type=json.loads, default={}, metavar="JSON", help="of EngineArgs")
    return parser


def job_of(args: argparse.Namespace, engine: dict[str, Any], *, gpus: int = 1) -> Job:
    """Return the job of these arguments."""
    flags = [f"{name}={value}" for name, value in engine.items()]
    end = time.monotonic() + args.seconds
    return of_command(Job(args.what, folder_of(args.model), gpus, flags, end, args.cpu))


def of_trained(args: argparse.Namespace, ranks: int, **more: Any) -> dict[str, Any]:
    """Return the engine arguments of the trained model or another checkpoint."""
    engine: dict[str, Any] = {"model": args.model, "dtype": "float16", "max_num_seqs": 64}
    engine |= {"max_num_batched_tokens": 512, "gpu_memory_utilization": 0.5, **more}
    engine |= {"enable_prefix_caching": False}
    engine |= {"enable_expert_parallel": True} if ranks > 1 else {}
    return engine | (ON_CPU if args.cpu else {}) | args.more


def random_model(args: argparse.Namespace) -> tuple[dict[str, Any], int | None]:
    """Return the engine arguments of a random model, and its number of layers (None: all)."""
    model = folder_of(args.model)
    layers = args.layers or LAYERS.get(model.name)
    engine: dict[str, Any] = {
        "model": str(model),
        "load_format": "weft_dummy",
        "hf_overrides": fewer_layers(model, layers),
        "gpu_memory_utilization": args.memory,
        "enable_prefix_caching": False,
        # DeepGEMM's dense GEMMs would be compiled one by one at an engine's start.
        **(ON_CPU if args.cpu else {"linear_backend": "cutlass"}),
        **args.more,
    }
    return engine, layers


def arguments_of(variant: Variant, job: Job) -> dict[str, Any]:
    """Return a variant's engine arguments; CPUs have only one backend."""
    return {} if job.cpu else dict(each.split("=", 1) for each in variant.flags)


def begin(what: str, request: dict[str, Any], job: Job, variant: Variant, name: str) -> None:
    """Start an engine that imports, and waits for its turn."""
    request = {**request, "engine": {**request["engine"], **arguments_of(variant, job)}}
    place = OUT / f"{job.what}-{name}.json"
    place.write_text(json.dumps(request))
    result_at(job, name).unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "engine.py"), what, str(place)]
    print(f"== {name}: {request['engine']} {variant.environment}", flush=True)
    begin_command(job, name, [*command, str(result_at(job, name))], environment(variant))


def begin_server(engine: dict[str, Any], job: Job, variant: Variant, name: str) -> None:
    """Start a server of the OpenAI API."""
    flags = []
    for field, value in (engine | arguments_of(variant, job)).items():
        flag = field.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    print(f"== {name}: {' '.join(command[3:])} {variant.environment}", flush=True)
    command += ["--port", str(port)]
    begin_command(job, name, command, environment(variant), port=port)


def environment(variant: Variant) -> dict[str, str]:
    """Return the environment of a variant's processes."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WEFT_VLLM")}
    return kept | variant.environment


def result_at(job: Job, name: str) -> Path:
    """Return the path of an engine's result."""
    return OUT / f"{job.what}-{name}-result.jsonl"


def in_engines(
    job: Job,
    variants: list[Variant],
    what: str,
    asked: Callable[[Variant], dict[str, Any]],
    *,
    suffix: str = "",
) -> Iterator[tuple[Variant, str, list[Any]]]:
    """Yield each variant, its name in this job, and the lines that its engine wrote.

    `asked` returns an engine's request, with its arguments as "engine".
    """

    def start(job: Job, variant: Variant, name: str) -> None:
        begin(what, asked(variant), job, variant, name)

    for variant, name in in_turn(job, variants, start, needs=40, suffix=suffix):
        run(job, name, [], job.end)
        path = result_at(job, name)
        if path.exists() and job.check_log(name, variant.startup_text):
            yield variant, name, [json.loads(line) for line in path.read_text().splitlines()]
