#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The folder that runs vLLM 0.26.0 on a GPU machine without a network, built from PyPI's wheels:
#
#     pack_vllm.sh OUT_DIR [--no-check]     5 to 10 minutes, once; no GPU is needed
#
# OUT_DIR gets vllm.tar.xz and model/, some 32 MB in all; ../../engines/pack/steps.sh says what else is written. Of vLLM's compiled
# parts it has the operators, FlashAttention 3, FlashMLA and DeepGEMM, for Hopper alone. --no-check leaves out the check
# of symbols, imports and configurations; only it needs Python 3.12 (PATH, pyenv, uv, or PYTHON312).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
skips=check
source "$here/../../engines/pack/steps.sh"

step=tools
tools=(tar xz cksum readelf strip)
((check == 0)) || tools+=(gcc)
needs 10 "${tools[@]}"
once wheels "$here/packages.txt" -- download

# Of vllm, FlashAttention 2, the front end in Rust and kernels for other GPUs are never unpacked.
assemble() {
    unpack_wheels vllm vllm/{vllm-rs,_qutlass_C,_rust_tool_parser,third_party/fmha_sm100/,vllm_flash_attn/_vllm_fa2_C} \
        vllm/third_party/deep_gemm/_C.cpython-{310,311,313,314}-
    mapfile -t libraries < <(find "$site/vllm" -name '*.so')
    python3 "$here/trim_kernels.py" 90 "${libraries[@]}"
    strip --strip-unneeded "${libraries[@]}"
    rm -rf "${site:?}"/bin "$site"/vllm/entrypoints/serve/instrumentator/static
    find "$site" -name __pycache__ -prune -exec rm -rf {} +
}
once tree "$here/packages.txt" "$here/trim_kernels.py" "$shared/sitecustomize.py" -- assemble
models deepseek-v3 qwen3-30b-a3b
if ((check)); then
    machine
    step=check
    export VLLM_CACHE_ROOT=$work/cache VLLM_NO_USAGE_STATS=1 LD_BIND_NOW=1
    inside "$here/check_pack.py" "$out"/model/* >>"$log" 2>&1
    grep -q '^all checks passed' "$log"
    inside "$here/check_models.py" "$out/model/deepseek-v3" >>"$log" 2>&1
    say "$step"
fi
archive vllm.tar.xz site
