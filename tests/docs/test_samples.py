"""The samples of the README and the docs: Python is run, commands are understood."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
import typer

import weft
from weft.cli.commands import app
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(^A fragment, not run: ([^\n]+)\n\n)?^```python\n(.*?)^```", re.M | re.S)
_COMMAND = re.compile(r"^    ((?:weft|python|make|benchmarks/\S+) [^#\n]*|weft\b[^#\n]*)", re.M)


@dataclass(frozen=True, slots=True)
class Sample:
    """A block of Python: where it stands, its text, and why it is not run, if it is not."""

    place: str
    text: str
    why_not: str | None

    @property
    def whole(self) -> bool:
        """Whether it is a program, and no part of one."""
        return "__main__" in self.text


def _samples() -> list[Sample]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for block in _BLOCK.finditer(text):
            line = text[: block.start(3)].count("\n")
            found.append(Sample(f"{path.name}:{line}", block[3], block[2]))
    return found


SAMPLES = _samples()
WHOLE = [sample for sample in SAMPLES if sample.whole and not sample.why_not]
PARTS: dict[str, list[str]] = {}  # by document; those of one document are one program, in order
for _sample in SAMPLES:
    if not _sample.whole and not _sample.why_not:
        PARTS.setdefault(_sample.place.partition(":")[0], []).append(_sample.text)
COMMANDS = sorted(
    {match[1].strip() for path in DOCUMENTS for match in _COMMAND.finditer(path.read_text())}
)


def test_every_sample_is_run_or_says_why_not():
    whole = {sample.place.partition(":")[0] for sample in WHOLE}
    assert whole == {"README.md", "allreduce.md", "moe.md"}
    parts = {"engine.md", "gemm.md", "which-class.md"}
    assert set(PARTS) == parts, "each has a test below"


@pytest.mark.parametrize("sample", WHOLE, ids=lambda sample: sample.place)
def test_programs_run(tmp_path, sample):
    program = tmp_path / "program.py"
    program.write_text(sample.text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr
    if told := re.search(r"print\(weft\.launch.*\)  # (\[.*\])$", sample.text, re.M):
        assert result.stdout.splitlines()[-1] == told[1]


def _written(folder: Path, document: str) -> Path:
    """The parts of a document as a file; run_path runs it among given names."""
    path = folder / "part.py"
    path.write_text("\n".join(PARTS[document]))
    return path


def _chosen(group: weft.Group, part: str) -> None:
    """A sample of each class, one after the other."""
    tokens = 3 + group.rank
    x = torch.arange(tokens * 512).view(tokens, 512).remainder(7).bfloat16()
    ids = torch.tensor([[(t + 5 * k) % 16 for k in range(4)] for t in range(tokens)])
    names: dict[str, Any] = {"group": group, "x": x, "topk_ids": ids.int()}
    names["topk_weights"] = torch.full((tokens, 4), 0.5)
    names = run_path(part, init_globals=names)
    assert torch.equal(names["out"], 2 * x), "four experts that copy, of weight 0.5"
    assert bool(names["mixed"].isfinite().all())
    assert torch.allclose(names["decoded"].float(), 2 * x.float(), rtol=1 / 16)
    assert torch.equal(names["residual"], torch.full((4, 512), float(group.size)).bfloat16())
    assert torch.equal(names["normed"], torch.ones(4, 512).bfloat16())
    group.barrier()


def test_a_sample_of_each_class(ranks, tmp_path):
    ranks(2, "cpu")(_chosen, str(_written(tmp_path, "which-class.md")))


def _engine(group: weft.Group, part: str, store: str) -> None:
    """Calls with a routing of the caller's, in rounds, by hand, and after experts have moved."""
    config = MoEConfig(hidden=512, intermediate=256, routing=Routing(16, 4))

    def load_experts(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(config, [Expert.seeded(config, e) for e in local], group.device)

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=group.rank, world_size=group.size
    )
    names: dict[str, Any] = {"group": group, "config": config}
    names = run_path(part, init_globals=names | {"load_experts": load_experts})
    layer, forward = names["layer"], names["forward"]
    with layer:
        tokens = 11 + group.rank
        x = torch.randn(tokens, 512).bfloat16()
        logits = torch.randn(tokens, 16) + torch.arange(16)  # the last experts have most to do
        weights, ids = logits.softmax(dim=1).topk(4)
        assert names["replicas"].num_experts == 16
        before = forward(x, ids, weights, 12)
        every = load_experts(tuple(range(16)))
        wanted = weft.reference.moe_layer(x, ids, weights, every.gate_up, every.down)
        limit = 7 / 512 * float(wanted.float().abs().max())  # of bfloat16: seven half units
        names["rebalance"]()
        assert layer.replicas != names["replicas"]
        for out in (before, forward(x, ids, weights, 12)):
            assert float((out.float() - wanted.float()).abs().max()) <= limit
        routed = layer.route(logits[:5])
        received = layer.exchange.dispatch(x[:5], *routed, rows=6)
        assert received.x.shape == (group.size, 6, 512)
        assert received.x.is_contiguous()
        layer.experts(received)
        by_hand = layer.exchange.combine().clone()
        assert torch.equal(by_hand, layer(x[:5], logits[:5]))
        layer.check()
    torch.distributed.destroy_process_group()


