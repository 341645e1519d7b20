# SPDX-License-Identifier: Apache-2.0
"""sglang.benchmark.one_batch with plug-ins, which stock 0.5.17 loads none of there.

The call below runs in each rank, too: ranks are spawned and import this file again. It comes behind
SGLang's other imports, as in its own schedulers.
"""

from sglang.benchmark.one_batch import cli_main
from sglang.srt.plugins import load_plugins

load_plugins()

if __name__ == "__main__":
    cli_main()
