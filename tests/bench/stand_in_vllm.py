# SPDX-License-Identifier: Apache-2.0
"""A stand-in of vLLM for the scripts of benchmarks/vllm: engine, traces and server.

`write_tree` makes a folder for PACK_SITE whose modules are of the classes below.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.bench.stand_in_sglang import KERNELS, Handler, Server, answer

MODULES = {
    "__init__": "LLM, SamplingParams",
    "sampling_params": "RequestOutputKind",
    "engine/__init__": "",
    "engine/arg_utils": "AsyncEngineArgs",
    "v1/__init__": "",
    "v1/engine/__init__": "",
    "v1/engine/async_llm": "AsyncLLM",
    "entrypoints/__init__": "",
    "entrypoints/openai/__init__": "",
    "entrypoints/openai/api_server": "launch",
}
GREETING = "weft runs MoE layers of vLLM on 1 ranks, form block"


def write_tree(folder: Path) -> None:
    """Write a package `vllm` with the parts that are called."""
    for name, names in MODULES.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from tests.bench.stand_in_vllm import {names}\n" if names else "")
    with open(folder / "vllm" / "entrypoints" / "openai" / "api_server.py", "a") as file:
        file.write("launch()\n")
    model = folder / "model" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"vocab_size": 300}')


def weft() -> str:
    """Return the form in which weft serves."""
    return os.environ.get("WEFT_VLLM", "")


def greet() -> None:
    """Log what a started engine logs."""
    how = os.environ.get("STAND_IN")
    if how == "dies":
        sys.exit("CUDA out of memory")
    if weft() and how != "forgets":
        print(GREETING, flush=True)


class RequestOutputKind:
    DELTA = 1


class SamplingParams(SimpleNamespace):
    pass


class AsyncEngineArgs(SimpleNamespace):
    pass


class AsyncLLM:
    """Yield a token every 20 ms, with weft every 10 ms; with a profiler, write a trace."""

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        greet()
        self.arguments = arguments

    @classmethod
    def from_engine_args(cls, arguments: AsyncEngineArgs) -> AsyncLLM:
        return cls(arguments)

    async def generate(
        self, prompt: dict[str, list[int]], params: SamplingParams, name: str
    ) -> AsyncIterator[Any]:
        assert params.output_kind == RequestOutputKind.DELTA
        assert self.arguments.max_model_len >= len(prompt["prompt_token_ids"]) + params.max_tokens
        tokens = params.max_tokens - (os.environ.get("STAND_IN") == "stops")
        for token in range(tokens):
            await asyncio.sleep(0.01 if weft() else 0.02)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])

    async def start_profile(self) -> None:
        """Write a trace of decode steps at once."""
        profiler = self.arguments.profiler_config
        folder = Path(profiler["torch_profiler_dir"])
        folder.mkdir(parents=True)
        events = []
        for _ in range(profiler["max_iterations"]):
            name = "execute_context_0(0)_generation_4(4)"
            events.append({"name": name, "cat": "user_annotation", "ts": 0.0, "dur": 1.0})
            for kernel, us in KERNELS.items():
                events.append({"name": kernel, "cat": "kernel", "ts": 0.0, "dur": us})
        with gzip.open(folder / "rank0.1.pt.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)

    async def stop_profile(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class LLM:
    """Return right answers, but a wrong first one with weft's exchange."""

    def __init__(self, **arguments: Any) -> None:
        greet()
        assert "dtype" in arguments

    def generate(self, prompts: list[str], params: SamplingParams, *, use_tqdm: bool) -> list[Any]:
        texts = [answer(each, wrong=weft() == "exchange") for each in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts]


class Completions(Handler):
    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions"
        tokens = body["max_tokens"]
        lines: list[dict[str, Any]] = [{"choices": [{"text": "a"}]}] * tokens
        self.stream([*lines, {"choices": [], "usage": {"completion_tokens": tokens}}])


def launch() -> None:
    """Stand-in of python -m vllm.entrypoints.openai.api_server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--model", required=True)
    inputs, rest = parser.parse_known_args()
    assert "--no-enable-prefix-caching" in rest
    greet()
    core = ["bash", "-c", 'exec -a "$0" sleep 1000', "VLLM::EngineCore"]
    threading.Thread(target=subprocess.run, args=(core,), daemon=True).start()
    Server(("127.0.0.1", inputs.port), Completions).serve_forever()
