# SPDX-License-Identifier: Apache-2.0
"""Compile SGLang's small kernels ahead of time for sm_90a: build_jit.py PART PARTS

A kernel is cached by its arguments, its sources' hash, the architecture and tvm-ffi's version, but
not by path, so the GPU machine finds what is built here. TVM_FFI_CACHE_DIR is the cache. Kernels
missing in the list are compiled at their first use.
"""

import importlib
import sys
import time
from typing import Any

import fake_gpu  # noqa: F401  must be first
import torch
from sglang.kernels.jit.utils.arch import get_jit_cuda_arch

OPS = "sglang.kernels.ops."
BF16 = torch.bfloat16
ROW = 128 * 2  # bytes of one KV head
LATENT, ROPE, QUERY = 512, 64, 1536  # DeepSeek-V3's attention
KERNELS: list[tuple[Any, ...]] = [
    ("layernorm.norm", "_jit_fused_add_rmsnorm_module", BF16, False),
    ("layernorm.norm", "_jit_qknorm_module", 128, BF16),
    *(
        ("layernorm.norm", "_jit_rmsnorm_module", width, BF16)
        for width in (2048, 4096, 7168, QUERY, LATENT)
    ),
    *(("attention.rope", "_jit_fused_rope_module", True, width, BF16, BF16) for width in (128, 64)),
    ("attention.rope", "_jit_rotary_embedding_module"),
    ("attention.dsv4.moe", "_jit_mask_topk_module"),
    ("activation.activation", "activation_module", BF16),
    ("attention.fused_qknorm_rope", "_jit_fused_qknorm_rope_module", 128, True, False),
    *(("kvcache.kvcache", "_jit_kvcache_module", n * ROW, n * ROW) for n in (8, 4, 2, 1)),
    ("kvcache.set_mla_kv_buffer", "set_mla_kv_buffer_module", LATENT * 2, ROPE * 2, True),
    ("attention.concat_mla", "_jit_concat_mla_k_module"),
    ("attention.concat_mla", "_jit_concat_mla_absorb_q_module"),
    ("gemm.dsv3_fused_a_gemm", "dsv3_fused_a_gemm_module", 7168, QUERY + LATENT + ROPE, True),
    ("gemm.dsv3_router_gemm", "dsv3_router_gemm_module", 256, 7168, True, True),
]

if __name__ == "__main__":
    part, parts = map(int, sys.argv[1:])
    if get_jit_cuda_arch().target_name != "9.0a":
        sys.exit(f"SGLang would compile for {get_jit_cuda_arch().target_name}, not 9.0a")
    failed = 0
    for module, function, *arguments in KERNELS[part::parts]:
        start = time.monotonic()
        try:
            getattr(importlib.import_module(OPS + module), function)(*arguments)
        except Exception as error:
            failed += 1
            text = f"FAILED, {type(error).__name__}: {str(error)[-3000:]}"
        else:
            text = f"{time.monotonic() - start:.0f} s"
        print(f"{function} {arguments}: {text}", flush=True)
    sys.exit(failed)
