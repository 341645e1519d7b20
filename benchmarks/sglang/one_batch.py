# SPDX-License-Identifier: Apache-2.0
"""Run sglang.benchmark.one_batch with plug-ins, which stock 0.5.17 does not load there.

The call below also runs in each rank, because spawned ranks import this file again. It follows
SGLang's other imports, as in its own schedulers.
"""

from sglang.benchmark.one_batch import cli_main
from sglang.srt.plugins import load_plugins

load_plugins()

if __name__ == "__main__":
    cli_main()
