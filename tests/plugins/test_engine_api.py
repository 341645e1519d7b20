# SPDX-License-Identifier: Apache-2.0
"""Names, signatures and settings of the plug-ins, compared with what is installed or on record.

WEFT_SGLANG_SITE and WEFT_VLLM_SITE are folders with a wheel's package and metadata.
"""

import importlib
import os
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.plugins.tables import entries_of, known, read, row, version_of
from weft.errors import InvalidArgument, SetupError
from weft.plugins.engine_api import Engine, ExpectedAPI, select_signatures
from weft.plugins.settings import Settings
from weft.plugins.sglang.hooks import SGLANG
from weft.plugins.vllm.engine import VLLM

ENGINE = Engine("Toy", ("no-such-package", "pytest"), ("1.0", "2.0"))
THIS = __name__ + "."


class Toy:
    field: int

    def __init__(self, x: int, y: int = 1, *, z: int = 2) -> None:
        self.x = x

    @classmethod
    def make(cls, a: int, *rest: int, b: int, **more: int) -> None: ...


API = (
    ExpectedAPI(THIS + "Toy", attributes="field make"),
    ExpectedAPI(THIS + "Toy.__init__", {"1.0": "self, x, y=, *, z=", "2.0": "self, x"}, "x"),
    ExpectedAPI(THIS + "Toy.make", "cls, a, *rest, b, **more"),
    ExpectedAPI(THIS + "Toy.remake", {"2.0": "self"}),
)


def test_differences_are_listed_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENGINE.get_version() == pytest.__version__
    assert Engine("Toy", ("no-such-package",), ()).get_version() == "(unknown version)"
    monkeypatch.setattr(Engine, "get_version", lambda self: "1.0.post1")
    ENGINE.check(API)
    assert [entry.target for entry in ENGINE.select_entries(API)] == [e.target for e in API[:3]]
    wrong = ExpectedAPI(THIS + "Toy.__init__", attributes="x w"), ExpectedAPI(THIS + "API", "self")
    monkeypatch.setattr(Engine, "get_version", lambda self: "2.0+cu130")
    with pytest.raises(SetupError) as raised:
        ENGINE.check((*API, *wrong))
    for part in (
        "Toy 2.0+cu130 does not match weft's plug-in, so nothing was patched: ",
        "Toy.__init__ has parameters (self, x, y=, *, z=), not (self, x); ",
        "Toy.remake does not exist",
        "Toy.__init__ has no w; ",
        "API is not a function",
        "Supported: 1.0, 2.0. Install one of them",
    ):
        assert part in str(raised.value)
    assert "version is" not in str(raised.value)


def test_an_unsupported_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its names are equal; they are compared with the closest version."""
    for installed in ("1.00", "1", "11.0", "(unknown version)"):
        monkeypatch.setattr(Engine, "get_version", lambda self, installed=installed: installed)
        assert ENGINE.select_entries(API) == []
        with pytest.raises(SetupError, match="its version is not supported. Supported: 1.0, 2.0"):
            ENGINE.check(API)


ENGINES = pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)


@ENGINES
def test_every_name_is_on_record(engine: Engine) -> None:
    for version in engine.supported:
        for entry, expected in select_signatures(entries_of(engine), version):
            wanted = row(expected, entry.attributes.split())
            assert known()[version][entry.target] == wanted, entry.target


@ENGINES
def test_the_record_is_of_the_wheel(engine: Engine) -> None:
    folder = os.environ.get(f"WEFT_{engine.name.upper()}_SITE")
    if folder is None:
        pytest.skip("needs the engine's sources")
    release = engine.match_release(version_of(Path(folder), engine.packages[0]))
    assert release is not None
    assert known()[release] == read(Path(folder), engine)


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
    variables = {"VLLM_BATCH_INVARIANT": "1"}  # vLLM's own; SGLang has a flag
    assert Settings.read("VLLM", variables) == Settings(form="", batch_invariant=True)
    assert Settings.read("SGLANG", variables) == Settings()


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
