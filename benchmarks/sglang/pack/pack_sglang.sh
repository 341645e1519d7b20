#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The folder that runs SGLang 0.5.17 on a GPU machine without a network, built from PyPI's wheels:
#
#     pack_sglang.sh OUT_DIR [--no-jit] [--no-check]     5 to 15 minutes, once; no GPU is needed
#
# OUT_DIR gets sgl.tar.xz and model/, some 36 MB in all; ../../engines/pack/steps.sh says what else is written.
# --no-jit leaves SGLang's small kernels to the GPU machine's nvcc, 6 to 14 s each at first use; --no-check leaves out the
# import check. Only these two need Python 3.12 (PATH, pyenv, uv, or PYTHON312) and a C compiler here.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
skips='jit check'
source "$here/../../engines/pack/steps.sh"

step=tools
tools=(tar xz cksum)
((jit == 0 && check == 0)) || tools+=(gcc g++ readelf)
needs 10 "${tools[@]}"
once wheels "$here/packages.txt" -- download

# Of sglang-kernel, 1.1 GB of FlashAttention-3 and of kernels for other GPUs are never unpacked.
assemble() {
    unpack_wheels sglang_kernel sgl_kernel/{flash_ops,flashmla_ops,infllm_ops,sm100/}
    [[ -f $site/sgl_kernel/sm90/common_ops.abi3.so ]] || die 'the wheel has no kernels for sm_90'
    rm -rf "${site:?}"/{bin,tools,sglang/multimodal_gen}
    rm -f "$site"/sglang/srt/{grpc,multimodal,server}/_core.*.so "$site"/torch_memory_saver_hook_mode_*_cu12.abi3.so
    find "$site" -name __pycache__ -prune -exec rm -rf {} +
}
once tree "$here/packages.txt" "$shared/sitecustomize.py" -- assemble
models deepseek-v3 glm-4.5-air qwen3-30b-a3b
((jit == 0 && check == 0)) || machine
export CUDA_HOME=$work/cuda TVM_FFI_CACHE_DIR=$work/jit SGLANG_PLUGINS=none FLASHINFER_WORKSPACE_BASE=$work
export PATH=$work/venv/bin:$PATH

rm -rf "$work/stage/jit"
mkdir -p "$work/stage/jit"
if ((jit)); then
    compiler() {
        local root=$work/nvcc/nvidia/cu13
        rm -rf "$work/nvcc" "$work/cuda"
        "$work/venv/bin/python" -m pip install -q --no-deps --only-binary=:all: --target "$work/nvcc" \
            -r "$here/packages-nvcc.txt"
        ln -sfn lib "$root/lib64"
        ln -sf libcudart.so.13 "$root/lib/libcudart.so"
        ln -sfn "$root" "$work/cuda"
        "$root/bin/nvcc" --version | grep 'release 13.0'
    }
    once cuda "$here/packages-nvcc.txt" -- compiler
    kernels() {
        local first second
        inside "$here/build_jit.py" 0 2 & first=$!
        inside "$here/build_jit.py" 1 2 & second=$!
        wait "$first" && wait "$second"
    }
    once jit "$here/packages.txt" "$here/packages-nvcc.txt" "$here/build_jit.py" -- kernels
    (cd "$work/jit" && find . -name '*.so' -exec cp --parents {} "$work/stage/jit" \;)
fi
if ((check)); then
    step='import check'
    inside "$here/check_import.py" "$out"/model/* >>"$log" 2>&1
    grep -q '^all checks passed' "$log"
    say "$step"
fi
archive sgl.tar.xz site jit
