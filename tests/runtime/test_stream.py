# SPDX-License-Identifier: Apache-2.0
"""Loading and waiting during other streams' captures, with a recording driver."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.fake_driver import Driver
from tests.runtime.test_calls import open_kind
from weft.cuda import driver
from weft.errors import OutOfOrder
from weft.runtime import stream

GPU = torch.device("cuda", 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(current=1)
    monkeypatch.setattr(driver, "load_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_kernels_are_loaded_in_relaxed_mode_and_never_into_a_graph(fake, monkeypatch):
    with stream.loading_context(GPU):
        assert fake.mode is fake.modes.CU_STREAM_CAPTURE_MODE_RELAXED
    assert fake.mode is fake.modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(OutOfOrder, match="during a capture of this stream"):
        stream.loading_context(GPU).__enter__()
    assert fake.mode is fake.modes.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_waits_are_in_relaxed_mode(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    current = SimpleNamespace(synchronize=lambda: waited.append(fake.mode))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    stream.synchronize_stream(GPU)
    assert waited == [fake.modes.CU_STREAM_CAPTURE_MODE_RELAXED]
    stream.synchronize_device(GPU)
    assert [name for _, name in fake.log if name.startswith("cuMem")] == ["cuMemAlloc", "cuMemFree"]
    assert fake.unsafe == []
    assert fake.left() == {}
    assert fake.mode is fake.modes.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_a_cpu_asks_no_driver(fake: Driver) -> None:
    cpu = torch.device("cpu")
    stream.synchronize_stream(cpu)
    stream.synchronize_device(cpu)
    with driver.relaxed_capture(cpu):
        assert fake.log == []


@pytest.mark.parametrize("name", ["AllToAll", "LowLatencyAllToAll", "AllReduce", "MoE"])
def test_constructors_run_in_relaxed_mode(fake: Driver, name: str) -> None:
    """Torch allocates for them, too; their first call of the group sees the mode."""

    class Group(weft.Group):
        device = GPU

        def __init__(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            raise LookupError(fake.mode)

    with pytest.raises(LookupError) as seen:
        open_kind(Group(), name)
    assert seen.value.args == (fake.modes.CU_STREAM_CAPTURE_MODE_RELAXED,)
    assert fake.mode is fake.modes.CU_STREAM_CAPTURE_MODE_GLOBAL