def test_the_part_of_an_engine(ranks, tmp_path):
    store = str(tmp_path / "store")
    ranks(2, "cpu")(_engine, str(_written(tmp_path, "engine.md")), store)


def test_the_part_that_multiplies(tmp_path):
    names = run_path(str(_written(tmp_path, "gemm.md")))
    config = MoEConfig(hidden=256, intermediate=128, routing=Routing(2, 1))
    rows, groups = 32, torch.tensor([16, 16], dtype=torch.int32)
    offsets = torch.tensor([0, 16, 32], dtype=torch.int32)
    fp8 = torch.float8_e4m3fn
    grouped = type("Grouped", (), {"counts": groups, "offsets": offsets})()
    out = names["experts"](
        torch.ones(rows, config.hidden).to(fp8),
        torch.ones(rows, config.hidden // 128),
        grouped,
        torch.ones(2, 2 * config.intermediate, config.hidden).to(fp8),
        torch.ones(2, 2 * config.intermediate // 128, config.hidden // 128),
        torch.ones(2, config.hidden, config.intermediate).to(fp8),
        torch.ones(2, config.hidden // 128, config.intermediate // 128),
    )
    assert (tuple(out.shape), out.dtype) == ((rows, config.hidden), torch.bfloat16)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(
    "sample", [each for each in SAMPLES if each.why_not], ids=lambda s: s.place
)
def test_what_is_not_run_imports_what_is_there(sample):
    for node in ast.walk(ast.parse(sample.text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"
    named = re.search(r"tests/\S+\.py", sample.why_not)
    assert named is None or (ROOT / named[0]).is_file()


def _parse(command: Any, words: list[str], parent: Any = None) -> None:
    """Let the command line read the options of a command and of those below it, and run none."""
    context = command.make_context(command.name or "weft", list(words), parent=parent)
    if hasattr(command, "resolve_command") and (rest := [*context._protected_args, *context.args]):
        _, below, left = command.resolve_command(context, rest)
        _parse(below, left, context)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command):
    first, *words = shlex.split(command)
    if first == "weft":
        _parse(typer.main.get_command(app), words)
    elif first == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[0] in targets
    else:
        script, *given = words if first == "python" else [first, *words]
        text = (ROOT / script).read_text()
        for option in (word for word in given if word.startswith("--")):
            assert f'"{option}"' in text, f"{script} has no {option}"


def test_a_wrong_command_is_not_understood():
    with pytest.raises(Exception, match="No such option: --no-such-option"):
        _parse(typer.main.get_command(app), ["bench", "moe", "--no-such-option"])
