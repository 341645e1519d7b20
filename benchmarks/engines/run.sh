# SPDX-License-Identifier: Apache-2.0
# Shared by the engines' run.sh, which source it with their arguments after they have set `here`, `engine` and `scripts`, the
# script of each measurement.
#
# PACK is a folder with the parts that pack/build.sh made of torch, triton and the engine (default: .carry/pack of this checkout).
# They are unpacked into PACK_HOME (default: a folder in TMPDIR) once. PACK_SITE names the site-packages of an environment that
# has an engine installed: then nothing is unpacked. OUT gets three files (default: build/$engine): results.jsonl, to which every
# measurement adds lines, what was printed, and an archive of the logs. WEFT_COMMIT names the commit where there is no .git.
# NVLink multicast stays off.
what=${1:-}
if [[ -z $what || -z ${scripts[$what]:-} ]]; then
    sed -n 's/^# *\(run.sh \)/\1/p' "$0" >&2
    exit 2
fi
shift
shared=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$shared/../.." && pwd)
python=${PYTHON:-python3}
PACK=${PACK:-$root/.carry/pack}
OUT=${OUT:-$root/build/$engine}
mkdir -p "$OUT"
results=$(cd "$OUT" && pwd)
home=${PACK_HOME:-${TMPDIR:-/tmp}/weft-pack}
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}

# unpack NAME: into $home/NAME, unless these parts were unpacked there.
unpack() {
    local parts=("$PACK/$1".part*) stamp
    [[ -f ${parts[0]} ]] || {
        echo "run.sh: no $1.part00 in $PACK: make it with $shared/pack/build.sh $1 $PACK, or set PACK or PACK_SITE" >&2
        exit 2
    }
    stamp=$(cat "${parts[@]}" | cksum)
    [[ $(cat "$home/$1.stamp" 2>/dev/null) != "$stamp" ]] || return 0
    rm -rf "${home:?}/$1"
    mkdir -p "$home/$1"
    cat "${parts[@]}" | "$python" -c 'import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz") as file:
    file.extractall(sys.argv[1], filter="fully_trusted")' "$home/$1"
    echo "$stamp" >"$home/$1.stamp"
}

# use_pack: set the paths of an unpacked engine, torch and Triton. CUDA's libraries and headers are those of the machine's packages
# `nvidia`; nvcc links against names without a version, of which $home/lib has links.
use_pack() {
    local nvidia folder library name
    nvidia=$(env -u PYTHONPATH "$python" -c 'import importlib.util
print(list(importlib.util.find_spec("nvidia").submodule_search_locations)[-1])')
    mkdir -p "$home/lib" "$home/triton/triton/backends/nvidia/bin"
    for folder in "$nvidia"/*; do
        [[ -e $home/torch/nvidia/${folder##*/} ]] || ln -s "$folder" "$home/torch/nvidia/"
    done
    for name in nvrtc cudart cuda cublas cublasLt nvJitLink; do
        for library in "$nvidia"/*/lib/lib"$name".so.* /usr/lib/x86_64-linux-gnu/lib"$name".so.1; do
            [[ ! $library =~ lib$name\.so\.[0-9]+$ || ! -e $library ]] || ln -sf "$library" "$home/lib/lib$name.so"
        done
    done
    PACK_SITE=$home/$engine
    export PATH=$CUDA_HOME/bin:$PATH
    export TRITON_PTXAS_PATH=${TRITON_PTXAS_PATH:-$CUDA_HOME/bin/ptxas}
    ln -sf "$TRITON_PTXAS_PATH" "$home/triton/triton/backends/nvidia/bin/ptxas"
    export PYTHONPATH=$home/torch:$home/triton${PYTHONPATH:+:$PYTHONPATH}
    LD_LIBRARY_PATH=$home/torch/nvidia/nccl/lib:$(printf %s: "$nvidia"/*/lib)${LD_LIBRARY_PATH:-}
    LIBRARY_PATH=$home/lib:$CUDA_HOME/lib64:$CUDA_HOME/lib64/stubs
    CPATH=$(printf %s: "$nvidia"/*/include)
    export LD_LIBRARY_PATH LIBRARY_PATH CPATH
    export TVM_FFI_CACHE_DIR=$home/jit SGLANG_JIT_CACHE_DIR=$home/jit FLASHINFER_WORKSPACE_BASE=$home
    export SGLANG_DG_CACHE_DIR=$home/deep_gemm DG_JIT_CACHE_DIR=$home/deep_gemm
    export NVCC_APPEND_FLAGS=${NVCC_APPEND_FLAGS:--split-compile=8} # Marlin's modules compile for minutes
}

if [[ -z ${PACK_SITE:-} ]]; then
    for name in torch triton "$engine"; do unpack "$name"; done
    use_pack
fi

# entry_points GROUP LINE...: engines find plug-ins by the metadata of installed distributions, and weft is a folder on the
# path here: so one is written that installs nothing but the entry points, the repository's own and these.
entry_points() {
    plugins=$home/$engine-plugins
    mkdir -p "$plugins/weft_bench-0.dist-info"
    printf 'Metadata-Version: 2.1\nName: weft-bench\nVersion: 0\n' >"$plugins/weft_bench-0.dist-info/METADATA"
    "$python" - "$root/pyproject.toml" "$@" >"$plugins/weft_bench-0.dist-info/entry_points.txt" <<'PY'
import sys
import tomllib

project, group, *more = sys.argv[1:]
with open(project, "rb") as file:
    points = tomllib.load(file)["project"].get("entry-points", {})
print(f"[{group}]")
for name, target in points.get(group, {}).items():
    print(f"{name} = {target}")
print("\n".join(more))
PY
}

# measure ARGUMENTS...
measure() {
    local status=0
    OUT=$(mktemp -d "${TMPDIR:-/tmp}/weft-$engine-$what.XXXXXX")
    export PACK OUT PACK_SITE
    export PYTHONPATH=$root:$PACK_SITE:$plugins:$here:$shared:$here/plugins${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
    export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
    "$python" "$here/${scripts[$what]}" "$what" "$@" 2>&1 | tee "$results/$what.txt" || status=$?
    tar -C "$OUT" -czf "$results/$engine-$what.tar.gz" .
    [[ ! -f $OUT/results.jsonl ]] || cat "$OUT/results.jsonl" >>"$results/results.jsonl"
    rm -rf "$OUT"
    exit "$status"
}
