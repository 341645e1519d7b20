#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes sure that the SPIN model checker is there. The program of that name on PyPI is another one, so it comes from
# the system's packages: installed when we are root on Debian, asked for otherwise.
set -euo pipefail

is_there() { command -v spin >/dev/null && spin -V 2>/dev/null | grep -q 'Spin Version'; }

if [[ "${WEFT_SKIP_SPIN:-0}" == 1 ]]; then
    echo "WEFT_SKIP_SPIN=1: the protocol models are not checked"
elif ! is_there; then
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
        echo "installing the Debian package spin"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends spin >/dev/null
    fi
    if ! is_there; then
        cat >&2 <<'TEXT'
The SPIN model checker is not on PATH, and `make test` checks the protocol models with it. Either
  - install it:   sudo apt-get install spin     (Debian, Ubuntu)
                  or from https://spinroot.com
  - or leave the models out:   make test WEFT_SKIP_SPIN=1
TEXT
        exit 1
    fi
fi
