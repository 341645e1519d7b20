# SPDX-License-Identifier: Apache-2.0
"""Import the modules of the runs and parse their flags without a GPU: check_import.py MODEL_DIR...

Prints "all checks passed".
"""

import argparse
import importlib
import sys

import fake_gpu  # noqa: F401  must be first

MODULES = (
    "sgl_kernel",
    "sglang.benchmark.one_batch",
    "sglang.benchmark.serving",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.deepseek_v2",
    "sglang.srt.models.glm4_moe",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.plugins",
)
LAYERS = 4
FLAGS = (
    *("--load-format", "dummy", "--attention-backend", "triton", "--moe-runner-backend", "triton"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-radix-cache"),
    *("--fp8-gemm-backend", "triton", "--enforce-disable-flashinfer-allreduce-fusion"),
    *(
        "--disable-custom-all-reduce",
        "--cuda-graph-max-bs-decode",
        "64",
        "--chunked-prefill-size",
        "4096",
    ),
    *("--tp", "4", "--dp", "4", "--enable-dp-attention", "--ep-size", "4"),
    *("--json-model-override-args", f'{{"num_hidden_layers":{LAYERS}}}'),
)


def check(folder: str) -> None:
    """Check a model's flags, configuration and tokenizer."""
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server = ServerArgs.from_cli_args(parser.parse_args(["--model-path", folder, *FLAGS]))
    config = server.get_model_config().hf_config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    results = (
        config.architectures[0] in ModelRegistry.models,
        config.num_hidden_layers == LAYERS,
        server.ep_size == 4,
        tokenizer.decode(tokenizer("12+7=19")["input_ids"]) == "12+7=19",
        len(tokenizer) == 259,
    )
    if not all(results):
        sys.exit(f"{folder}: architecture, layers, ranks, text, tokens: {results}")
    print(f"{config.architectures[0]}: flags and tokenizer are right")


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    for each in sys.argv[1:]:
        check(each)
    print("all checks passed")
