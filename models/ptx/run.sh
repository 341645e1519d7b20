#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks every litmus test with Dartagnan: PASS = the bad outcome is unreachable, FAIL = it is reachable.
# Usage: DAT3M_HOME=<a built Dat3M tree> models/ptx/run.sh [test ...] > models/ptx/result.txt
set -euo pipefail
: "${DAT3M_HOME:?set DAT3M_HOME to a built Dat3M tree}"
cd "$(dirname "$0")"
DAT3M_OUTPUT=$(mktemp -d)
export DAT3M_HOME DAT3M_OUTPUT LD_LIBRARY_PATH="$DAT3M_HOME/dartagnan/target/libs:${LD_LIBRARY_PATH:-}"
trap 'rm -rf "$DAT3M_OUTPUT"' EXIT

unexpected=0
while IFS=$'\t' read -r name expect; do
    if (($#)) && [[ " $* " != *" $name "* ]]; then continue; fi
    start=$(date +%s%N)
    said=$(timeout 120 java -jar "$DAT3M_HOME/dartagnan/target/dartagnan.jar" \
        "$DAT3M_HOME/cat/ptx-v7.5.cat" --target=ptx --property=program_spec --method=eager \
        "$name.litmus" 2>&1) || true # the verdict is read from the text; without one the row is UNEXPECTED
    verdict=$(sed -n 's/^Result: *//p' <<<"$said" | head -n 1)
    case "$verdict:$expect" in
        PASS:forbidden | FAIL:allowed) judged=ok ;;
        *) judged=UNEXPECTED unexpected=1 ;;
    esac
    ms=$((($(date +%s%N) - start) / 1000000))
    printf '%-56s bad outcome %-10s dartagnan %-8s %d.%02ds %s\n' \
        "$name" "$expect" "${verdict:-none}" $((ms / 1000)) $((ms % 1000 / 10)) "$judged"
done <expect.tsv
exit $unexpected
