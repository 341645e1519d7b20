"""The script that times deep_ep's normal mode runs on CPU ranks, and checks what it times."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/compat/normal_mode.py"
CALLS = [
    *("layout", "dispatch, with a handle", "dispatch, with a bound of rows"),
    *("dispatch, with new counts", "combine"),
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module that ranks can import."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.delitem(sys.modules, SCRIPT.stem, raising=False)
    return importlib.import_module(SCRIPT.stem)


def test_it_times_every_call(script, tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    sizes = ["--tokens", "6", "--hidden", "128", "--top-k", "2", "--experts", "4", "--samples", "1"]
    ranks = ["--ranks", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(out), *ranks, *sizes])
    script.main()
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert (found["ranks"], found["tokens"], found["hidden"]) == (2, 6, 128)
    for routing in ("perfect", "uniform"):
        rows = [row for row in found["rows"] if row["routing"] == routing]
        assert {row["call"] for row in rows} == set(CALLS)
        assert {row["dtype"] for row in rows} == {"bf16", "fp8"}
        for row in rows:
            assert row["us"] == max(row["us_of_rank"]) > 0
            assert row["deep_ep_us"] is None  # measured at other sizes, on GPUs
            assert f"{routing:8} {row['dtype']:5} {row['call']}" in printed


def test_other_rows_than_were_sent_are_noticed(script, ranks):
    with pytest.raises(Exception, match="received other rows than rank 0 sent"):
        ranks(1, "threads")(misled)


def misled(group) -> None:

    script = importlib.import_module(SCRIPT.stem)
    case = script.Case(1, 6, 128, 2, 4, "perfect")
    rows = case.rows(0, group.device)
    script.check_rows(group, case, rows, lambda rows: rows)
    script.check_rows(group, case, -rows, lambda rows: rows)
