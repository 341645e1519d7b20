# SPDX-License-Identifier: Apache-2.0
"""Import what the runs import, and make models for a GPU that is not there: check_pack.py DIR...

With LD_BIND_NOW=1 every function that a compiled part wants of PyTorch has to be found. Models are
made on PyTorch's device "meta", so vLLM chooses its kernels. Prints "all checks passed".
"""

import importlib
import os
import sys

import fake_nvml  # noqa: F401  first
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
    """Leave out two calls that ask the GPU."""
    from vllm.utils import deep_gemm

    deep_gemm._apply_pdl = lambda *given: None
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"


def make(folder: str, **flags: object) -> torch.nn.Module:
    """The model of a folder, without weights, as a server with these flags makes it."""
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
    """What runs the first layer of experts."""
    experts = next(each for each in model.modules() if hasattr(each, "w13_weight"))
    found = experts.quant_method
    kernels = (getattr(found, key, None) for key in ("fp8_backend", "unquantized_backend"))
    return f"{type(experts).__name__}, {type(found).__mro__[1].__name__}, {list(kernels)}"


def check(folder: str) -> None:
    """The kernels that vLLM chooses for a model."""
    deep_gemm = ["deep_gemm"] if "deepseek" in folder else []
    for name in ["auto", "triton", *deep_gemm]:
        print(f"{folder}, experts {name}: {method(make(folder, moe_backend=name))}")


def check_weft(folder: str, form: str) -> None:
    """That weft's layers stand in for vLLM's."""
    from weft.plugins.vllm import register

    os.environ["WEFT_VLLM"] = form
    register()
    found = method(make(folder, moe_backend="triton"))
    print(f"{folder}, form {form}: {found}")
    if "WeftRoutedExperts" not in found:
        sys.exit("weft's layers do not stand in for vLLM's")


def check_tokenizer(folder: str) -> None:
    """That a text comes back."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.decode(tokenizer("12+7=19")["input_ids"]) != "12+7=19":
        sys.exit(f"{folder}: a text does not come back from the tokenizer")


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
