# SPDX-License-Identifier: Apache-2.0
"""Ranks' waits in the directory from which an engine's server takes metrics."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, time
import torch, weft
from weft.plugins.blocks import Blocks, Limits
from weft.plugins.settings import Settings

def serve(group):
    blocks = Blocks(group, Limits(8, 8), Settings("block"))
    with weft.AllReduce(group, max_tokens=8, hidden=128) as reduce:
        for _ in range(10):
            group.barrier()
            if group.rank == 1:
                time.sleep(0.02)
            reduce.fused(torch.ones(4, 128, dtype=torch.bfloat16), out=True)
        blocks._exporter.update()
    blocks.close()

if __name__ == "__main__":
    weft.launch(serve, ranks=2, device="cpu")
"""


def test_a_server_sees_the_waits_of_its_ranks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    program = tmp_path / "serve.py"
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, str(program)], check=True, timeout=600)
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    samples: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for metric in registry.collect():
        for sample in metric.samples:
            key = tuple(sample.labels.get(name, "") for name in ("rank", "phase", "cause", "le"))
            samples[sample.name][key] = sample.value
    assert samples["weft_wait_seconds_total"]["0", "all-reduce", "skew", ""] > 0.1
    waits = samples["weft_waits_total"]["0", "all-reduce", "skew", ""]
    assert samples["weft_rounds_total"]["0", "all-reduce", "", ""] >= waits
    durations = samples["weft_wait_durations_total"]
    assert durations["0", "all-reduce", "skew", "+Inf"] == waits > 5
    assert durations["0", "all-reduce", "skew", "0.001048576"] <= waits - 5
    assert samples["weft_waits_total"]["1", "control", "skew", ""] >= 10
    assert samples["weft_between_phases_seconds"]["1", "all-reduce", "", ""] > 0.015
    assert samples["weft_phase_seconds"]["0", "all-reduce", "", ""] > 0
    names = {
        document: set(re.findall(r"\bweft_\w+", (ROOT / document).read_text())) - {"weft_"}
        for document in ("docs/assets/grafana-weft.json", "docs/user/observability.md")
    }
    assert names["docs/user/observability.md"] == samples.keys()
    assert names["docs/assets/grafana-weft.json"] <= samples.keys()
    # An operator whose waits are all too short to be counted is offered, too.
    assert (
        "label_values(weft_rounds_total, operator)"
        in (ROOT / "docs/assets/grafana-weft.json").read_text()
    )
