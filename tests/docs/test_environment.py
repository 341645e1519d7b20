"""docs/environment.md names every variable that weft reads, and quotes errors that weft has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from weft.cli.doctor_report import VARIABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environment.md").read_text()
TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "weft").rglob("*.py"))}
# Read by Python, CUDA and the loader, not by weft: they matter all the same.
BENEATH = {"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TMPDIR"}
REPORT = ROOT / "weft/cli/doctor_report.py"  # it shows those of a list


def _sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", PAGE, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _first_cells(section: str) -> list[str]:
    rows = [line for line in _sections()[section].splitlines() if line.startswith("|")]
    return [row.split("|")[1] for row in rows[2:]]


def _constants(tree: ast.AST) -> dict[str, str]:
    """Names of a module that stand for a text."""
    return {
        target.id: node.value.value
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def _reads(tree: ast.AST) -> set[str]:
    """Variables whose values are read from os.environ: by index, `get`, `setdefault` or `in`.

    Where a key is no constant of the module, as in `os.environ[name]`, every text in capitals
    counts that the module holds.
    """
    constants, found, open_ended = _constants(tree), set(), False
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=place, slice=key, ctx=ast.Load()):
                keys = [key]
            case ast.Call(func=ast.Attribute(value=place, attr="get" | "setdefault"), args=keys):
                keys = keys[:1]
            case ast.Call(func=ast.Attribute(attr="getenv") as place, args=[key, *_]):
                found |= _text(key, constants)
                continue
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[place]):
                keys = [key]
            case _:
                continue
        if ast.unparse(place) not in ("os.environ", "environ"):
            continue
        for key in keys:
            texts = _text(key, constants)
            found |= texts
            open_ended |= not texts
    if open_ended:
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", node.value)
        }
    return found


def _text(key: ast.expr, constants: dict[str, str]) -> set[str]:
    match key:
        case ast.Constant(value=str(name)):
            return {name}
        case ast.Name(id=name) if name in constants:
            return {constants[name]}
    return set()


def test_the_page_has_every_variable():
    named = {name for cell in _first_cells("Environment variables") for name in _named(cell)}
    read = {name for path, tree in TREES.items() if path != REPORT for name in _reads(tree)}
    assert {"WEFT_CACHE", "WEFT_SECRET", "WEFT_LOG", "WEFT_COMMIT", "RANK", "CXX"} <= read
    assert named == read | BENEATH


def test_the_report_has_them_too():
    named = {name for cell in _first_cells("Environment variables") for name in _named(cell)}
    assert set(VARIABLES) == named
    assert len(VARIABLES) == len(named)


@pytest.mark.parametrize(
    "text", ["os.environ['WEFT_X']", "os.environ.get(X)", "os.getenv('WEFT_X')"]
)
def test_a_variable_that_is_not_on_the_page_is_found(text):
    assert _reads(ast.parse(f"X = 'WEFT_X'\nprint({text})")) == {"WEFT_X"}


def test_errors_are_quoted_as_they_are():
    texts = [
        node.value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    system = {"Operation not permitted"}  # the kernel's words
    quoted = {words for cell in _first_cells("What errors look like") for words in _named(cell)}
    assert len(quoted) > 10
    missing = {words for words in quoted if not any(words in text for text in texts)}
    assert missing == system


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
