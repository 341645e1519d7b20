# SPDX-License-Identifier: Apache-2.0
"""The installed distribution: pip's wheel, torch's version, and foreign packages named weft."""

import email
import email.message
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from weft import distribution
from weft.cli.findings import check_basics
from weft.errors import TorchTooOld

ROOT = Path(__file__).parents[1]
FRAMEWORK = "An agent framework"


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert distribution.find_foreign_installs() == []
    return tmp_path


def install(folder: Path, name: str, version: str, summary: str = "") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
    (info / "METADATA").write_text(text)


def test_foreign_distributions_packages_modules_and_commands_are_found(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = distribution.find_foreign_installs
    install(foreign, "weft", "1.2", FRAMEWORK)
    assert found() == [f"the distribution weft 1.2 ({FRAMEWORK})"]
    (result,) = [each for each in check_basics() if each[0] == "the name weft"]
    assert (result[1], "pip uninstall weft" in result[3]) == ("warn", True)
    shutil.rmtree(foreign / "weft-1.2.dist-info")
    (foreign / "weft").mkdir()
    (foreign / "weft" / "__init__.py").touch()
    assert found() == [f"the package {foreign / 'weft'}"]
    (foreign / "weft" / "__init__.py").unlink()
    (foreign / "weft.py").touch()
    assert found() == [f"the module {foreign / 'weft.py'}"]
    (foreign / "weft.py").unlink()
    command = foreign / "bin" / "weft"
    command.parent.mkdir()
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    for line, ours in (("from weft.__main__ import main", True), ("import weft.cli", False)):
        command.write_text(f"#!/usr/bin/env python3\n{line}\n")
        command.chmod(0o755)
        assert found() == ([] if ours else [f"the command {command}"])


def test_no_text_of_the_code_installs_the_foreign_package() -> None:
    named = re.compile(r"pip[^\n]*(?<!un)install[^\n]*['\" ]weft(?:\[|['\" ]|$)")
    texts = [*(ROOT / "weft").rglob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    assert [str(path) for path in texts if named.findall(path.read_text())] == []
    assert named.search("pip install 'weft[gpu]'")
    assert named.search("pip install weft")


def test_an_old_torch_is_refused_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "weft needs torch 2.8 or newer, but 2.7.1+cu128 is installed: pip install 'torch>=2.8'"
    for version in ("2.8.0", "2.11.0.dev20260201+cu130", "3.0.0", None, "2.7.1+cu128"):
        monkeypatch.setattr(distribution, "torch_version", lambda version=version: version)
        if version != "2.7.1+cu128":
            distribution.check_torch()
    with pytest.raises(TorchTooOld, match=re.escape(words)):
        distribution.check_torch()
    install(tmp_path, "torch", "2.7.1+cu128")
    code, _, err = python(tmp_path, "-c", "import weft")
    assert (code, f"weft.errors.TorchTooOld: {words}" in err) == (1, True)


def python(folder: Path, *arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    """Run a Python whose path begins with a folder, followed by this checkout."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "300", **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    command = (sys.executable, *map(str, command))
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


NOT_FOUND = "raise ModuleNotFoundError('No module named torch', name='torch')"
TORCHES = {
    "2.7": (None, "torch 2.8 or newer"),
    "broken": ("raise OSError('libcudart.so.12: not found')", "libcudart.so.12"),
    "empty": ("", "cannot be imported: AttributeError"),
    "none": (NOT_FOUND, "not installed"),
}


@pytest.mark.parametrize("kind", TORCHES)
def test_the_command_works_whatever_torch_is_installed(kind: str, tmp_path: Path) -> None:
    module, text = TORCHES[kind]
    if module is None:
        install(tmp_path, "torch", "2.7.1")
    else:
        (tmp_path / "torch.py").write_text(module)
    code, out, err = python(tmp_path, "-m", "weft", "doctor", "--json")
    (result,) = [each for each in json.loads(out)["findings"] if each["name"] == "torch"]
    assert (code, result["status"], "Traceback" in err) == (1, "fail", False)
    assert text in f"{result['detail']} {result['remedy']}"
    assert "'torch>=2.8'" in result["remedy"]
    code, out, err = python(tmp_path, "-m", "weft", "demo")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert text in err


def test_an_invalid_log_level_is_one_line(tmp_path: Path) -> None:
    code, out, err = python(tmp_path, "-m", "weft", "cache", "list", WEFT_LOG="nope")
    assert (code, out) == (2, "")
    assert err == "InvalidArgument: WEFT_LOG is 'nope'; set it to debug, info, warning, error\n"


PROGRAM = """
import json
import os
import sys

import torch
import weft


def rank(group):
    x = torch.full((3, 64), group.rank + 1.0, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0, 3]] * 3), torch.full((3, 2), 0.5)
    with weft.AllToAll(group, max_tokens=4, top_k=2, num_experts=4, hidden=64) as a2a:
        received = a2a.dispatch(x, ids, weights)
        back = a2a.combine(weft.reference.identity_experts(received, x.dtype))
    files = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "weft"]
    return [torch.equal(back, x), os.path.commonpath(files)]


if __name__ == "__main__":
    print(json.dumps(weft.launch(rank, ranks=2)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    for module in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(module, reason="pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", folder, folder=ROOT)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / source.name.removesuffix(".tar.gz")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=unpacked)
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_string(archive.read(name).decode())


def test_the_wheel_is_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = archive.read("weft_moe-0.1.0.dist-info/entry_points.txt").decode()
    files = [path for path in (ROOT / "weft").rglob("*") if path.is_file()]
    package = [path for path in files if path.parent.name != "__pycache__"]
    assert inside == {path.relative_to(ROOT).as_posix() for path in package}
    assert {".py", ".cuh", ".hpp", ".cpp"} <= {Path(name).suffix for name in inside}
    assert "weft/py.typed" in inside
    assert "weft = weft.__main__:main" in entry_points
    assert metadata(wheel)["Name"] == "weft-moe"


@pytest.mark.slow
def test_the_wheel_runs_without_a_checkout(wheel, tmp_path):
    installed, folder = tmp_path / "installed", tmp_path / "elsewhere"
    folder.mkdir()
    options = ("--no-deps", "--no-index", "--no-compile", "-q")
    run("-m", "pip", "install", *options, "--target", installed, wheel, folder=folder)
    (folder / "program.py").write_text(PROGRAM)
    path = {"PYTHONPATH": str(installed), "WEFT_CACHE": str(folder / "cache")}
    printed = run(folder / "program.py", folder=folder, **path)
    assert json.loads(printed) == [[True, str(installed / "weft")]] * 2
