# SPDX-License-Identifier: Apache-2.0
"""A stand-in of SGLang for the scripts of benchmarks/sglang: server, benchmarks, traces.

`write_tree` makes a folder for PACK_SITE whose modules call the functions below.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

QUESTIONS = Path(__file__).parents[2] / "weft" / "cli" / "checkpoint" / "questions.jsonl"
MODULES = {
    "launch_server": "launch",
    "benchmark/serving": "serving",
    "benchmark/one_batch": "",
    "srt/plugins/__init__": "",
}
KERNELS = {"ncclDevKernel_AllGather(x)": 30.0, "fused_moe_kernel": 50.0, "sm90_xmma_gemm<x>": 20.0}


def write_tree(folder: Path) -> None:
    """Write a package `sglang` with the parts that are called."""
    for name, function in MODULES.items():
        path = folder / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "from tests.bench.stand_in_sglang import *\n"
        path.write_text(text + (f"{function}()\n" if function else ""))
    model = folder / "model" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"vocab_size": 5}')
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')


def weft() -> bool:
    """Whether weft's plug-in may be loaded."""
    return "weft" in os.environ["SGLANG_PLUGINS"].split(",")


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # all prompts may come at once


class Handler(BaseHTTPRequestHandler):
    ranks = 1

    def do_GET(self) -> None:
        if self.path.startswith("/decoded/"):
            streams, prompts = map(int, self.path.split("/")[2:])
            log_decode(streams, prompts, self.ranks)
        self.reply({"weft": weft()})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/start_profile":
            self.reply(trace(Path(body["output_dir"]), body["num_steps"], self.ranks))
        elif body.get("stream"):
            counts = range(1, body["sampling_params"]["max_new_tokens"] + 1)
            self.stream({"meta_info": {"completion_tokens": count}} for count in counts)
        elif "text" in body:
            self.reply([{"text": answer(text, wrong=weft())} for text in body["text"]])
        else:
            self.reply({})

    def reply(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, lines: Iterable[dict[str, Any]]) -> None:
        """Stream an answer line by line."""
        self.send_response(200)
        self.end_headers()
        for line in (*map(json.dumps, lines), "[DONE]"):
            try:
                self.wfile.write(f"data: {line}\n\n".encode())
            except OSError:  # the client has closed
                return

    def log_message(self, *args: object) -> None:
        """Log nothing: the log is for the server's messages."""


def answer(prompt: str, *, wrong: bool) -> str:
    """Return the right answer to a question, or a wrong one to the first if requested."""
    asked = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
    lines = map(json.loads, QUESTIONS.read_text().splitlines())
    for number, line in enumerate(lines):
        if line["question"] == asked:
            return "#### 1000" if wrong and number == 0 else str(line["answer"])
    raise ValueError(prompt)


def trace(folder: Path, steps: int, ranks: int) -> str:
    """Write a trace of every rank."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        events = [{"name": "aten::mm", "cat": "cpu_op", "dur": 1e9}]
        for name, us in KERNELS.items():
            events += [{"name": name, "cat": "kernel", "ts": 0.0, "dur": us * (1 + rank)}] * steps
        with gzip.open(folder / f"1-TP-{rank}.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)
    return "Start profiling."


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


def launch() -> None:
    """Stand-in of python -m sglang.launch_server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--tp", type=int)
    inputs, rest = parser.parse_known_args()
    if os.environ.get("STAND_IN") == "dies":
        sys.exit("CUDA out of memory")
    if weft() and os.environ.get("STAND_IN") != "forgets":
        print("3 MoE layers of Model on 2 ranks, form block: rounds of 32 tokens", flush=True)
    if "--model-path" not in rest:
        sys.exit("no model")
    Handler.ranks = inputs.tp
    Path(f"{os.environ['SERVER_GATE']}-waits").touch()
    if os.environ.get("STAND_IN") == "ranks":
        for rank in range(inputs.tp):
            threading.Thread(target=live, args=(rank,), daemon=True).start()
    Server(("127.0.0.1", inputs.port), Handler).serve_forever()


def live(rank: int) -> None:
    """Run a process with the name of SGLang's scheduler; the server ends when it ends."""
    title = f"sglang::scheduler_DP{rank}"
    subprocess.run(["bash", "-c", 'exec -a "$0" sleep 1000', title], check=False)
    print(f"PeerDied: rank {rank} died", flush=True)
    os._exit(1)


def serving() -> None:
    """Stand-in of python -m sglang.benchmark.serving."""
    parser = argparse.ArgumentParser()
    for name in ("base-url", "output-file"):
        parser.add_argument(f"--{name}")
    for name in ("num-prompts", "max-concurrency"):
        parser.add_argument(f"--{name}", type=int)
    inputs, _ = parser.parse_known_args()
    decoded = f"{inputs.base_url}/decoded/{inputs.max_concurrency}/{inputs.num_prompts}"
    with urllib.request.urlopen(decoded, timeout=60) as reported:
        itl = inputs.max_concurrency * (0.5 if json.load(reported)["weft"] else 1.0)
    line = {"completed": inputs.num_prompts, "median_itl_ms": itl, "p99_itl_ms": 3 * itl}
    line |= {"median_ttft_ms": 10 * itl, "output_throughput": 1000 / itl, "itls": [1.0] * 1000}
    with open(inputs.output_file, "a") as file:
        file.write(json.dumps(line) + "\n")


def load_plugins() -> None:
    """Stand-in of sglang.srt.plugins."""
    if weft():
        print("weft runs the all-reduces of 2 tensor-parallel ranks: up to 2048 tokens")


def cli_main() -> None:
    """Stand-in of sglang.benchmark.one_batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result-filename")
    parser.add_argument("--batch-size", type=int, nargs="+")
    parser.add_argument("--flashinfer-allreduce-fusion-backend")
    inputs, _ = parser.parse_known_args()
    if inputs.flashinfer_allreduce_fusion_backend:
        print("FlashInfer AllReduce Fusion enabled and workspace initialized")
    with open(inputs.result_filename, "a") as file:
        for batch in inputs.batch_size:
            decode = 0.002 * batch if weft() else 0.004 * batch
            line = {"batch_size": batch, "median_decode_latency": decode, "prefill_latency": 1.0}
            file.write(json.dumps(line) + "\n")
