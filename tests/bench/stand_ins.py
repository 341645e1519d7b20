# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of SGLang and vLLM for the scripts of benchmarks/sglang and benchmarks/vllm.

`write_tree` makes a folder for PACK_SITE whose modules have or call what is below.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import urllib.request
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

QUESTIONS = Path(__file__).parents[2] / "weft" / "cli" / "checkpoint" / "questions.jsonl"
# Files of each package, and what they call.
MODULES = {
    **{"sglang/launch_server": "launch()", "sglang/benchmark/serving": "serving()"},
    **{"sglang/benchmark/one_batch": "", "sglang/srt/plugins/__init__": ""},
    **{"vllm/__init__": "", "vllm/sampling_params": "", "vllm/engine/arg_utils": ""},
    "vllm/v1/engine/async_llm": "",
}
KERNELS = {"ncclDevKernel_AllGather(x)": 30.0, "fused_moe_kernel": 50.0, "sm90_xmma_gemm<x>": 20.0}


def write_tree(folder: Path) -> None:
    """Write packages with the parts that are called, and a model's files."""
    for name, call in MODULES.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from tests.bench.stand_ins import *\n{call}\n")
    model = folder / "model" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"vocab_size": 300}')
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')


def weft() -> str:
    """Return the form in which weft serves vLLM, or whether SGLang may load its plug-in."""
    loaded = "weft" in os.environ.get("SGLANG_PLUGINS", "").split(",")
    return os.environ.get("WEFT_VLLM", "weft" * loaded)


def greet(line: str) -> None:
    """Log what a started engine logs, unless it is to forget weft."""
    if weft() and os.environ.get("STAND_IN") != "forgets":
        print(line, flush=True)


def answer(prompt: str, *, wrong: bool) -> str:
    """Return the right answer to a question, or a wrong one to the first if requested."""
    asked = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
    lines = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    (number,) = (i for i, line in enumerate(lines) if line["question"] == asked)
    return "#### 1000" if wrong and number == 0 else str(lines[number]["answer"])


def write_trace(path: Path, events: list[dict[str, Any]], steps: int, scale: int = 1) -> None:
    """Write a trace of decode steps."""
    for name, us in KERNELS.items():
        events += [{"name": name, "cat": "kernel", "ts": 0.0, "dur": us * scale}] * steps
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)


# SGLang.


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # all prompts may come at once


