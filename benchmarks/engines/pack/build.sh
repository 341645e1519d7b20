#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Archives that run SGLang 0.5.23 or vLLM 0.33.0 on a GPU machine without a network, built from PyPI's wheels:
#
#     build.sh torch|triton|sglang|vllm OUT_DIR     3 to 15 minutes each on two cores; no GPU is needed
#
# An engine needs torch and triton beside it. OUT_DIR gets NAME.part00, NAME.part01, ... of at most 44 MiB, which run.sh joins
# and unpacks, and model/. The wheels are for Python 3.12, and their GPU code is reduced to sm_90. The machine has CUDA 13's
# libraries, nvcc, transformers, and what every Python environment with torch has (numpy, requests, ...).
#
# Wheels and trees go to WORK (default: a folder in TMPDIR), up to 4 GB; finished downloads are not repeated.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=${1:-} part=44M level=9e
[[ $# == 2 && -f $here/packages-$name.txt ]] || {
    sed -n 's/^# *\(build.sh \)/\1/p' "$0" >&2
    exit 2
}
for tool in python3 tar xz split readelf strip; do
    command -v "$tool" >/dev/null || { echo "build.sh: $tool is not installed" >&2; exit 1; }
done
mkdir -p "$2"
out=$(cd "$2" && pwd)
work=${WORK:-${TMPDIR:-/tmp}/weft-pack-build}/$name
site=$work/site
mkdir -p "$work"
unset PYTHONPATH

# The platform tags under which these wheels are published; pip matches each exactly.
tags=(--only-binary=:all: --no-deps --python-version 3.12 --implementation cp)
for tag in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_18 2_17 2_12 2_5; do tags+=(--platform "manylinux_${tag}_x86_64"); done
tags+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m pip download -q "${tags[@]}" -d "$work/wheels" -r "$here/packages-$name.txt"

# Regular expressions of paths that are left out.
case $name in
torch) leave=('torch/(test|bin)/' 'torch/lib/libtorch_cuda_linalg\.so') level=6 ;;
triton)
    leave=(triton/FileCheck 'triton/_C/libproton\.so' 'triton/backends/amd/(include|lib)/' triton/backends/nvidia/bin/
        triton/backends/nvidia/lib/cupti 'triton/(instrumentation|plugins)/')
    ;;
sglang)
    # Of FlashInfer, sources for other GPUs and operators; of sglang-kernel, FlashAttention 3 and kernels for other GPUs.
    leave=('flashinfer/data/csrc/(?!nv_internal/|fused_moe/)[^/]*/' 'flashinfer/data/csrc/(alphamoe|cake|msa)\w*\.cu$'
        'flashinfer/data/csrc/fused_moe/(cake_\w+|monomoe|trtllm_backend|warp_decode)/' 'flashinfer/data/cutlass/(examples|python|test)/'
        'flashinfer/experimental/.*\.(cu|cuh)$' 'flashinfer/fused_moe/backends/cudnn_frost/artifacts/' 'flashinfer/moe_ep/kernel_src/.*\.cu$'
        'sgl_kernel/(flash_ops|infllm_ops|sm100/)' sglang/multimodal_gen/ sglang/test/kits/
        'sglang/srt/rust_extensions/_(bench|grpc|multimodal|server)\.' 'torch_memory_saver_hook_mode_\w*(cu12)?\.abi3\.so(?<!_cu13\.abi3\.so)'
        torchvision.libs/ 'torchvision/image_stable\.so' 'compressed_tensors/.*\.safetensors$')
    ;;
vllm)
    leave=('vllm/_(deepselect|qutlass)_C\.' vllm/vllm-rs vllm/entrypoints/serve/instrumentator/static/ vllm/third_party/fmha_sm100/
        'vllm/vllm_flash_attn/_vllm_fa2_C\.' torchvision.libs/ 'torchvision/image_stable\.so')
    ;;
esac
rm -rf "$site"
python3 - "$work/wheels" "$site" "${leave[@]}" <<'PY'
import os
import re
import sys
import zipfile
from pathlib import Path

wheels, site, *leave = sys.argv[1:]
left_out = re.compile("|".join(leave))
for wheel in sorted(Path(wheels).glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if not left_out.match(info.filename):
                path = archive.extract(info, site)
                if ".so" in path or info.external_attr >> 16 & 0o111:
                    os.chmod(path, 0o755)
PY

trim() { python3 "$here/trim_kernels.py" "$@"; }
if [[ $name == torch ]]; then
    trim 90 "$site/torch/lib/libtorch_cuda.so"
    trim --zero 90 "$site/nvidia/nccl/lib/libnccl.so.2"
    strip --strip-debug "$site/nvidia/nccl/lib/libnccl.so.2"
    mkdir -p "$site/torch/bin"
    ln -s /bin/true "$site/torch/bin/torch_shm_manager"
else
    mapfile -t libraries < <(find "$site" -type f \( -name '*.so' -o -name '*.so.*' \))
    for library in "${libraries[@]}"; do
        ! readelf -SW "$library" | grep -q nv_fatbin || trim 90 "$library"
    done
    strip --strip-unneeded "${libraries[@]}"
fi
case $name in
triton) # the machine's ptxas
    mkdir -p "$site/triton/backends/nvidia/bin" ;;
sglang | vllm)
    cp "$here/sitecustomize.py" "$site"
    rm -rf "$out/model"
    cp -r "$here/model" "$out/model" # shapes of models, with the tokenizer of `weft demo`, of bytes
    for folder in "$out"/model/*; do cp "$here"/../../../weft/cli/checkpoint/tokenizer*.json "$folder"; done
    ;;
esac

rm -f "$out/$name".part*
(cd "$site" && find . -type f -o -type l -o -type d -empty) | LC_ALL=C sort >"$work/files"
tar -C "$site" -c --no-recursion --owner=0 --group=0 --numeric-owner --mtime=@0 -T "$work/files" |
    xz --x86 --lzma2=preset=$level -T2 | split -b "$part" -d - "$out/$name.part"
du -m "$out/$name".part*
