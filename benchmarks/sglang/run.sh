#!/usr/bin/env bash
# One measurement inside SGLang in one command, of less than ten minutes each:
#
#     run.sh decode|deepseek|glm|outputs|arithmetic|elastic|load|profile|tune [OPTIONS...]     --help lists the options
#
# It needs a folder that pack/pack_sglang.sh made, SGL (default: .carry/sgl of this checkout), and leaves three files in
# OUT (default: build/sglang): results.jsonl, to which every measurement adds a line, what was printed, and an archive
# of the servers' logs. WEFT_COMMIT names the commit where there is no .git. NVLink multicast stays off in all of them.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
declare -A scripts=(
    [decode]=serving.py [deepseek]=serving.py [glm]=tensor_parallel.py [outputs]=outputs.py
    [arithmetic]=arithmetic.py [elastic]=elastic.py [load]=load.py [profile]=decode_trace.py [tune]=tune_triton.py
)
what=${1:-}
if [[ -z ${scripts[$what]:-} ]]; then
    sed -n 4p "$0" >&2
    exit 2
fi
shift

SGL=${SGL:-$root/.carry/sgl}
OUT=${OUT:-$root/build/sglang}
mkdir -p "$OUT"
results=$(cd "$OUT" && pwd)
# SGL_SITE names a tree that is unpacked already.
home=${SGL_HOME:-${TMPDIR:-/tmp}/sgl}
if [[ -z ${SGL_SITE:-} ]]; then
    [[ -f $SGL/sgl.tar.xz ]] || {
        echo "run.sh: no sgl.tar.xz in $SGL: make it with $here/pack/pack_sglang.sh $SGL, or set SGL" >&2
        exit 2
    }
    stamp=$(cksum <"$SGL/sgl.tar.xz")
    if [[ $(cat "$home/stamp" 2>/dev/null) != "$stamp" ]]; then
        rm -rf "$home/site" "$home/jit"
        mkdir -p "$home"
        "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")' \
            "$SGL/sgl.tar.xz" "$home"
        echo "$stamp" >"$home/stamp"
    fi
    SGL_SITE=$home/site
    export TVM_FFI_CACHE_DIR=$home/jit FLASHINFER_WORKSPACE_BASE=$home
fi

# SGLang finds plug-ins by the metadata of installed distributions, and weft is a folder on the path here: so one is
# written that installs nothing but the entry points, the repository's own and this folder's.
plugins=$home/plugins
mkdir -p "$plugins/weft_bench-0.dist-info"
printf 'Metadata-Version: 2.1\nName: weft-bench\nVersion: 0\n' >"$plugins/weft_bench-0.dist-info/METADATA"
"$python" - "$root/pyproject.toml" >"$plugins/weft_bench-0.dist-info/entry_points.txt" <<'PY'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    points = tomllib.load(file)["project"].get("entry-points", {})
print("[sglang.srt.plugins]")
for name, target in points.get("sglang.srt.plugins", {}).items():
    print(f"{name} = {target}")
print("weft_gate = server_gate:register")
print("weft_dummy = dummy_weights:register")
print("weft_layers = layer_outputs:register")
print("weft_cpu = cpu_ranks:register")
PY

# Tables that `run.sh tune` measured on this kind of GPU, for the kernel that serves stock SGLang.
tables=("$here"/tables/*.json)
if [[ -f ${tables[0]} ]]; then
    version=$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("triton").replace(".", "_"))')
    configs=$SGL_SITE/sglang/srt/layers/moe/moe_runner/triton_utils/configs/triton_$version
    mkdir -p "$configs"
    cp "${tables[@]}" "$configs/"
fi

OUT=$(mktemp -d "${TMPDIR:-/tmp}/weft-sglang-$what.XXXXXX")
export SGL OUT SGL_SITE
export PYTHONPATH=$SGL_SITE:$plugins:$here/plugins:$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export SGLANG_PLUGINS=none # servers get their own list
export ENGINE_STUBS=IPython,xgrammar,jsonschema,soundfile,datasets,zstandard
# DeepSeek's top-k by SGLang's Triton kernel: FlashInfer's would be built by nvcc with cuBLAS's headers.
export SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK=1
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1

status=0
"$python" "$here/${scripts[$what]}" "$what" "$@" 2>&1 | tee "$results/$what.txt" || status=$?
tar -C "$OUT" -czf "$results/sglang-$what.tar.gz" .
[[ ! -f $OUT/results.jsonl ]] || cat "$OUT/results.jsonl" >>"$results/results.jsonl"
rm -rf "$OUT"
exit "$status"
