# SPDX-License-Identifier: Apache-2.0
"""The plug-ins' entry points and environment variables."""

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
    assert (plain.decode, plain.combine_dtype) == ("low_latency", None)
    assert Settings.read(engine, {"HOME": "/"}) == plain
    values = {
        **{"DECODE": "auto", "OVERLAP": " none ", "COMBINE_DTYPE": "fp8"},
        **{"PREFILL_TOKENS": "2048", "TIMEOUT": "12.5", "ALLREDUCE": "1"},
    }
    want = Settings(form, "auto", "none", "fp8", 2048, 12.5, allreduce=True)
    inputs = {f"WEFT_{engine}_{name}": value for name, value in values.items()}
    assert Settings.read(engine, inputs | {variable: form}) == want


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SGLANG_DECODE", "fast", "is 'fast'; choose one of 'low_latency', 'throughput', 'auto'"),
        ("VLLM_OVERLAP", "all", "is 'all'; choose one of 'auto', 'none'"),
        ("SGLANG_COMBINE_DTYPE", "fp16", "is 'fp16'; choose one of '', 'fp8'"),
        ("VLLM_PREFILL_TOKENS", "many", "is 'many'; it must be a number"),
        ("SGLANG_PREFILL_TOKENS", "0", "is 0; it must be an integer in 1.."),
        ("VLLM_PREFILL_TOKENS", "1.5", "is 1.5; it must be an integer"),
        ("SGLANG_ALLREDUCE", "yes", "is 'yes'; choose one of '0', '1'"),
        ("VLLM_TIMEOUT", "-1", "is -1; it must be a number of seconds above 0"),
        ("SGLANG_TIMEOUT", "nan", "is nan; it must be a number of seconds"),
        ("VLLM", "1", "is '1'; choose one of '', 'block', 'exc"),
    ],
)
def test_invalid_settings_are_refused(name: str, value: str, text: str) -> None:
    engine = name.partition("_")[0]
    with pytest.raises(InvalidArgument, match=f"WEFT_{name} {text}"):
        Settings.read(engine, {f"WEFT_{name}": value})
