# SPDX-License-Identifier: Apache-2.0
"""Unloading of modules and reading their variables, during captures of other code."""

from __future__ import annotations

import gc

import pytest

from tests.fake_driver import Driver
from weft.errors import DriverError
from weft.jit.module import CudaModule


def test_unloading_code_does_not_break_captures(fake: Driver) -> None:
    """Loading, reading and unloading leave captures and the thread's mode unchanged."""
    code = CudaModule(b"cubin", name="code")
    code.function("fill")
    assert code.global_bytes("table") == bytes([3] * 8)
    made = len(fake.calls)
    code.unload(after=0x77)
    names = [name for name, *_ in fake.calls[made:] if name != "cuInit"]
    mode = "cuThreadExchangeStreamCaptureMode"
    assert names == [
        mode, "cuCtxPushCurrent", "cuStreamIsCapturing", "cuStreamSynchronize", "cuMemFree",
        "cuModuleUnload", "cuCtxPopCurrent", mode,
    ]  # fmt: skip
    assert fake.unsafe == []
    assert fake.mode is fake.modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    streams = [name for name, *_ in fake.calls if name.startswith("cuStream")]
    assert streams.count("cuStreamCreate") == streams.count("cuStreamDestroy") == 1


def test_a_stream_that_is_captured_is_not_waited_for(fake: Driver) -> None:
    """Nor is the default stream while a stream that blocks with it is captured."""
    status = fake.real.CUstreamCaptureStatus
    for capturing in (
        status.CU_STREAM_CAPTURE_STATUS_ACTIVE,
        status.CU_STREAM_CAPTURE_STATUS_INVALIDATED,
    ):
        fake.capturing = capturing
        CudaModule(b"cubin", name="code").unload(after=0x77)
    fake.fails["cuStreamIsCapturing"] = fake.real.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    CudaModule(b"cubin", name="code").unload(after=0)
    assert fake.named("cuStreamSynchronize") == []
    assert len(fake.named("cuModuleUnload")) == 3


def test_a_failing_unload_tries_every_step(fake: Driver) -> None:
    lost = fake.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    fake.fails = dict.fromkeys(("cuStreamSynchronize", "cuMemFree", "cuModuleUnload"), lost)
    code = CudaModule(b"cubin", name="code")
    with pytest.raises(DriverError, match=r"unloading 'code'.*an earlier kernel failed"):
        code.unload(after=0x77)
    assert [len(fake.named(name)) for name in (*fake.fails, "cuCtxPopCurrent")] == [1] * 4
    assert fake.mode is fake.modes.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_permanent_code_allocates_no_fence(fake: Driver) -> None:
    CudaModule(b"cubin", name="code", permanent=True)
    assert fake.named("cuMemAlloc") == []


def test_dropped_code_is_unloaded_after_its_last_kernel(fake: Driver) -> None:
    """A function keeps its module loaded, and permanent code is never unloaded."""
    kernel = CudaModule(b"cubin", name="code").function("fill")
    gc.collect()
    assert fake.named("cuModuleUnload") == []
    del kernel
    assert len(fake.named("cuModuleUnload")) == len(fake.named("cuMemFree")) == 1
    CudaModule(b"cubin", name="code", permanent=True)
    CudaModule(b"cubin", name="code").unload()
    assert len(fake.named("cuModuleUnload")) == 2
    assert fake.unsafe == []
