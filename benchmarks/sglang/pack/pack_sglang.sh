#!/usr/bin/env bash
# The folder that runs SGLang 0.5.17 on a GPU machine without a network, built from PyPI's wheels:
#
#     pack_sglang.sh OUT_DIR [--no-jit] [--no-check]     5 to 15 minutes, once; no GPU is needed
#
# OUT_DIR gets sgl.tar.xz and model/, some 36 MB in all. Downloads and build trees go to WORK (default: a folder in TMPDIR),
# about 4 GB: run again, after a failure say, and finished steps are skipped; remove WORK to start afresh.
# --no-jit leaves SGLang's small kernels to the GPU machine's nvcc, 6 to 14 s each at first use; --no-check leaves out the
# import check. Only these two need Python 3.12 (PATH, pyenv, uv, or PYTHON312) and a C compiler here: the wheels are for
# Python 3.12, and the GPU machine brings PyTorch 2.11 for CUDA 13 with Triton 3.6.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
most_archive=45000000
out='' jit=1 check=1
for argument in "$@"; do
    case $argument in
        --no-jit) jit=0 ;;
        --no-check) check=0 ;;
        -*) echo "pack_sglang.sh: unknown option $argument" >&2 && exit 2 ;;
        *) out=$argument ;;
    esac
done
[[ -n $out ]] || { sed -n 4p "$0" >&2 && exit 2; }
if [[ -d $out && -n $(ls -A "$out") && ! -f $out/.packed ]]; then
    echo "pack_sglang.sh: $out is not empty and was not made by this script" >&2
    exit 2
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
touch "$out/.packed"
work=${WORK:-${TMPDIR:-/tmp}/pack_sglang.work}
mkdir -p "$work"
work=$(cd "$work" && pwd)
log=$work/log
: >"$log"

step=start
trap 'code=$?; ((code == 0)) || { echo "pack_sglang.sh: failed at: $step; end of $log:" >&2; tail -n 15 "$log" >&2; }' EXIT
say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
die() {
    echo "pack_sglang.sh: $*" >&2
    exit 1
}

# once NAME INPUT... -- COMMAND...: run it unless it ended well with these inputs.
once() {
    local name=$1 key inputs=()
    shift
    step=$name
    while [[ $1 != -- ]]; do
        inputs+=("$1")
        shift
    done
    shift
    key=$(cat "${inputs[@]}" | cksum)
    [[ $(cat "$work/$name.done" 2>/dev/null) != "$key" ]] || return 0
    "$@" >>"$log" 2>&1
    echo "$key" >"$work/$name.done"
    say "$name"
}

step=tools
tools=(tar xz cksum)
((jit == 0 && check == 0)) || tools+=(gcc g++ readelf)
for tool in "${tools[@]}"; do command -v "$tool" >/dev/null || die "$tool is not installed"; done
free=$(df -Pk "$work" | awk 'NR == 2 {print int($4 / 1048576)}')
((free >= 10)) || die "$work has $free GB free; 10 GB are needed"
find_python() {
    local found
    for found in "${PYTHON312:-}" python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python3.12 \
        "$(command -v uv >/dev/null && uv python find --no-python-downloads 3.12 2>/dev/null || true)"; do
        [[ -n $found ]] || continue
        "$found" -c 'import sys, venv; assert sys.version_info[:2] == (3, 12)' 2>/dev/null || continue
        command -v "$found"
        return
    done
    return 1
}
python312=''
if ((jit || check)); then
    python312=$(find_python) || die "no Python 3.12 found: set PYTHON312, or give --no-jit --no-check"
fi
export PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH

# The platform tags under which these wheels are published; pip matches each exactly.
tags=(--only-binary=:all: --no-deps --python-version 3.12 --implementation cp)
for tag in 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do tags+=(--platform "manylinux_${tag}_x86_64"); done
tags+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

download() {
    rm -rf "$work/wheels"
    mkdir "$work/wheels"
    python3 -m pip download -q "${tags[@]}" -d "$work/wheels" -r "$here/packages.txt"
}
once wheels "$here/packages.txt" -- download

