# SPDX-License-Identifier: Apache-2.0
"""A server of SGLang."""

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
    Job,
    Variant,
    begin_command,
    fewer_layers,
    folder_of,
    free_port,
    gpu_names,
    of_command,
)

LAYERS = {"deepseek-v3": 5, "glm-4.5-air": 16}  # by default; the others have all of theirs
FLAGS = [
    *("--attention-backend", "triton", "--moe-runner-backend", "triton"),
    *("--fp8-gemm-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-radix-cache"),
    *("--mm-feature-transport", "cpu"),  # else a launcher takes memory of the first GPU
]
CHUNK = 2048  # prefill tokens of a rank
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
BOUND = "SGLANG_CPU_OMP_THREADS_BIND"  # the core of each rank of a host
# Over those: what SGLang has on CPUs, exactly.
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
    """What every measurement takes."""
    parser = command_of.arguments(about, model, variants, memory=0.75, layers=LAYERS)
    parser.add_argument("--gpus", type=int, default=max(1, len(gpu_names())))
    parser.add_argument("--more", nargs="*", default=[], metavar="FLAG", help="without dashes")
    return parser


def job_of(given: argparse.Namespace, *more: str, dummy: bool = True) -> Job:
    """The command that these arguments ask for. No server outlives it, also where it is killed."""
    model = folder_of(given.model)
    if dummy:
        model = with_every_token(model)
    override = fewer_layers(model, given.layers or LAYERS.get(model.name))
    made = ["--model-path", str(model), "--mem-fraction-static", str(given.memory), *FLAGS]
    made += ["--load-format", "dummy"] if dummy else []
    made += ["--json-model-override-args", json.dumps(override)] if override else []
    made += [*more, *(CPU_FLAGS if given.cpu else [])]
    made += [f"--{flag}" if not flag[0].isdigit() else flag for flag in given.more]
    end = time.monotonic() + given.seconds
    return of_command(Job(given.what, model, given.gpus, made, end, given.cpu))


def with_every_token(model: Path) -> Path:
    """A copy of a model's folder whose tokenizer has a text for every id.

    A model of random weights answers with any id, and clients time tokens by their text.
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
    """Flags of prefill by CUDA graphs, with attention between them, up to `chunk` tokens of a rank.

    served: has SGLang them for this model? It has none where attention is latent (MLA).
    """
    if not served:
        return [NO_PREFILL_GRAPHS]
    sizes = [str(size) for size in range(256, chunk, 256)] + [str(chunk)]
    return ["--cuda-graph-backend-prefill", "breakable", "--cuda-graph-bs-prefill", *sizes]


def data_parallel(ranks: int) -> list[str]:
    """Flags of DP attention and expert parallelism, without SGLang's own all-reduces."""
    size = str(ranks)
    return [
        *("--tp", size, "--dp", size, "--ep-size", size),
        *(("--enable-dp-attention",) if ranks > 1 else ()),
        *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
    ]


def of_data_parallel(given: argparse.Namespace, batch: int, *, graphs: bool) -> Job:
    """A job of random weights and CHUNK tokens of a rank's prefill.

    batch: of a rank's largest decode graph.   graphs: is prefill in graphs?
    """
    return job_of(
        given,
        *data_parallel(given.gpus),
        *("--cuda-graph-max-bs-decode", str(batch)),
        *("--chunked-prefill-size", str(CHUNK * given.gpus)),
        *prefill_graphs(CHUNK, served=graphs),
    )


def of_trained(given: argparse.Namespace, ranks: int, flags: Iterable[str] | None = None) -> Job:
    """A job of the trained model on so many ranks.   flags: in place of data parallelism's.

    SGLang has no kernel that rotates and stores heads of 32 in bf16, nor another way.
    """
    given.gpus = ranks
    made = [*(data_parallel(ranks) if flags is None else flags)]
    made += ["--cuda-graph-max-bs-decode", "64", "--dtype", "float16"]
    made += [] if given.cpu else prefill_graphs(CHUNK, served="--dp" in made)
    return job_of(given, *made, dummy=False)


def on_cpus(ranks: int) -> dict[str, str]:
    """The environment of SGLang on CPU ranks, which share this machine's cores.

    sgl_kernel looks for what it has for CPUs in its own folder, and nothing but the load of it is
    needed here: the GPUs' library is copied there.
    """
    kernels = Path(os.environ["PACK_SITE"]) / "sgl_kernel"
    for library in kernels.glob("sm90/common_ops.*"):
        shutil.copy(library, kernels)
    cores = sorted(os.sched_getaffinity(0))
    each = [str(cores[rank % len(cores)]) for rank in range(ranks)]
    kept = {"SGLANG_USE_CPU_ENGINE": "1", BOUND: "|".join(each)}
    return kept | {"TORCHDYNAMO_DISABLE": "1"}  # what cpu_ranks.py puts in torch it cannot trace


def environment(job: Job, variant: Variant) -> dict[str, str]:
    """What a process of this variant sees."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_SGLANG_")}
    plugins = ["weft_gate", "weft_dummy", *(["weft"] if variant.environment else [])]
    if job.cpu:
        kept |= on_cpus(job.gpus)
        plugins.append("weft_cpu")
    return {**kept, "SGLANG_PLUGINS": ",".join(plugins), **variant.environment}


def begin(job: Job, variant: Variant, name: str, **more: str) -> None:
    """Start a server that `in_servers` will let through to the GPUs.

    more: of its environment.
    """
    command = [sys.executable, "-m", "sglang.launch_server", *job.flags, *variant.flags]
    if job.hosts > 1:
        command += ["--nnodes", str(job.hosts), "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    print(f"== {name}: {' '.join(command[3:])}", flush=True)
    seen, each = environment(job, variant) | more, job.gpus // job.hosts
    bound = seen.get(BOUND, "").split("|")
    for host, part in reversed(list(enumerate(job.parts(name)))):
        port, own = free_port(), slice(host * each, (host + 1) * each)
        if job.hosts > 1:
            seen["WEFT_HOST"] = part
            if job.cpu:
                seen[BOUND] = "|".join(bound[own])
            else:
                seen["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(job.gpus)[own]))
        flags_of_host = ("--node-rank", str(host), "--port", str(port))
        begin_command(job, part, [*command, *flags_of_host], seen, port=port)
        if host:  # it looks whether the first host's ports are free, as if they were its own
            this = job.waiting[part]
            while this.process.poll() is None and not Path(f"{this.gate}-waits").exists():
                time.sleep(0.1)
