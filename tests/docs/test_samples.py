# SPDX-License-Identifier: Apache-2.0
"""README's sample and the examples run, samples import existing names, and commands parse."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from weft.cli.commands import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXCERPT = re.compile(r'--8<-- "([^":]+)(?::(\w+))?"')
COMMAND = re.compile(r"^    ((?:weft|make|python|benchmarks/\S+) [^#\n]*|weft\b[^#\n]*)", re.M)
COMMANDS = sorted({m[1].strip() for text in TEXTS.values() for m in COMMAND.finditer(text)})


EXAMPLES: dict[str, list[str]] = {
    **{"operators.py": [], "torchrun_layer.py": [], "checkpoint_layer.py": [], "recovery.py": []},
    **{"replacement.py": [], "sleep.py": [], "eplb.py": []},
    **{"decode_loop.py": ["--steps", "8"], "two_hosts.py": ["--pretend"]},
    **{"batch_invariance.py": []},
}


def run(*command: str) -> str:
    """Return the output of a program in its own process."""
    # On CPU ranks, however many GPUs there are.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, *command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_sample_runs(tmp_path):
    (sample,) = BLOCK.findall(TEXTS["README.md"])
    program = tmp_path / "program.py"
    program.write_text(sample)
    (printed,) = re.findall(r"print\(weft\.launch.*\)  # (.*)$", sample, re.M)
    assert run(str(program)).splitlines()[-1] == printed


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    """Each example checks its own result."""
    if name == "checkpoint_layer.py":
        pytest.importorskip("safetensors")
    several = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    launcher = several if name in ("torchrun_layer.py", "two_hosts.py") else []
    assert run(*launcher, f"examples/{name}", *EXAMPLES[name]).strip()


def test_samples_import_existing_names():
    blocks = [(name, text) for name in TEXTS for text in BLOCK.findall(TEXTS[name])]
    for name, text in blocks:
        excerpts = EXCERPT.findall(text)
        for path, section in excerpts:
            assert f"[start:{section}]" in (ROOT / path).read_text(), f"{name}: {path}:{section}"
        for node in ast.walk(ast.parse("" if excerpts else text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                for imported in node.names:
                    assert hasattr(module, imported.name), f"{node.module} has no {imported.name}"


def _parse(command: Any, words: list[str], parent: Any = None) -> None:
    """Parse the options of a command and its subcommands without running any."""
    context = command.make_context(command.name or "weft", list(words), parent=parent)
    if hasattr(command, "resolve_command") and (rest := [*context._protected_args, *context.args]):
        _, below, left = command.resolve_command(context, rest)
        _parse(below, left, context)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    first, *words = shlex.split(command)
    if first == "weft":
        _parse(typer.main.get_command(app), words)
    elif first == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        targets += re.findall(r"^\.PHONY:(.*)", (ROOT / "Makefile").read_text(), re.M)[0].split()
        assert words[0] in targets
    elif words[:1] != ["-m"]:
        script, *args = words if first == "python" else [first, *words]
        text = (ROOT / script).read_text()
        for option in (word for word in args if word.startswith("--")):
            assert f'"{option}"' in text, f"{script} has no {option}"
