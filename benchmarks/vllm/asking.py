"""Engines of vLLM for this folder's measurements: their arguments, and how they are started."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from job import LONGEST, OUT, Job, begin_command, free_port, of_command, run, said, tail
from variants import Variant

HERE = Path(__file__).parent
# Layers by default: what one GPU of 80 GB holds beside 256 requests.
LAYERS = {"qwen3-30b-a3b": 24, "deepseek-v3": 5}
DENSE = {"deepseek-v3": 1}  # so that 4 of the 5 layers are MoE
ON_CPU = {"enforce_eager": True, "dtype": "float32"}


def arguments(about: str, model: str, variants: list[str]) -> argparse.ArgumentParser:
    """What every measurement takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("what")
    parser.add_argument("--model", default=model, help="a folder of $PACK/model, or any folder")
    parser.add_argument("--layers", type=int, help=f"layers to run (default: {LAYERS})")
    parser.add_argument("--memory", type=float, default=0.9, help="gpu_memory_utilization")
    parser.add_argument("--variants", nargs="+", default=variants)
    parser.add_argument("--seconds", type=float, default=LONGEST, help="that this command may take")
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, in float32")
    parser.add_argument("--more", type=json.loads, default={}, metavar="JSON", help="of EngineArgs")
    return parser


def folder_of(name: str) -> Path:
    """A model's folder."""
    folder = Path(name)
    model = folder if folder.is_dir() else Path(os.environ["PACK"]) / "model" / name
    if not (model / "config.json").is_file():
        sys.exit(f"no config.json in {model}")
    return model


def job_of(given: argparse.Namespace, engine: dict[str, Any], *, gpus: int = 1) -> Job:
    """The command that these arguments ask for."""
    flags = [f"{name}={value}" for name, value in engine.items()]
    end = time.monotonic() + given.seconds
    return of_command(Job(given.what, folder_of(given.model), gpus, flags, end, given.cpu))


def random_model(given: argparse.Namespace) -> tuple[dict[str, Any], int | None]:
    """Arguments of a model of random weights, and how many layers it runs; None: all."""
    model = folder_of(given.model)
    layers = given.layers or LAYERS.get(model.name)
    config = {"num_hidden_layers": layers, "first_k_dense_replace": DENSE.get(model.name)}
    found: dict[str, Any] = {
        "model": str(model),
        "load_format": "weft_dummy",
        "hf_overrides": {name: value for name, value in config.items() if value is not None},
        "gpu_memory_utilization": given.memory,
        "enable_prefix_caching": False,
        # DeepGEMM's dense GEMMs are compiled one by one when an engine starts.
        **(ON_CPU if given.cpu else {"linear_backend": "cutlass"}),
        **given.more,
    }
    return found, layers


def begin(job: Job, variant: Variant, what: str, asked: dict[str, Any], name: str = "") -> None:
    """Start an engine that imports, and waits for `result_of`."""
    name = name or variant.name
    backends = {} if job.cpu else variant.engine  # on CPUs there is one
    asked = {**asked, "engine": {**asked["engine"], **backends}}
    place = OUT / f"{job.what}-{name}.json"
    place.write_text(json.dumps(asked))
    result_at(job, name).unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "engine.py"), what, str(place)]
    print(f"== {name}: {asked['engine']} {variant.environment}", flush=True)
    begin_command(job, name, [*command, str(result_at(job, name))], environment(variant))


def begin_server(job: Job, variant: Variant, engine: dict[str, Any]) -> None:
    """Start a server of OpenAI's requests."""
    flags = []
    for name, value in (engine | ({} if job.cpu else variant.engine)).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    print(f"== {variant.name}: {' '.join(command[3:])} {variant.environment}", flush=True)
    command += ["--port", str(port)]
    begin_command(job, variant.name, command, environment(variant), port=port)


def environment(variant: Variant) -> dict[str, str]:
    """What a process of this variant sees."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WEFT_VLLM")}
    return kept | variant.environment


def result_at(job: Job, name: str) -> Path:
    """Where an engine's result is."""
    return OUT / f"{job.what}-{name}-result.jsonl"


def result_of(job: Job, variant: Variant, seconds: float, name: str = "") -> list[Any]:
    """Let a begun engine on the GPU, and return its lines; none where it failed."""
    name = name or variant.name
    done = run(job, name, [], seconds)
    log, found = OUT / f"{job.what}-{name}.log", result_at(job, name)
    if done and not said(log, variant.says):
        job.fail(f"{name}: {log.name} does not say {variant.says!r}:\n{tail(log)}")
        return []
    return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
