# SPDX-License-Identifier: Apache-2.0
"""Of what code a figure is: the commit, wherever the package lies, and the kernels' headers."""

from __future__ import annotations

import subprocess

import pytest

import weft
from weft.bench import machine
from weft.bench.machine import describe_code, describe_machine, machine_line
from weft.jit.source import header_digest


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one file, as if the package lay in it; `git(*arguments)` works there."""
    monkeypatch.delenv("WEFT_COMMIT", raising=False)
    monkeypatch.setattr(machine, "INCLUDE_ROOT", tmp_path)

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "Begin")
    return git


def test_a_checkout_says_its_commit(checkout, tmp_path):
    commit = checkout("rev-parse", "HEAD")
    assert describe_code() == {
        "version": weft.__version__,
        "commit": commit,
        "headers": header_digest(),
    }
    (tmp_path / "beside").write_text("untracked files change no code")
    assert describe_code()["commit"] == commit
    (tmp_path / "file").write_text("two")
    assert describe_code()["commit"] == f"{commit}-dirty"


def test_a_package_in_somebodys_checkout_is_not_of_their_commit(checkout, tmp_path, monkeypatch):
    inside = tmp_path / "lib" / "site-packages"
    inside.mkdir(parents=True)
    monkeypatch.setattr(machine, "INCLUDE_ROOT", inside)
    assert describe_code()["commit"] is None
    monkeypatch.setenv("WEFT_COMMIT", "c0ffee")
    assert describe_code()["commit"] == "c0ffee"


def test_nothing_fails_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("WEFT_COMMIT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_code()["commit"] is None
    monkeypatch.setenv("WEFT_COMMIT", "c0ffee-dirty")
    assert describe_code()["commit"] == "c0ffee-dirty"


def test_captions_say_it(monkeypatch):
    found = describe_machine([])
    assert found["weft"] == describe_code()
    found["weft"] = {"version": "1.0", "commit": "0123456789abcdef-dirty", "headers": "ab" * 32}
    assert "weft 1.0 0123456789ab-dirty, 20" in machine_line(found)
    found["weft"]["commit"] = None
    assert "weft 1.0, 20" in machine_line(found)
    del found["weft"]
    assert "weft" not in machine_line(found), "records of before"