# Of sglang-kernel, 1.1 GB of FlashAttention-3 and of kernels for other GPUs are never unpacked.
site=$work/stage/site
assemble() {
    local wheels
    rm -rf "$work/stage"
    mkdir -p "$site"
    mapfile -t wheels < <(find "$work/wheels" -name '*.whl' ! -name 'sglang_kernel-*')
    python3 -m pip install -q --no-index --no-compile "${tags[@]}" --target "$site" "${wheels[@]}"
    python3 - "$work"/wheels/sglang_kernel-*.whl "$site" <<'PY'
import os
import sys
import zipfile

wheel, site = sys.argv[1:]
leave = ("flash_ops", "flashmla_ops", "infllm_ops", "sm100/")
with zipfile.ZipFile(wheel) as archive:
    for info in archive.infolist():
        if not info.filename.startswith(tuple(f"sgl_kernel/{name}" for name in leave)):
            path = archive.extract(info, site)
            if path.endswith(".so"):
                os.chmod(path, 0o755)
if not os.path.isfile(f"{site}/sgl_kernel/sm90/common_ops.abi3.so"):
    sys.exit("the wheel holds no kernels for sm_90")
PY
    rm -rf "${site:?}"/{bin,tools,sglang/multimodal_gen}
    rm -f "$site"/sglang/srt/{grpc,multimodal,server}/_core.*.so "$site"/torch_memory_saver_hook_mode_*_cu12.abi3.so
    find "$site" -name __pycache__ -prune -exec rm -rf {} +
    cp "$here/sitecustomize.py" "$site/"
}
once tree "$here/packages.txt" "$here/sitecustomize.py" -- assemble

step=tokenizer
rm -rf "$out/model"
cp -r "$here/model" "$out/model"
tokenizers() {
    rm -rf "$work/tok"
    python3 -m pip install -q --no-deps --only-binary=:all: --target "$work/tok" \
        "$(grep '^tokenizers==' "$here/packages.txt")"
}
once tokenizers "$here/packages.txt" -- tokenizers
PYTHONPATH=$work/tok python3 "$here/make_tokenizer.py" "$out"/model/*/ >>"$log" 2>&1

# inside PYTHON-ARGUMENTS: with the tree, an H200 that is not there, and CUDA libraries that do nothing.
inside() {
    local stubs
    stubs=$(sed -n 's/^export ENGINE_STUBS=//p' "$here/../run.sh")
    env LD_LIBRARY_PATH="$work/stubs" LD_PRELOAD="$work/stubs/libplain.so" PYTHONPATH="$site" \
        PATH="$work/venv/bin:$PATH" CUDA_HOME="$work/cuda" TVM_FFI_CACHE_DIR="$work/jit" HF_HUB_OFFLINE=1 \
        TRANSFORMERS_OFFLINE=1 SGLANG_PLUGINS=none ENGINE_STUBS="$stubs" FLASHINFER_WORKSPACE_BASE="$work" \
        TRITON_CACHE_DIR="$work/triton" "$work/venv/bin/python" -W ignore "$@"
}
if ((jit || check)); then
    environment() {
        rm -rf "$work/venv" "$work/stubs"
        "$python312" -m venv "$work/venv"
        "$work/venv/bin/python" -m pip install -q --no-deps --only-binary=:all: -r "$here/packages-build.txt"
    }
    once venv "$here/packages-build.txt" -- environment
    libraries() {
        local packages=$work/venv/lib/python3.12/site-packages found
        mapfile -t found < <(find "$packages"/{torch,torchvision,torchaudio} "$site" -name '*.so*' -type f)
        python3 "$here/make_cuda_stubs.py" "$work/stubs" "${found[@]}"
    }
    once stubs "$here/packages-build.txt" "$here/packages.txt" "$here/make_cuda_stubs.py" -- libraries
fi

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

step=pack
(cd "$work/stage" && find site jit -type f -o -type l -o -type d -empty) | LC_ALL=C sort >"$work/files"
tar -C "$work/stage" -c --no-recursion --owner=0 --group=0 --numeric-owner --mtime=@0 -T "$work/files" |
    xz -9 -T2 >"$out/sgl.tar.xz"
size=$(stat -c %s "$out/sgl.tar.xz")
((size <= most_archive)) || die "the archive has $size bytes, over $most_archive: carried folders are small"
say "$out: $((size / 1000)) kB in sgl.tar.xz, $(wc -l <"$work/files") files"
