#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One measurement inside SGLang in one command, of less than ten minutes each:
#
#     run.sh decode|deepseek|glm|arithmetic|blocks|speed|elastic|load|profile|tune [OPTIONS...]     --help lists the options
#
# It needs what ../engines/pack/build.sh made; ../engines/run.sh says where, and where the results go.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
declare -A scripts=(
    [decode]=serving.py [deepseek]=serving.py [glm]=tensor_parallel.py
    [arithmetic]=arithmetic.py [blocks]=blocks.py [speed]=blocks.py [elastic]=elastic.py [load]=load.py [profile]=decode_trace.py [tune]=tune_triton.py
)
engine=sglang
source "$here/../engines/run.sh"
entry_points sglang.srt.plugins 'weft_gate = server_gate:register' 'weft_dummy = dummy_weights:register' \
    'weft_cpu = cpu_ranks:register' 'weft_one_gpu = one_gpu:register'

# Tables that `run.sh tune` measured on this kind of GPU, for the kernel that serves stock SGLang.
tables=("$here"/tables/*.json)
if [[ -f ${tables[0]} ]]; then
    version=$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("triton").replace(".", "_"))')
    configs=$PACK_SITE/sglang/srt/layers/moe/moe_runner/triton_utils/configs/triton_$version
    mkdir -p "$configs"
    cp "${tables[@]}" "$configs/"
fi

export SGLANG_PLUGINS=none # servers get their own list
export ENGINE_STUBS=IPython,xgrammar,jsonschema,soundfile,datasets,zstandard,llguidance,outlines_core,anthropic,openai_harmony
# DeepSeek's top-k by SGLang's Triton kernel: FlashInfer's would be built by nvcc with cuBLAS's headers.
export SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK=1
measure "$@"
