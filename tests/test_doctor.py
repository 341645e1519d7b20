"""The doctor on a machine with GPUs, played: what it asks of torch, nvidia-smi and the driver."""

from __future__ import annotations

import contextlib
import json
import socket
from types import SimpleNamespace

import pytest
import torch

from weft.cli import doctor, doctor_report
from weft.errors import DriverError, InvalidArgument

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47
GPU1\tNV18\t X \tSYS\t48-95
NIC0\tPIX\tSYS\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


class _Module:
    refused: str | None = None

    def __init__(self, image: bytes, *, name: str) -> None:
        if self.refused:
            raise DriverError(f"loading {name!r}: {self.refused}")
        assert image.startswith(b"\x7fELF")

    def function(self, name: str) -> None:
        assert name == "weft_doctor"

    def unload(self) -> None:
        pass


@pytest.fixture
def gpus(monkeypatch):
    """Two H200 that reach each other."""
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
    monkeypatch.setattr(doctor, "ask_nvidia_smi", lambda *arguments: TOPOLOGY)
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.159")
    monkeypatch.setattr(
        doctor, "_attribute", lambda driver, attribute, device: "FABRIC" not in attribute.name
    )
    return monkeypatch


def _examined() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_a_machine_with_gpus(gpus):
    found = _examined()
    assert "loads on 2 GPUs" in found["NVRTC sm_90a"].detail
    assert found["cuda:1"].detail == (
        "NVIDIA H200, 140 GiB, compute capability 9.0, driver 580.159"
    )
    assert found["peer access"].detail == "all pairs; matrix -y y-"
    assert found["NVLink"].detail.startswith("links between GPUs: NV18; PCIe paths in the table")
    assert found["POSIX fd handles"].detail == "every GPU"
    assert found["FABRIC handles"].detail == "not on cuda:0, cuda:1 (optional)"
    on_gpus = ("NVRTC sm_90a", "cuda:0", "peer access", "NVLink", "FABRIC handles")
    assert {found[name].status for name in on_gpus} == {"ok"}


def test_what_is_amiss_with_gpus(gpus):
    gpus.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (0, 1))
    gpus.setattr(_Module, "refused", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)")
    gpus.setattr(doctor, "_attribute", lambda driver, attribute, device: device == 0)
    found = _examined()
    assert found["NVRTC sm_90a"].status == "fail"
    assert "trial kernel on cuda:0" in found["NVRTC sm_90a"].detail
    assert found["peer access"].status == "fail"
    assert found["peer access"].detail == "denied: 1->0; matrix -y n-"
    assert found["POSIX fd handles"].status == "fail"
    assert found["POSIX fd handles"].detail == "not on cuda:1"


def test_what_torch_raises_is_a_finding(gpus):
    def lost():
        raise RuntimeError("CUDA error: device busy")

    gpus.setattr(torch.cuda, "synchronize", lost)
    found = _examined()
    assert found["NVRTC sm_90a"].status == "fail"
    assert "device busy" in found["NVRTC sm_90a"].detail
    assert found["cuda:0"].status == "ok", "the rest is examined nevertheless"


def test_findings_before_a_failure_stay(gpus):
    def refuses(driver, attribute, device):
        raise RuntimeError("the driver answered 999")

    gpus.setattr(doctor, "_attribute", refuses)
    found = _examined()
    assert found["peer access"].status == "ok"
    assert found["examination"].status == "fail"
    assert "999" in found["examination"].detail


def test_the_driver_has_what_the_doctor_asks():
    driver = pytest.importorskip("cuda.bindings.driver")
    for name in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute"):
        assert callable(getattr(driver, name))
    for name in ("POSIX_FILE_DESCRIPTOR", "FABRIC"):
        attribute = f"CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_{name}_SUPPORTED"
        assert hasattr(driver.CUdevice_attribute, attribute)


