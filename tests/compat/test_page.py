# SPDX-License-Identifier: Apache-2.0
"""docs/user/compat.md: every name in its tables exists, and its samples call existing functions."""

from __future__ import annotations

import inspect
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from weft.compat import deep_ep, flashinfer, triton_dist

PAGE = (Path(__file__).parents[2] / "docs/user/compat.md").read_text()
# Each section: its module, and the classes whose methods the tables list.
SECTIONS: dict[str, tuple[Any, tuple[type, ...]]] = {
    "flashinfer.comm": (flashinfer, (flashinfer.MoeAlltoAll,)),
    "deep_ep.Buffer": (deep_ep, (deep_ep.Buffer,)),
    "triton_dist": (triton_dist, (triton_dist.EPLowLatencyAllToAllLayer,)),
}


def section(title: str) -> str:
    result: str = PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]
    assert result, title
    return result


@pytest.mark.parametrize("title", SECTIONS)
def test_the_tables_list_exactly_the_existing_names(title):
    module, kinds = SECTIONS[title]
    rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w*]+)`", row)}
    exist = {name for each in (module, *kinds) for name in dir(each)}
    assert {name for name in named if not any(fnmatch(each, name) for each in exist)} == set()
    if module is flashinfer:
        exported = set(flashinfer.__all__)
        assert {
            name for name in exported if not any(fnmatch(name, each) for each in named)
        } == set()


@pytest.mark.parametrize("title", SECTIONS)
def test_the_samples_use_existing_calls_and_arguments(title):
    code = "\n".join(re.findall(r"```python\n(.*?)```", section(title), flags=re.DOTALL))
    imported = re.search(r"from (weft\.compat\.\w+) import (\w+)", code)
    assert imported
    module = SECTIONS[title][0]
    assert module.__name__ == imported[1]
    kind = getattr(module, imported[2])
    result = re.findall(r"\b(?:a2a|buffer|layer|Buffer)\.(\w+)\((.*?)\)\n", code, re.DOTALL)
    assert result
    for name, inputs in result:
        expected = set(re.findall(r"\b(\w+)=", inputs))
        assert expected <= set(inspect.signature(getattr(kind, name)).parameters), (name, expected)
