"""sglang.benchmark.one_batch with plug-ins, which stock 0.5.17 loads none of there.

The call below runs in each rank, too: ranks are spawned and import this file again.
"""

from sglang.srt.plugins import load_plugins

load_plugins()

if __name__ == "__main__":
    from sglang.benchmark.one_batch import cli_main

    cli_main()
