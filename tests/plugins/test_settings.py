# SPDX-License-Identifier: Apache-2.0
"""The plug-ins' entry points and environment variables."""

from __future__ import annotations

import importlib
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from weft.errors import InvalidArgument
from weft.plugins.settings import Settings


def test_entry_points_name_register() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for engine, group in (("sglang", "sglang.srt.plugins"), ("vllm", "vllm.general_plugins")):
        point = EntryPoint("weft", project["entry-points"][group]["weft"], group)
        assert point.load() is importlib.import_module(f"weft.plugins.{engine}").register


def test_settings() -> None:
    values = {
        **{"DECODE": "auto", "OVERLAP": " none ", "COMBINE_DTYPE": "fp8"},
        **{"PREFILL_TOKENS": "2048", "TIMEOUT": "12.5", "ALLREDUCE": "1"},
    }
    for engine, variable, form, plain in (
        ("SGLANG", "WEFT_SGLANG_FORM", "dispatcher", Settings()),
        ("VLLM", "WEFT_VLLM", "exchange", Settings(form="")),
    ):
        assert (plain.decode, plain.combine_dtype) == ("low_latency", None)
        assert Settings.read(engine, {"HOME": "/"}) == plain
        inputs = {f"WEFT_{engine}_{name}": value for name, value in values.items()}
        want = Settings(form, "auto", "none", "fp8", 2048, 12.5, allreduce=True)
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
