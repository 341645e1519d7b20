#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs GPUs, in one command:
#     accept.sh [all|tests|bench|allreduce|lowlatency|layer|compat|captures|deaths|sanitizer|ordering|rivals] [OUT_DIR]
#
# Each step has a deadline, a log OUT_DIR/NAME.log, and a line with its wall time. A step that fails stops nothing; the
# exit status is 1 if any did. Most valuable first. With 8 GPUs, tests of few ranks run three at a time on GPUs of
# their own; nothing runs beside a benchmark or the litmus. CUDA_VISIBLE_DEVICES is respected; PYTHON chooses the
# interpreter.
set -uo pipefail

what=${1:-all}
out=${2:-build/gpu}
known=all,tests,bench,allreduce,lowlatency,layer,compat,captures,deaths,sanitizer,ordering,rivals
if [[ ! $what =~ ^(${known//,/|})$ ]]; then
    echo "accept.sh: '$what' is none of ${known//,/, }" >&2
    exit 2
fi
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3}
devices=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -)}
IFS=, read -ra gpus <<<"$devices"
if ((${#gpus[@]} == 0)); then
    echo "accept.sh: no GPU: nvidia-smi lists none, or CUDA_VISIBLE_DEVICES is empty; run weft doctor" >&2
    exit 1
fi
summary=$out/summary-$what.txt
: >"$summary"

# Bash runs a trap only between commands, so every step is a job that is waited for.
stop() {
    kill $(jobs -p) 2>/dev/null
    exit 130
}
trap stop INT TERM

# step NAME SECONDS COMMAND...
step() {
    local name=$1 limit=$2 start=$SECONDS status verdict=ok
    shift 2
    trap stop INT TERM
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 &
    wait $!
    status=$?
    ((status == 0)) || verdict=FAILED
    ((status != 124 && status != 137)) || verdict="LATE, over $limit s,"
    printf '%-6s %4d s  %-18s %s\n' "$verdict" $((SECONDS - start)) "$name" \
        "$(tail -n 1 "$out/$name.log" | tr -d '=' | cut -c 1-80)" | tee -a "$summary"
    ((status == 0)) || tail -n 25 "$out/$name.log" | sed 's/^/    | /'
}

# A run in which nothing passed has shown nothing, and a sanitizer that is missing has found nothing.
verdict='set -o pipefail; last=$("${@:2}" 2>&1 | tee /dev/stderr | tail -n 1) && [[ $last =~ [1-9][0-9]*" passed" ]] &&
    [[ $1 == some || ! $last =~ skipped ]]'

check() { # check NAME SECONDS some|all FILES...: their tests that need a GPU; all: none may be skipped
    local name=$1 limit=$2 which=$3
    shift 3
    step "$name" "$limit" bash -c "$verdict" _ "$which" "$python" -m pytest -m gpu -q -p no:cacheprovider "$@"
}

lane() { # lane FIRST COUNT COMMAND... &: on these GPUs only; always a job, and so a shell of its own
    local few=("${gpus[@]:$1:$2}")
    shift 2
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${few[*]}") "$@"
}

rounds() { check rounds 300 some tests/alltoall/test_{alltoall,ways}.py tests/{group,heap,launcher}; }
sanitizer() { check sanitizer 840 all tests/gpu/test_sanitizer.py; }
ordering() { check ordering 120 all tests/models/test_dispatch_tail.py; }
compat() { check compat 240 some tests/compat -n 4 --dist worksteal; }
captures() { check captures 400 some tests/gpu/test_captures.py; }
deaths() { check deaths 300 all tests/gpu/test_recovery.py; }
failures() {
    check failures 300 some tests/alltoall tests/grouping tests/lowlatency \
        tests/allreduce tests/runtime tests/jit tests/bench \
        --deselect=tests/alltoall/test_{alltoall,ways}.py --deselect=tests/runtime/test_skew.py
}

tests() {
    if ((${#gpus[@]} >= 8)); then
        lane 0 3 rounds &
        lane 3 3 failures &
        [[ $what != all ]] || lane 6 2 sanitizer &
        wait
    else
        rounds
        failures
    fi
    check grid 150 some tests/gpu/test_grid.py
    check graphs 500 some tests/gpu/test_graphs.py
    check overlap 200 some tests/gpu/test_overlap_graphs.py
    check skew 200 some tests/runtime/test_skew.py
    step demo 150 "$python" -m weft demo
    step doctor 30 "$python" -m weft doctor
}

timed() { # timed NAME SECONDS BENCHMARK OPTIONS...
    step "$1" "$2" "$python" -m weft bench "${@:3}" --quiet --device cuda --json "$out/$1.json"
}

# Of each benchmark: NAME SECONDS OPTIONS...
measure() { timed "$1" "$2" moe --model deepseek-v3 --plot "$out/$1.png" "${@:3}"; }
reduce() { timed "$1" "$2" allreduce --tokens 1..2048 --plot "$out/$1.png" "${@:3}"; }
low() {
    timed "$1" "$2" lowlatency --tokens 1..128 "${@:3}"
    timed "$1-512" "$2" lowlatency --tokens 256,512 "${@:3}"
}
# NAME SECONDS RANKS OPTIONS...: 32 experts a rank, as 8 ranks have of DeepSeek-V3's 256.
layers() { timed "$1" "$2" layer --ranks "$3" --experts $((32 * $3)) --dtype fp8 "${@:4}"; }

bench() {
    local fp8=(--combine-dtype fp8 --quantize fp8) n
    measure perfect 60 --routing perfect --tokens 1..4096
    measure fp8-both 60 --routing perfect --tokens 1..4096 "${fp8[@]}"
    measure random 60 --routing uniform --tokens 1..4096
    measure fp8-out 60 --routing perfect --tokens 1..4096 --payload fp8
    ((${#gpus[@]} < 4)) || measure ranks-4 60 --routing perfect --tokens 1..4096 --ranks 4
    ((${#gpus[@]} < 2)) || measure ranks-2 60 --routing perfect --tokens 1..4096 --ranks 2
    for n in 16 8 24; do measure "sms-$n" 40 --routing perfect --tokens 1024,2048 --num-sms $n; done
    measure trace 40 --routing perfect --tokens 128 --trace "$out/trace-128.json"
}

allreduce() {
    local n hidden each=oneshot,twoshot,twoshot_bulk,auto most=$((${#gpus[@]} > 8 ? 8 : ${#gpus[@]}))
    local -a ranks=()
    for n in 8 4 2; do ((n > most)) || ranks+=("$n"); done
    if ((${#ranks[@]} == 0)); then
        step ar-none 1 bash -c 'echo "an all-reduce needs two GPUs"; exit 1'
        return
    fi
    check ar-tests 300 some tests/allreduce
    for n in "${ranks[@]}"; do
        for hidden in 7168 4096; do
            reduce "ar-$n-$hidden" 60 --ranks "$n" --hidden "$hidden" --backend "$each"
        done
    done
    n=${ranks[0]}
    for each in none fp8-static fp8-token fp8-group; do
        reduce "ar-$each" 60 --ranks "$n" --epilogue "$each"
    done
    reduce ar-eager 60 --ranks "$n" --eager
    reduce ar-no-pdl 60 --ranks "$n" --no-pdl
    reduce ar-peers 400 --ranks "$n" --peers
}

# Two routings, as the targets have them.
lowlatency() {
    low ll-perfect 60 --routing perfect
    low ll-reduced 60 --routing uniform --reduce sender --combine-dtype fp8
    timed ll-trace 60 lowlatency --tokens 128 --trace "$out/lowlatency-128.json"
    check ll-graphs 200 all tests/gpu/test_graphs.py -k low
    check ll-tests 300 some tests/lowlatency
}

# The layer of DeepSeek-V3 first, then other routings, by expert, other models, and its tests.
layer() {
    local n each most=$((${#gpus[@]} > 8 ? 8 : ${#gpus[@]}))
    if ((most < 2)); then
        step layer-none 1 bash -c 'echo "a layer that sends needs two GPUs"; exit 1'
        return
    fi
    layers "layer-$most" 120 "$most" --tokens 8,16,64,128,256,512,1024 --overlap none,shared_expert,gemm_push \
        --plot "$out/layer-$most.png"
    layers layer-zipf 60 "$most" --tokens 8,64,128,512 --overlap none,gemm_push --routing zipf
    layers layer-expert 90 "$most" --tokens 1,8,16,32,64,128,256,512 --overlap none,shared_expert,gemm_push --mode low_latency
    for n in 4 2; do ((n >= most)) || layers "layer-$n" 60 "$n" --tokens 8,64,128,256,512 --overlap none,gemm_push; done
    for each in qwen3-30b-a3b glm-4.5-air gpt-oss-120b; do
        timed "layer-$each" 60 layer --ranks "$most" --model "$each" --tokens 8,64,128,512 --overlap none,gemm_push
    done
    check layer-tests 300 some tests/moe
    check layer-product 180 all tests/gemm/test_hopper{,_gpu}.py
}

# Other projects' own test programs, which `compat/run_rivals_tests.py collect` takes from git clones: not in "all".
rivals() {
    step rivals 590 "$python" benchmarks/compat/run_rivals_tests.py run --ranks "${#gpus[@]}" --limit "${LIMIT:-560}" \
        --out "$out/rivals"
}

if [[ $what == all ]]; then
    tests
    bench
    allreduce
    lowlatency
    layer
    compat
    captures
    deaths
    ((${#gpus[@]} >= 8)) || sanitizer
    ordering
else
    "$what"
fi
failed=$(grep -cv '^ok ' "$summary")
echo
echo "$what on ${#gpus[@]} GPUs in $SECONDS s: $(grep -c '^ok ' "$summary") steps ok, $failed not; logs in $out"
grep -v '^ok ' "$summary"
tar -C "$out" --exclude=accept.tgz -czf "$out/accept.tgz" . # one file to carry away
((failed == 0))