FOUND = [doctor.Finding("software", "torch", "warn", "2.7", "pip install 'torch>=2.8'")]
PRIVATE = ("alice", "node17", "hush-hush")


@pytest.fixture
def of_alice(monkeypatch, tmp_path):
    """A machine whose user, name, home and secret stand wherever they can."""
    home = tmp_path / "homes" / "alice"
    home.mkdir(parents=True)
    for name in doctor_report.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        ("HOME", str(home)),
        ("USER", "alice"),
        ("LOGNAME", "alice"),
        ("MASTER_ADDR", "node17.example.org"),
        ("TMPDIR", str(home / "alice_scratch")),
        ("CXX", "/opt/Node17/alice/g++ -Dkey=hush-hush"),
        ("WEFT_SECRET", "hush-hush"),
        ("WEFT_CACHE", str(home / "cache-of-alice")),
        ("WORLD_SIZE", "4"),
        ("ALICE", "not read by weft"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.example.org")
    return monkeypatch


def test_the_report_has_what_a_bug_needs(of_alice):
    found = doctor_report.report(FOUND)
    assert list(found) == [
        *("weft", "versions", "system", "GPUs", "limits", "environment", "cache"),
        "findings",
    ]
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["weft"]["headers"]) == 64
    assert found["environment"] == {
        "CXX": "/opt/(host)/(user)/g++ -Dkey=(secret)",
        "MASTER_ADDR": "(set, no loopback address)",
        "TMPDIR": "~/(user)_scratch",
        "WEFT_CACHE": "~/cache-of-(user)",
        "WEFT_SECRET": "(set)",
        "WORLD_SIZE": "4",
    }
    assert found["cache"] == {"path": "~/cache-of-(user)", "entries": 0, "bytes": 0}
    assert found["findings"][0]["remedy"] == "pip install 'torch>=2.8'"
    assert "open files" in found["limits"]


@pytest.mark.parametrize("kind", ["text", "json"])
def test_the_report_names_nobody(of_alice, weft_command, tmp_path, kind):
    of_alice.setattr(doctor, "examine", lambda: FOUND)
    path = tmp_path / f"report.{kind}"
    code, out, _ = weft_command("doctor", "--report", str(path))
    assert (code, out) == (0, "")
    told = path.read_text()
    assert [word for word in PRIVATE if word in told.lower()] == []
    if kind == "json":
        assert json.loads(told)["findings"][0]["name"] == "torch"
    else:
        assert "  warn  torch: 2.7 -> pip install 'torch>=2.8'" in told


def test_the_report_on_stdout(weft_command, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: FOUND)
    _, out, _ = weft_command("doctor", "--report", "-")
    assert out.startswith("weft:\n  version: ")
    _, out, _ = weft_command("doctor", "--report", "-", "--json")
    assert json.loads(out)["weft"]["version"]


def test_a_report_that_cannot_be_written(tmp_path):
    with pytest.raises(InvalidArgument, match=r"cannot write the report to .*: No such file"):
        doctor_report.write(str(tmp_path / "no" / "where"), FOUND, as_json=False)


def test_the_report_of_gpus(gpus):
    gpus.setattr(doctor_report, "ask_nvidia_smi", lambda *arguments: TOPOLOGY)
    gpus.setattr(doctor_report, "driver_version", lambda: "580.159")
    gpus.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    found = doctor_report.report([])
    assert found["versions"]["NVIDIA driver"] == "580.159"
    assert found["versions"]["NCCL of torch"] == "2.27.5"
    assert found["GPUs"]["cuda:1"] == f"NVIDIA H200, {140 << 30} bytes, sm_90"
    assert found["GPUs"]["links"].startswith("\tGPU0\tGPU1")
    assert "Legend" not in found["GPUs"]["links"]


def test_a_cache_that_cannot_be_used_is_in_the_report(monkeypatch, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "open"))
    assert "chmod 700" in doctor_report.report([])["cache"]["unusable"]