class Handler(BaseHTTPRequestHandler):
    ranks = 1

    def do_GET(self) -> None:
        if self.path.startswith("/decoded/"):
            streams, prompts = map(int, self.path.split("/")[2:])
            log_decode(streams, prompts, self.ranks)
        self.reply({"weft": bool(weft())})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/start_profile":
            for rank in range(self.ranks):
                path = Path(body["output_dir"], f"1-TP-{rank}.trace.json.gz")
                other = {"name": "aten::mm", "cat": "cpu_op", "dur": 1e9}
                write_trace(path, [other], body["num_steps"], 1 + rank)
            self.reply("Start profiling.")
        elif "text" in body:
            self.reply([{"text": answer(text, wrong=bool(weft()))} for text in body["text"]])
        else:
            self.reply({})

    def reply(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Log nothing: the log is for the server's messages."""


def log_decode(streams: int, prompts: int, ranks: int) -> None:
    """Log every rank's throughput: 1000 tokens/s, or 2000 with weft.

    A single wave, which warms up, logs more lines than those that count, and slower steps.
    """
    warms_up, each = prompts == streams, streams // ranks
    rate = (2000.0 if weft() else 1000.0) / (4 if warms_up else 1)
    for wave in range(9 if warms_up else prompts // streams):
        for rank in range(ranks):
            head = f"[2026-11-27 06:03:0{wave} DP{rank} TP{rank} EP{rank}]"
            print(f"{head} Prefill batch, #new-seq: {each}, input throughput (token/s): 30.00")
            # Of a prefill and steps after it, of full steps alone, of steps of fewer requests.
            for running, seen in ((each, rate / 50), (each, rate), (each - 1, rate / 2)):
                batch = f"{head} Decode batch, #running-req: {running}"
                print(f"{batch}, #token: 9, gen throughput (token/s): {seen:.2f}", flush=True)


def parse(*names: str, many: str = "") -> argparse.Namespace:
    """Parse the named options, which are numbers unless they name a file, an address or a flag."""
    parser = argparse.ArgumentParser()
    for name in names:
        text = name.endswith(("url", "file", "name", "path", "backend"))
        more: dict[str, Any] = {"nargs": "+"} if name == many else {}
        parser.add_argument(f"--{name}", type=str if text else int, **more)
    return parser.parse_known_args()[0]


def launch() -> None:
    """Stand-in of python -m sglang.launch_server."""
    inputs = parse("port", "tp", "model-path")
    greet("3 MoE layers of Model on 2 ranks, form block: rounds of 32 tokens")
    assert inputs.model_path
    Handler.ranks = inputs.tp
    Path(f"{os.environ['SERVER_GATE']}-waits").touch()
    Server(("127.0.0.1", inputs.port), Handler).serve_forever()


def serving() -> None:
    """Stand-in of python -m sglang.benchmark.serving."""
    inputs = parse("base-url", "output-file", "num-prompts", "max-concurrency")
    decoded = f"{inputs.base_url}/decoded/{inputs.max_concurrency}/{inputs.num_prompts}"
    with urllib.request.urlopen(decoded, timeout=60) as reported:
        itl = inputs.max_concurrency * (0.5 if json.load(reported)["weft"] else 1.0)
    line = {"completed": inputs.num_prompts, "median_itl_ms": itl, "p99_itl_ms": 3 * itl}
    line |= {"median_ttft_ms": 10 * itl, "output_throughput": 1000 / itl, "itls": [1.0] * 1000}
    with open(inputs.output_file, "a") as file:
        file.write(json.dumps(line) + "\n")


def load_plugins() -> None:
    """Stand-in of sglang.srt.plugins."""
    greet("weft runs the all-reduces of 2 tensor-parallel ranks: up to 2048 tokens")


def cli_main() -> None:
    """Stand-in of sglang.benchmark.one_batch."""
    backend = "flashinfer-allreduce-fusion-backend"
    inputs = parse("result-filename", "batch-size", backend, many="batch-size")
    if inputs.flashinfer_allreduce_fusion_backend:
        print("FlashInfer AllReduce Fusion enabled and workspace initialized")
    with open(inputs.result_filename, "a") as file:
        for batch in inputs.batch_size:
            decode = 0.002 * batch if weft() else 0.004 * batch
            line = {"batch_size": batch, "median_decode_latency": decode, "prefill_latency": 1.0}
            file.write(json.dumps(line) + "\n")


# vLLM.


RequestOutputKind = SimpleNamespace(DELTA=1)
SamplingParams = AsyncEngineArgs = SimpleNamespace


class AsyncLLM:
    """Yield a token every 20 ms, with weft every 10 ms; with a profiler, write a trace."""

    def __init__(self, arguments: Any) -> None:
        greet("weft runs MoE layers of vLLM on 1 ranks, form block")
        self.arguments = arguments

    @classmethod
    def from_engine_args(cls, arguments: Any) -> AsyncLLM:
        return cls(arguments)

    async def generate(
        self, prompt: dict[str, list[int]], params: Any, name: str
    ) -> AsyncIterator[Any]:
        assert params.output_kind == RequestOutputKind.DELTA
        assert self.arguments.max_model_len >= len(prompt["prompt_token_ids"]) + params.max_tokens
        tokens = params.max_tokens - (os.environ.get("STAND_IN") == "stops")
        for token in range(tokens):
            await asyncio.sleep(0.01 if weft() else 0.02)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])

    async def start_profile(self) -> None:
        profiler = self.arguments.profiler_config
        path, steps = Path(profiler["torch_profiler_dir"]), profiler["max_iterations"]
        name = "execute_context_0(0)_generation_4(4)"
        step = {"name": name, "cat": "user_annotation", "ts": 0.0, "dur": 1.0}
        write_trace(path / "rank0.1.pt.trace.json.gz", [step] * steps, steps)

    async def stop_profile(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class LLM:
    """Return right answers, but a wrong first one with weft's exchange."""

    def __init__(self, **arguments: Any) -> None:
        greet("weft runs MoE layers of vLLM on 1 ranks, form block")
        assert "dtype" in arguments

    def generate(self, prompts: list[str], params: Any, *, use_tqdm: bool) -> list[Any]:
        texts = [answer(each, wrong=weft() == "exchange") for each in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts]
