# SPDX-License-Identifier: Apache-2.0
"""The version of a figure's code: its commit, and the digest of the kernels' headers."""

from __future__ import annotations

import subprocess

import weft
from weft.bench import machine
from weft.bench.machine import describe_code, describe_machine, format_machine
from weft.jit.source import header_digest


def test_the_commit_is_of_the_checkout_that_holds_the_package(tmp_path, monkeypatch):
    monkeypatch.delenv("WEFT_COMMIT", raising=False)
    monkeypatch.setattr(machine, "INCLUDE_ROOT", tmp_path)

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "file").write_text("one")
    for command in (("init", "-q"), ("add", "file"), ("commit", "-q", "-m", "Begin")):
        git(*command)
    commit = git("rev-parse", "HEAD")
    (tmp_path / "beside").write_text("untracked files change no code")
    expected = {"version": weft.__version__, "commit": commit, "headers": header_digest()}
    assert describe_code() == expected
    (tmp_path / "file").write_text("two")
    assert describe_code()["commit"] == f"{commit}-dirty"
    inside = tmp_path / "lib" / "site-packages"  # of another project's checkout
    inside.mkdir(parents=True)
    monkeypatch.setattr(machine, "INCLUDE_ROOT", inside)
    assert describe_code()["commit"] is None
    monkeypatch.setenv("PATH", "")  # without git
    assert describe_code()["commit"] is None
    monkeypatch.setenv("WEFT_COMMIT", "c0ffee-dirty")
    assert describe_code()["commit"] == "c0ffee-dirty"


def test_captions_name_the_code():
    result = describe_machine([])
    assert result["weft"] == describe_code()
    result["weft"] = {"version": "1.0", "commit": "0123456789abcdef-dirty", "headers": "ab" * 32}
    assert "weft 1.0 0123456789ab-dirty, 20" in format_machine(result)
    result["weft"]["commit"] = None
    assert "weft 1.0, 20" in format_machine(result)
    del result["weft"]
    assert "weft" not in format_machine(result), "records of before"
