# SPDX-License-Identifier: Apache-2.0
"""Campaigns are spared while what they read stays the same, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recorded import REASON, Sources

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "weft/__init__.py": "from weft.all import everything",
    "weft/all.py": "everything = 1",
    "weft/gemm/__init__.py": "from weft.gemm.plan import Plan\nfrom weft.gemm.call import call",
    "weft/gemm/plan.py": 'SOURCE = "#include <weft/gemm/tile.cuh>"\nclass Plan: ...',
    "weft/gemm/call.py": "def call(): ...",
    "weft/gemm/late.py": "later = 1",
    "weft/ways.py": "def source(few): return f\"<weft/ways/{'few' if few else 'many'}.cuh>\"",
    "weft/gemm/tile.cuh": "#include <weft/device/copy.cuh>\n#include <cstring>",
    "weft/device/copy.cuh": "// ends here",
    "weft/ways/few.cuh": "",
    "weft/ways/many.cuh": "",
    "models/a.pml": "active proctype a() {}",
    "models/b.pml": "active proctype b() {}",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "leads_to"),
    [
        ("import json", ()),
        ("import weft", ("weft/__init__.py", "weft/all.py")),
        ("from weft.all import everything", ("weft/all.py",)),
        # A package is what it takes of it, and a re-export is where it comes from.
        (
            "from weft.gemm import Plan",
            ("weft/gemm/plan.py", "weft/device/copy.cuh", "weft/gemm/tile.cuh"),
        ),
        ("from weft.gemm import call", ("weft/gemm/call.py",)),
        ("from weft.gemm import late", ("weft/gemm/late.py",)),
        ('import importlib\nimportlib.import_module("weft.gemm.late")', ("weft/gemm/late.py",)),
        # What is filled in later may be any file.
        ("import weft.ways", ("weft/ways.py", "weft/ways/few.cuh", "weft/ways/many.cuh")),
        ("def inside():\n    from weft.all import everything", ("weft/all.py",)),
    ],
)
def test_what_a_file_leads_to(tree: Path, text: str, leads_to: tuple[str, ...]) -> None:
    (tree / "test_it.py").write_text(text)
    found = {str(path.relative_to(tree)) for path in Sources(tree).reached(("test_it.py",))}
    assert found == {"test_it.py", *leads_to}


def test_a_pattern_that_names_nothing_is_an_error(tree: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"reads\('models/c\*.pml'\): there is no such file"
    ):
        Sources(tree).reached(("models/c*.pml",))


def test_every_file_reached_decides_the_digest_and_no_other(tree: Path) -> None:
    (tree / "test_it.py").write_text("from weft.gemm import Plan")

    def digest(tool: str = "spin 6") -> str:
        return Sources(tree).digest(("test_it.py", "models/a.pml"), (tool,))

    before, reached = digest(), Sources(tree).reached(("test_it.py", "models/a.pml"))
    assert digest() == before
    assert digest("spin 7") != before
    for path in (tree / name for name in FILES):
        text = path.read_text()
        path.write_text(f"{text}\n")
        assert (digest() != before) == (path in reached), path
        path.write_text(text)


CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.recorded import Recorder

def pytest_addoption(parser):
    parser.addoption("--record", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "reads: x")
    here = Path(__file__).parent
    file = here / "recorded.json"
    config.pluginmanager.register(Recorder(here, file, record=config.getoption("--record")))
"""
TESTS = """
from pathlib import Path
import pytest
from tests.recorded import reads

HERE = Path(__file__).parent

@reads("a.txt")
def test_a():
    assert (HERE / "a.txt").read_text() == "right"

@pytest.mark.parametrize("name", [pytest.param(n, marks=reads(f"{n}.txt")) for n in "ab"])
def test_each(name):
    assert (HERE / f"{name}.txt").read_text() == "right"

def test_always():
    pass
"""


@pytest.fixture
def campaign(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    for name in "ab":
        pytester.path.joinpath(f"{name}.txt").write_text("right")
    return pytester


def outcomes(campaign: pytest.Pytester, *options: str) -> tuple[dict[str, int], str]:
    done = campaign.runpytest_inprocess("-p", "no:cacheprovider", "-rs", *options)
    return done.parseoutcomes(), done.stdout.str()


def test_what_passed_is_spared_until_its_files_change(campaign: pytest.Pytester) -> None:
    record = campaign.path.joinpath("recorded.json")
    assert outcomes(campaign, "--record")[0]["passed"] == 4
    names = {"test_it.py::test_a", "test_it.py::test_each[a]", "test_it.py::test_each[b]"}
    assert set(json.loads(record.read_text())) == names
    found, text = outcomes(campaign)
    assert (found["passed"], found["skipped"]) == (1, 3)
    assert REASON in text
    assert "not on record" not in text

    campaign.path.joinpath("a.txt").write_text("wrong")  # what reads b is still spared
    found, text = outcomes(campaign)
    assert (found["failed"], found["passed"], found["skipped"]) == (2, 1, 1)
    assert "2 tests ran that are not on record" in text
    assert set(json.loads(record.read_text())) == names  # only --record writes

    campaign.makepyfile(test_it=f"{TESTS}\n# The own module is among what a test reads.")
    found, _ = outcomes(campaign)
    assert (found["failed"], found["passed"]) == (2, 2)


def test_a_part_leaves_the_record_of_the_rest_and_the_whole_forgets_what_is_gone(
    campaign: pytest.Pytester,
) -> None:
    outcomes(campaign, "--record")
    record = campaign.path.joinpath("recorded.json")
    before = json.loads(record.read_text())
    record.write_text(json.dumps({**before, "test_it.py::test_gone": "0"}))
    outcomes(campaign, "--record", "-k", "test_a")
    assert json.loads(record.read_text()) == {**before, "test_it.py::test_gone": "0"}
    outcomes(campaign, "--record")
    assert json.loads(record.read_text()) == before
