# SPDX-License-Identifier: Apache-2.0
# What the engines' run.sh have in common: sourced, with its arguments, by one that has set `here`, `engine`, `pack`, its
# archive's name, and `scripts`, of each measurement. Leaves PACK_SITE unpacked.
#
# PACK is the folder of the pack (default: .carry/$pack of this checkout), OUT gets three files (default: build/$engine):
# results.jsonl, to which every measurement adds a line, what was printed, and an archive of the logs. PACK_SITE names a tree
# that is unpacked already, PACK_HOME where it is unpacked. WEFT_COMMIT names the commit where there is no .git. NVLink
# multicast stays off.
what=${1:-}
if [[ -z $what || -z ${scripts[$what]:-} ]]; then
    sed -n 's/^# *\(run.sh \)/\1/p' "$0" >&2
    exit 2
fi
shift
shared=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$shared/../.." && pwd)
python=${PYTHON:-python3}
PACK=${PACK:-$root/.carry/$pack}
OUT=${OUT:-$root/build/$engine}
mkdir -p "$OUT"
results=$(cd "$OUT" && pwd)
home=${PACK_HOME:-${TMPDIR:-/tmp}/weft-pack-$pack}

if [[ -z ${PACK_SITE:-} ]]; then
    archive=$PACK/$pack.tar.xz
    [[ -f $archive ]] || {
        echo "run.sh: no $pack.tar.xz in $PACK: make it with $(echo "$here"/pack/pack_*.sh) $PACK, or set PACK" >&2
        exit 2
    }
    stamp=$(cksum <"$archive")
    if [[ $(cat "$home/stamp" 2>/dev/null) != "$stamp" ]]; then
        rm -rf "$home/site" "$home/jit"
        mkdir -p "$home"
        "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")' \
            "$archive" "$home"
        echo "$stamp" >"$home/stamp"
    fi
    PACK_SITE=$home/site
fi

# entry_points GROUP LINE...: engines find plug-ins by the metadata of installed distributions, and weft is a folder on the
# path here: so one is written that installs nothing but the entry points, the repository's own and these.
entry_points() {
    plugins=$home/plugins
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
    export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
    export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
    "$python" "$here/${scripts[$what]}" "$what" "$@" 2>&1 | tee "$results/$what.txt" || status=$?
    tar -C "$OUT" -czf "$results/$engine-$what.tar.gz" .
    [[ ! -f $OUT/results.jsonl ]] || cat "$OUT/results.jsonl" >>"$results/results.jsonl"
    rm -rf "$OUT"
    exit "$status"
}
