# SPDX-License-Identifier: Apache-2.0
"""Import the modules of the runs, and construct models without a GPU: check_pack.py DIR...

With LD_BIND_NOW=1, every PyTorch function that a compiled module imports must exist. Models are
constructed on PyTorch's device "meta", so that vLLM selects its kernels. Prints "all checks
passed".
"""

import importlib
import os
import sys

import fake_nvml  # noqa: F401  must be first
import torch

COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.cumem_allocator",
    "vllm.spinloop",
    "vllm.third_party.deep_gemm",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.deepseek_v2",
)
OPERATORS = {
    "_C": "rms_norm fused_add_rms_norm rotary_embedding silu_and_mul cutlass_scaled_mm "
    "per_token_group_fp8_quant",
    "_C_cache_ops": "reshape_and_cache_flash concat_and_cache_mla",
    "_moe_C": "topk_softmax grouped_topk moe_align_block_size moe_sum",
    "_vllm_fa3_C": "fwd get_scheduler_metadata",
}
LAYERS = 4
FLAGS = {"load_format": "dummy", "max_model_len": 2048, "linear_backend": "cutlass"}


def without_gpu() -> None:
    """Disable two queries of the GPU."""
    from vllm.utils import deep_gemm

    deep_gemm._apply_pdl = lambda *args: None
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"


def make(folder: str, **flags: object) -> torch.nn.Module:
    """Construct a folder's model without weights, as a server with these flags does."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    layers = {"num_hidden_layers": LAYERS}
    config = EngineArgs(model=folder, hf_overrides=layers, **FLAGS, **flags).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            place = {"distributed_init_method": "tcp://127.0.0.1:29577", "backend": "gloo"}
            init_distributed_environment(1, 0, local_rank=0, **place)
            initialize_model_parallel()
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            model: torch.nn.Module = initialize_model(config)
    return model


def method(model: torch.nn.Module) -> str:
    """Describe the method of the first layer of experts."""
    experts = next(each for each in model.modules() if hasattr(each, "w13_weight"))
    method_of_layer = experts.quant_method
    kernels = (
        getattr(method_of_layer, key, None) for key in ("fp8_backend", "unquantized_backend")
    )
    return f"{type(experts).__name__}, {type(method_of_layer).__mro__[1].__name__}, {list(kernels)}"


def check(folder: str) -> None:
    """Print the kernels that vLLM selects for a model."""
    deep_gemm = ["deep_gemm"] if "deepseek" in folder else []
    for name in ["auto", "triton", *deep_gemm]:
        print(f"{folder}, experts {name}: {method(make(folder, moe_backend=name))}")


def check_weft(folder: str, form: str) -> None:
    """Check that weft's layers replace vLLM's."""
    from weft.plugins.vllm import register

    os.environ["WEFT_VLLM"] = form
    register()
    description = method(make(folder, moe_backend="triton"))
    print(f"{folder}, form {form}: {description}")
    if "WeftRoutedExperts" not in description:
        sys.exit("weft's layers do not replace vLLM's")


def check_tokenizer(folder: str) -> None:
    """Check that the tokenizer round-trips a text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.decode(tokenizer("12+7=19")["input_ids"]) != "12+7=19":
        sys.exit(f"{folder}: the tokenizer does not round-trip a text")


if __name__ == "__main__":
    for name in (*COMPILED, *MODULES):
        importlib.import_module(name)
    without_gpu()
    for library, names in OPERATORS.items():
        if missing := [n for n in names.split() if not hasattr(getattr(torch.ops, library), n)]:
            sys.exit(f"torch.ops.{library} has no {', '.join(missing)}")
    for each in sys.argv[1:]:
        check(each)
        check_tokenizer(each)
    for form in ("block", "exchange"):
        for each in sys.argv[1:]:
            check_weft(each, form)
    print("all checks passed")
