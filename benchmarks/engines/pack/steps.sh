# SPDX-License-Identifier: Apache-2.0
# What packs of engines have in common: sourced by a script that has set `here` and `skips`, the options that it takes
# (--no-WHAT for each word), with its arguments. Sets `out`, and each word to 1, or to 0 where it is left out.
#
# Downloads and build trees go to WORK (default: a folder in TMPDIR), about 4 GB: run again, after a failure say, and finished
# steps are skipped; remove WORK to start afresh. The wheels are for Python 3.12 and the GPU machine, which brings PyTorch 2.11
# for CUDA 13 with Triton 3.6 and the other packages of packages-machine.txt.
name=$(basename "$0")
most_archive=45000000
out=''
for word in $skips; do declare "$word=1"; done
for argument in "$@"; do
    word=${argument#--no-}
    if [[ $argument == --no-* && " $skips " == *" $word "* ]]; then
        declare "$word=0"
    elif [[ $argument == -* ]]; then
        echo "$name: unknown option $argument" >&2
        exit 2
    else
        out=$argument
    fi
done
[[ -n $out ]] || { sed -n 's/^# *\(pack_[a-z]*\.sh \)/\1/p' "$0" >&2 && exit 2; }
shared=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$shared/../../.." && pwd)
if [[ -d $out && -n $(ls -A "$out") && ! -f $out/.packed ]]; then
    echo "$name: $out is not empty and was not made by this script" >&2
    exit 2
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
touch "$out/.packed"
work=${WORK:-${TMPDIR:-/tmp}/${name%.sh}.work}
mkdir -p "$work"
work=$(cd "$work" && pwd)
log=$work/log
: >"$log"
site=$work/stage/site

step=start
trap 'code=$?; ((code == 0)) || { echo "$name: failed at: $step; end of $log:" >&2; tail -n 15 "$log" >&2; }' EXIT
say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
die() {
    echo "$name: $*" >&2
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

# needs GB TOOL...
needs() {
    local most=$1 tool free
    shift
    for tool in "$@"; do command -v "$tool" >/dev/null || die "$tool is not installed"; done
    free=$(df -Pk "$work" | awk 'NR == 2 {print int($4 / 1048576)}')
    ((free >= most)) || die "$work has $free GB free; $most GB are needed"
}

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

# unpack_wheels WHEEL PREFIX...: every wheel into the tree, but of this one no file whose name begins with a prefix.
unpack_wheels() {
    local wheels large=$1
    shift
    rm -rf "$work/stage"
    mkdir -p "$site"
    mapfile -t wheels < <(find "$work/wheels" -name '*.whl' ! -name "$large-*")
    python3 -m pip install -q --no-index --no-compile "${tags[@]}" --target "$site" "${wheels[@]}"
    python3 - "$work"/wheels/"$large"-*.whl "$site" "$@" <<'PY'
import os
import sys
import zipfile

wheel, site, *leave = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for info in archive.infolist():
        if not info.filename.startswith(tuple(leave)):
            path = archive.extract(info, site)
            if path.endswith(".so"):
                os.chmod(path, 0o755)
PY
    cp "$shared/sitecustomize.py" "$site/"
}

# models FOLDER...: shapes of models with the tokenizer of `weft demo`, of bytes.
models() {
    local folder
    rm -rf "$out/model"
    mkdir "$out/model"
    for folder in "$@"; do
        cp -r "$shared/model/$folder" "$out/model/"
        cp "$root"/weft/cli/checkpoint/tokenizer*.json "$out/model/$folder/"
    done
}

# machine: a Python 3.12 with the GPU machine's packages, and CUDA libraries that do nothing.
machine() {
    local python312
    python312=$(find_python) || die "no Python 3.12 found: set PYTHON312, or leave the checks out"
    environment() {
        rm -rf "$work/venv" "$work/stubs"
        "$python312" -m venv "$work/venv"
        "$work/venv/bin/python" -m pip install -q --no-deps --only-binary=:all: -r "$shared/packages-machine.txt"
    }
    once venv "$shared/packages-machine.txt" -- environment
    libraries() {
        local packages=$work/venv/lib/python3.12/site-packages found
        mapfile -t found < <(find "$packages"/{torch,torchvision,torchaudio} "$site" -name '*.so*' -type f)
        python3 "$shared/make_cuda_stubs.py" "$work/stubs" "${found[@]}"
    }
    once stubs "$shared/packages-machine.txt" "$here/packages.txt" "$shared/make_cuda_stubs.py" -- libraries
}

# inside PYTHON-ARGUMENTS: with the tree, an H200 that is not there, and CUDA libraries that do nothing.
inside() {
    local stubs
    stubs=$(sed -n 's/^export ENGINE_STUBS=//p' "$here/../run.sh")
    env LD_LIBRARY_PATH="$work/stubs" LD_PRELOAD="$work/stubs/libplain.so" PYTHONPATH="$site:$shared:$root" HF_HUB_OFFLINE=1 \
        TRANSFORMERS_OFFLINE=1 ENGINE_STUBS="$stubs" TRITON_CACHE_DIR="$work/triton" "$work/venv/bin/python" -W ignore "$@"
}

# archive FILE FOLDER...: of the stage, the same bytes for the same files.
archive() {
    local file=$1 size
    shift
    step=pack
    (cd "$work/stage" && find "$@" -type f -o -type l -o -type d -empty) | LC_ALL=C sort >"$work/files"
    tar -C "$work/stage" -c --no-recursion --owner=0 --group=0 --numeric-owner --mtime=@0 -T "$work/files" |
        xz -9 -T2 >"$out/$file"
    size=$(stat -c %s "$out/$file")
    ((size <= most_archive)) || die "the archive has $size bytes, over $most_archive: carried folders are small"
    say "$out: $((size / 1000)) kB in $file, $(wc -l <"$work/files") files"
}
