# SPDX-License-Identifier: Apache-2.0
"""The doctor: on this machine, on a simulated one with GPUs, and its report."""

import contextlib
import json
import operator
import socket
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from weft.cli import doctor, report
from weft.cli.findings import Finding
from weft.errors import DriverError

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47
GPU1\tNV18\t X \tSYS\t48-95
NIC0\tPIX\tSYS\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


THREE = "GPU0 X NV4 SYS\nGPU1 NV4 X NODE\nGPU2 SYS NODE X\n"


def _refuses(*device):
    raise RuntimeError("CUDA error: device busy")


class _Module:
    refused: str | None = None

    def __init__(self, image: bytes, *, name: str) -> None:
        if self.refused:
            raise DriverError(f"loading {name!r}: {self.refused}")
        assert image.startswith(b"\x7fELF")

    def unload(self) -> None:
        pass


@pytest.fixture
def gpus(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, name="NVIDIA H200", total_memory=140 << 30)
    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("get_device_properties", lambda device: properties),
        ("get_device_capability", lambda device: (9, 0)),
        ("can_device_access_peer", lambda a, b: a != b),
        ("device", lambda device: contextlib.nullcontext()),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(doctor, "CudaModule", _Module)
    monkeypatch.setattr(doctor, "query_nvidia_smi", lambda *arguments: TOPOLOGY)
    monkeypatch.setattr(doctor, "read_driver_version", lambda: "580.159")
    monkeypatch.setattr(doctor, "_can_export_memory", lambda device: True)
    monkeypatch.setattr(doctor, "launch", lambda *inputs, **options: None)
    return monkeypatch


def _examined() -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor.run_checks()}


def test_a_machine_with_gpus(gpus):
    result = _examined()
    on_gpus = ("NVRTC sm_90a", "cuda:0", "cuda:1", "peer access", "NVLink", "POSIX fd handles")
    assert {result[name].status for name in on_gpus} == {"ok"}


def smi(text):
    """Return a patch of nvidia-smi's output."""
    return doctor, "query_nvidia_smi", lambda *arguments: text


@pytest.mark.parametrize(
    ("finding", "status", "detail", "where", "name", "value"),
    [
        ("peer access", "fail", "denied: 1->0", torch.cuda, "can_device_access_peer", operator.lt),
        ("NVRTC sm_90a", "fail", "trial kernel on cuda:0", _Module, "refused", "ERROR (222)"),
        ("NVRTC sm_90a", "fail", "device busy", torch.cuda, "synchronize", _refuses),
        ("POSIX fd handles", "fail", "not on cuda:1", doctor, "_can_export_memory", operator.not_),
        ("checks", "fail", "device busy", doctor, "_can_export_memory", _refuses),
        ("NVLink", "warn", "GPU2-GPU0 (SYS), GPU2-GPU1 (NODE)", *smi(THREE)),
        ("NVLink", "warn", "GPU1-GPU0 (SYS)", *smi(TOPOLOGY.replace("NV18", "SYS"))),
        ("NVLink", "warn", "unknown: no output", *smi(None)),
        ("NVLink", "warn", "unknown: no output", *smi("No devices were found\n")),
        ("NVLink domain", "ok", "on all hosts", doctor, "supports_fabric", lambda device: True),
        ("NVLink domain", "ok", "on one host", doctor, "supports_fabric", lambda device: False),
    ],
)
def test_a_finding_is_reported_and_later_checks_run(
    gpus, finding, status, detail, where, name, value
):
    gpus.setattr(where, name, value)
    result = _examined()
    assert result[finding].status == status
    assert detail in result[finding].detail
    assert "cache" in result


def test_this_machine(weft_command):
    code, out, _ = weft_command("doctor", "--json")
    result = json.loads(out)
    names = {finding["name"]: finding["status"] for finding in result["findings"]}
    assert code == (result["status"] == "fail")
    for name in ("python", "torch", "C++ compiler", "CPU ranks", "cache"):
        assert names[name] == "ok", name


def test_problems_are_reported_with_the_fix(weft_command, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "open"))
    monkeypatch.setattr(doctor, "launch", lambda *inputs, **options: None)
    result = _examined()
    assert "chmod 700" in result["cache"].detail
    assert "no-such-compiler" in result["C++ compiler"].detail
    assert result["C++ compiler"].status == ("warn" if torch.cuda.is_available() else "fail")
    code, out, _ = weft_command("doctor")
    assert code == 1
    assert "not ready for" in out
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "run_checks", lambda: FOUND)
    code, out, _ = weft_command("doctor")
    assert code == 0
    assert "ready for" in out
    assert "-> pip install 'torch>=2.8'" in out


FOUND = [Finding("software", "torch", "warn", "2.7", "pip install 'torch>=2.8'")]
PRIVATE = ("alice", "node17")


@pytest.fixture
def of_alice(monkeypatch, tmp_path):
    """Simulate a machine with user, host and home names in many places."""
    home = tmp_path / "homes" / "alice"
    home.mkdir(parents=True)
    for name in report.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        ("HOME", str(home)),
        ("USER", "alice"),
        ("LOGNAME", "alice"),
        ("MASTER_ADDR", "node17.example.org"),
        ("TMPDIR", str(home / "alice_scratch")),
        ("CXX", "/opt/Node17/alice/g++"),
        ("WORLD_SIZE", "4"),
        ("ALICE", "not read by weft"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.example.org")
    monkeypatch.setattr(report, "query_nvidia_smi", lambda *arguments: TOPOLOGY)
    monkeypatch.setattr(doctor, "run_checks", lambda: FOUND)
    return monkeypatch


def test_the_report_has_what_a_bug_report_needs(of_alice):
    result = report.build_report(FOUND)
    assert result["environment"] == {
        "CXX": "/opt/(host)/(user)/g++",
        "MASTER_ADDR": "(set)",
        "TMPDIR": "~/(user)_scratch",
        "WORLD_SIZE": "4",
    }
    assert result["packages"]["torch"] == version("torch")


@pytest.mark.parametrize("kind", ["text", "json"])
def test_the_report_has_no_private_names(of_alice, weft_command, tmp_path, kind):
    path = tmp_path / f"report.{kind}"
    code, out, _ = weft_command("doctor", "--report", str(path))
    assert (code, out) == (0, "")
    reported = path.read_text()
    assert [word for word in PRIVATE if word in reported.lower()] == []
    assert "warn  2.7 -> pip install 'torch>=2.8'" in reported
