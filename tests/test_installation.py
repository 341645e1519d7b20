# SPDX-License-Identifier: Apache-2.0
"""The wheel runs without a checkout, and the commands run whatever torch is installed."""

import email
import email.message
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a Python whose path begins with a folder, followed by this checkout."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "COLUMNS": "300"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    command = (sys.executable, *map(str, command))
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("module", "text"),
    [(None, "torch 2.8 or newer"), ("raise ModuleNotFoundError(name='torch')", "not installed")],
)
def test_the_commands_work_without_a_torch_that_weft_can_use(tmp_path, module, text):
    if module is None:
        info = tmp_path / "torch-2.7.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.1\n")
        assert "weft.errors.TorchTooOld" in python(tmp_path, "-c", "import weft")[2]
    else:
        (tmp_path / "torch.py").write_text(module)
    code, out, _ = python(tmp_path, "-m", "weft", "doctor", "--json")
    (result,) = [each for each in json.loads(out)["findings"] if each["name"] == "torch"]
    assert (code, result["status"]) == (1, "fail")
    assert text in f"{result['detail']} {result['remedy']}"
    code, out, err = python(tmp_path, "-m", "weft", "demo")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert text in err


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
    # Python 3.11.2, as Debian has it, knows no filter of tarfile yet.
    subprocess.run(["tar", "-xzf", source, "-C", folder], check=True)
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
