"""Runs whose ranks are threads: a test may spoil what they call."""

from __future__ import annotations

from typing import Any

import pytest

import weft


@pytest.fixture
def threads(monkeypatch):
    """The harness and the rivals start threads of this process."""
    launch = weft.launch

    def as_threads(*args: Any, **options: Any) -> Any:
        return launch(*args, **{**options, "device": "threads"})

    for place in ("harness", "rivals", "trace"):
        monkeypatch.setattr(f"weft.bench.{place}.launch", as_threads)
    return monkeypatch
