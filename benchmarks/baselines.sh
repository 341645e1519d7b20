#!/usr/bin/env bash
# Baselines: weft and other libraries on the GPUs of one host, in one go: baselines.sh [OUT_DIR] [WHEELS]
#
# WHEELS: a folder of wheels to install without a network, into a folder of this run; left out where they are installed.
# FlashInfer compiles its kernels with nvcc at first use: that comes first, with a deadline of its own. Every step has a
# deadline, a log OUT_DIR/NAME.log and a line in OUT_DIR/summary-baselines.txt; one that fails stops nothing, and what the
# others wrote stays; after LIMIT seconds (530) no more is begun, and what runs is ended. No library may use NVLink
# multicast. WEFT_COMMIT names the commit where the tree came without .git; PYTHON chooses the interpreter.
# `python benchmarks/publish.py OUT_DIR` makes tables and pictures of the result.
set -uo pipefail

out=${1:-build/baselines}
wheels=${2:-}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
[[ -z $wheels ]] || wheels=$(cd "$wheels" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3}
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1 COLUMNS=200
total=${LIMIT:-530}
summary=$out/summary-baselines.txt
: >"$summary"

stop() {
    kill $(jobs -p) 2>/dev/null
    exit 130
}
trap stop INT TERM

step() { # step NAME SECONDS COMMAND...
    local name=$1 limit=$2 start=$SECONDS left=$((total - SECONDS)) status verdict=ok
    shift 2
    if ((left < 15)); then
        printf 'LATE   %4d s  %s, not begun\n' 0 "$name" | tee -a "$summary"
        return
    fi
    ((limit < left)) || limit=$left
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 &
    wait $!
    status=$?
    ((status == 0)) || verdict=FAILED
    ((status != 124 && status != 137)) || verdict="LATE, over $limit s,"
    printf '%-6s %4d s  %s\n' "$verdict" $((SECONDS - start)) "$name" | tee -a "$summary"
    ((status == 0)) || tail -n 25 "$out/$name.log" | cut -c 1-300 | sed 's/^/    | /'
}

bench() { # bench NAME SECONDS COMMAND OPTIONS...
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" -m weft bench "$@" --quiet --device cuda \
        --json "$out/$name.json"
}

if [[ -n $wheels ]]; then
    site=${TMPDIR:-/tmp}/weft-baselines
    step install 60 "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$wheels"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
# Its sources include cublasLt.h, which PyTorch's own CUDA packages have where the toolkit has not.
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [[ ! -f $(dirname "$(dirname "$(readlink -f "$nvcc")")")/include/cublasLt.h ]]; then
    CPATH=$("$python" -c 'import nvidia.cu13 as package; print(list(package.__path__)[0])')/include
    export CPATH
fi
export FLASHINFER_WORKSPACE_BASE=${TMPDIR:-/tmp} MAX_JOBS=${MAX_JOBS:-$(nproc)} FLASHINFER_NVCC_THREADS=4
step build 240 "$python" -c '
from flashinfer.jit.comm import gen_moe_alltoall_module, gen_trtllm_comm_module
from flashinfer.jit.core import build_jit_specs
build_jit_specs([gen_moe_alltoall_module(), gen_trtllm_comm_module()])
'

sizes=1,8,32,64,128,256,512,1024,2048,4096
all=(moe --model deepseek-v3 --routing perfect --tokens "$sizes" --peers)
bench baselines-moe-fp8-both 100 "${all[@]}" --quantize fp8 --combine-dtype fp8
bench baselines-moe 80 "${all[@]}"
bench baselines-allreduce 110 allreduce --tokens 1,8,32,128,512,2048 --backend auto --peers
bench baselines-moe-fp8-out 70 "${all[@]}" --payload fp8
bench baselines-lowlatency 50 lowlatency --routing perfect --tokens 1,8,32,64,128,256,512
bench baselines-lowlatency-reduced 50 lowlatency --routing perfect --tokens 1,8,32,64,128,256,512 --reduce sender \
    --combine-dtype fp8
tar -C "$out" --exclude=baselines.tgz -czf "$out/baselines.tgz" . # one file to carry away
failed=$(grep -cv '^ok ' "$summary")
echo "baselines in $SECONDS s: $(grep -c '^ok ' "$summary") steps ok, $failed not; logs in $out"
((failed == 0))
