# SPDX-License-Identifier: Apache-2.0
"""How engines find the plug-ins, and what a user may set for each through the environment."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import weft.plugins.sglang
import weft.plugins.vllm
from weft.errors import InvalidArgument
from weft.plugins.settings import Settings


@pytest.mark.parametrize(
    ("group", "register"),
    [
        ("sglang.srt.plugins", weft.plugins.sglang.register),
        ("vllm.general_plugins", weft.plugins.vllm.register),
    ],
)
def test_the_entry_point_names_register(group: str, register: object) -> None:
    """Engines find it by the package's metadata."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert EntryPoint("weft", project["entry-points"][group]["weft"], group).load() is register


@pytest.mark.parametrize(
    ("engine", "variable", "form", "plain"),
    [
        ("SGLANG", "WEFT_SGLANG_FORM", "dispatcher", Settings()),
        ("VLLM", "WEFT_VLLM", "exchange", Settings(form="")),
    ],
)
def test_settings(engine: str, variable: str, form: str, plain: Settings) -> None:
    """Defaults, and one of each."""
    assert (plain.decode, plain.combine_dtype) == ("low_latency", None)
    assert Settings.read(engine, {"HOME": "/"}) == plain
    said = {
        "DECODE": "auto",
        "OVERLAP": " none ",
        "COMBINE_DTYPE": "fp8",
        "PREFILL_TOKENS": "2048",
        "TIMEOUT": "12.5",
        "ALLREDUCE": "1",
    }
    want = Settings(form, "auto", "none", "fp8", 2048, 12.5, allreduce=True)
    given = {f"WEFT_{engine}_{name}": value for name, value in said.items()}
    assert Settings.read(engine, given | {variable: form}) == want


@pytest.mark.parametrize("engine", ["SGLANG", "VLLM"])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("DECODE", "fast", "is 'fast'; choose one of 'low_latency', 'throughput', 'auto'"),
        ("OVERLAP", "all", "is 'all'; choose one of 'auto', 'none'"),
        ("COMBINE_DTYPE", "fp16", "is 'fp16'; choose one of '', 'fp8'"),
        ("PREFILL_TOKENS", "many", "is 'many'; it must be a number"),
        ("PREFILL_TOKENS", "0", "is 0; it must be an integer in 1.."),
        ("PREFILL_TOKENS", "1.5", "is 1.5; it must be an integer"),
        ("ALLREDUCE", "yes", "is 'yes'; choose one of '0', '1'"),
        ("TIMEOUT", "-1", "is -1; it must be a number of seconds above 0"),
        ("TIMEOUT", "nan", "is nan; it must be a number of seconds"),
    ],
)
def test_settings_that_are_refused(engine: str, name: str, value: str, text: str) -> None:
    """The error names the variable and the value."""
    with pytest.raises(InvalidArgument, match=f"WEFT_{engine}_{name} {text}"):
        Settings.read(engine, {f"WEFT_{engine}_{name}": value})


def test_forms_that_are_refused() -> None:
    """vLLM's variable has no name behind the engine's."""
    with pytest.raises(InvalidArgument, match="WEFT_VLLM is '1'; choose one of '', 'block', 'exc"):
        Settings.read("VLLM", {"WEFT_VLLM": "1"})
