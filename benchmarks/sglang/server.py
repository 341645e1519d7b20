# SPDX-License-Identifier: Apache-2.0
"""Start SGLang servers."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import job as command_of
from job import (
    SHARED_GPU,
    Job,
    Variant,
    begin_command,
    fewer_layers,
    folder_of,
    free_port,
    gpu_names,
    of_command,
)

LAYERS = {"deepseek-v3": 5, "glm-4.5-air": 16}  # defaults; other models run all layers
FLAGS = [
    *("--attention-backend", "triton", "--moe-runner-backend", "triton"),
    *("--fp8-gemm-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-radix-cache"),
    *("--mm-feature-transport", "cpu"),  # otherwise a launcher uses memory of the first GPU
]
CHUNK = 2048  # prefill tokens per rank
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
BOUND = "SGLANG_CPU_OMP_THREADS_BIND"  # one core per rank of a host
# Additional flags on CPUs, with exact results.
CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *(
        NO_PREFILL_GRAPHS,
        "--disable-cuda-graph",
        "--disable-overlap-schedule",
        "--max-total-tokens",
        "8192",
    ),
]


def arguments(about: str, model: str, variants: list[str]) -> argparse.ArgumentParser:
    """Return a parser of common arguments."""
    parser = command_of.arguments(about, model, variants, memory=0.75, layers=LAYERS)
    parser.add_argument("--gpus", type=int, default=max(1, len(gpu_names())))
    parser.add_argument("--more", nargs="*", default=[], metavar="FLAG", help="without dashes")
    return parser


def job_of(args: argparse.Namespace, *more: str, dummy: bool = True) -> Job:
    """Return the job of these arguments. No server outlives it, even if it is killed."""
    model = folder_of(args.model)
    if dummy:
        model = with_every_token(model)
    override = fewer_layers(model, args.layers or LAYERS.get(model.name))
    flags = ["--model-path", str(model), "--mem-fraction-static", str(args.memory), *FLAGS]
    flags += ["--load-format", "dummy"] if dummy else []
    flags += ["--json-model-override-args", json.dumps(override)] if override else []
    flags += [*more, *(CPU_FLAGS if args.cpu else [])]
    flags += [f"--{flag}" if not flag[0].isdigit() else flag for flag in args.more]
    end = time.monotonic() + args.seconds
    return of_command(Job(args.what, model, args.gpus, flags, end, args.cpu))


def with_every_token(model: Path) -> Path:
    """Copy a model's folder, with a tokenizer that has a text for every id.

    A model of random weights generates any id, and clients time tokens by their text.
    """
    size = json.loads((model / "config.json").read_text()).get("vocab_size", 0)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab.update({f"\u0120{i}": i for i in range(len(vocab), size)})  # a space, then the number
    copy = Path(tempfile.gettempdir()) / "weft-models" / model.name
    shutil.copytree(model, copy, dirs_exist_ok=True)
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy


def prefill_graphs(chunk: int, *, served: bool) -> list[str]:
    """Return flags of prefill by CUDA graphs, up to `chunk` tokens per rank.

    `served` tells whether SGLang supports them for this model; it does not with latent attention
    (MLA).
    """
    if not served:
        return [NO_PREFILL_GRAPHS]
    sizes = [str(size) for size in range(256, chunk, 256)] + [str(chunk)]
    return ["--cuda-graph-backend-prefill", "breakable", "--cuda-graph-bs-prefill", *sizes]


def data_parallel(ranks: int) -> list[str]:
    """Return flags of DP attention and expert parallelism, without SGLang's own all-reduces."""
    size = str(ranks)
    return [
        *("--tp", size, "--dp", size, "--ep-size", size),
        *(("--enable-dp-attention",) if ranks > 1 else ()),
        *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
    ]


def of_data_parallel(args: argparse.Namespace, batch: int, *, graphs: bool) -> Job:
    """Return a job of random weights with CHUNK prefill tokens per rank.

    `batch` is the size of a rank's largest decode graph; `graphs` enables prefill graphs.
    """
    return job_of(
        args,
        *data_parallel(args.gpus),
        *("--cuda-graph-max-bs-decode", str(batch)),
        *("--chunked-prefill-size", str(CHUNK * args.gpus)),
        *prefill_graphs(CHUNK, served=graphs),
    )


def of_trained(args: argparse.Namespace, ranks: int, flags: Iterable[str] | None = None) -> Job:
    """Return a job of the trained model; `flags` replace data parallelism's.

    It uses float16, because SGLang has no bf16 kernel for RoPE and KV cache of heads of 32.
    """
    args.gpus = ranks
    flags = [*(data_parallel(ranks) if flags is None else flags)]
    flags += ["--cuda-graph-max-bs-decode", "64", "--dtype", "float16"]
    flags += [] if args.cpu else prefill_graphs(CHUNK, served="--dp" in flags)
    return job_of(args, *flags, dummy=False)


def on_cpus(ranks: int) -> dict[str, str]:
    """Return the environment of SGLang on CPU ranks, which share this machine's cores.

    sgl_kernel searches its own folder for a CPU library, and only needs to load it here, so the GPU
    library is copied there.
    """
    kernels = Path(os.environ["PACK_SITE"]) / "sgl_kernel"
    for library in kernels.glob("sm90/common_ops.*"):
        shutil.copy(library, kernels)
    cores = sorted(os.sched_getaffinity(0))
    each = [str(cores[rank % len(cores)]) for rank in range(ranks)]
    env = {"SGLANG_USE_CPU_ENGINE": "1", BOUND: "|".join(each)}
    return env | {"TORCHDYNAMO_DISABLE": "1"}  # it cannot trace cpu_ranks.py's replacements


def environment(job: Job, variant: Variant) -> dict[str, str]:
    """Return the environment of a variant's processes."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_SGLANG_")}
    plugins = ["weft_gate", "weft_dummy", *(["weft"] if variant.environment else [])]
    if job.cpu:
        env |= on_cpus(job.gpus)
        plugins.append("weft_cpu")
    if job.shares_gpu:
        env |= SHARED_GPU
        plugins.append("weft_one_gpu")
    return {**env, "SGLANG_PLUGINS": ",".join(plugins), **variant.environment}


def begin(job: Job, variant: Variant, name: str, **more: str) -> None:
    """Start a server whose ranks wait until `in_servers` opens its gate.

    `more` are additional environment variables.
    """
    command = [sys.executable, "-m", "sglang.launch_server", *job.flags, *variant.flags]
    if job.hosts > 1:
        command += ["--nnodes", str(job.hosts), "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    print(f"== {name}: {' '.join(command[3:])}", flush=True)
    env, each = environment(job, variant) | more, job.gpus // job.hosts
    bound = env.get(BOUND, "").split("|")
    for host, part in reversed(list(enumerate(job.parts(name)))):
        port, own = free_port(), slice(host * each, (host + 1) * each)
        if job.hosts > 1:
            env["WEFT_HOST"] = part
            if job.cpu:
                env[BOUND] = "|".join(bound[own])
            else:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(job.gpus)[own]))
        flags_of_host = ("--node-rank", str(host), "--port", str(port))
        begin_command(job, part, [*command, *flags_of_host], env, port=port)
        if host:  # otherwise the first host's ports would look taken when this host checks them
            started = job.waiting[part]
            while started.process.poll() is None and not Path(f"{started.gate}-waits").exists():
                time.sleep(0.1)
