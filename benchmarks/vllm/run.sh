#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One measurement inside vLLM in one command, of less than ten minutes each:
#
#     run.sh arithmetic|blocks|speed|decode|deepseek|load|sleep|profile [OPTIONS...]     --help lists the options
#
# It needs what ../engines/pack/build.sh made; ../engines/run.sh says where, and where the results go.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
declare -A scripts=(
    [arithmetic]=arithmetic.py [blocks]=blocks.py [speed]=blocks.py [decode]=decode.py [deepseek]=decode.py [load]=load.py [sleep]=sleep.py [profile]=decode.py
)
engine=vllm
source "$here/../engines/run.sh"
entry_points vllm.general_plugins 'weft_random = random_weights:register'

# What reads grammars, chats and tools is not in the pack.
export ENGINE_STUBS=mistral_common,anthropic,openai_harmony,llguidance,outlines_core,xgrammar,mcp,lmformatenforcer,soundfile,datasets
export WEFT_LOG=info VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$home/cache}
measure "$@"
