# SPDX-License-Identifier: Apache-2.0
"""Loading, launching and unloading, with a recording driver."""

import ctypes
import gc
import importlib
from typing import Any
from unittest.mock import Mock

import pytest

from tests.fake_driver import Args, Driver
from weft.cuda.driver import load_driver
from weft.errors import DriverError, InvalidArgument, OutOfOrder
from weft.jit import module
from weft.jit.launch import Launcher
from weft.jit.module import CudaModule, Function


class Other(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("y", ctypes.c_void_p))


def kernel(**changes: Any) -> Function:
    values: dict[str, Any] = {"name": "fill", "handle": 22, "shared": 0, "argument_bytes": 16}
    return Function(**{**values, **changes})


def test_each_call_passes_struct_grid_block_and_stream_as_they_are_now(fake: Driver) -> None:
    launcher, args = Launcher(kernel(shared=1024), Args), Args(x=0xABC0, value=-1)
    calls = [((1, 1, 1), 32, 0), ((1, 1, 1), 32, 0), ((4, 2, 1), 32, 0), ((2, 1, 1), 256, 0x77)]
    for args.n, (grid, block, stream) in enumerate(calls):
        launcher(args, grid, block, stream)
    assert [seen.args.n for seen in fake.launches] == [0, 1, 2, 3]
    assert [(seen.grid, seen.block[0], seen.stream) for seen in fake.launches] == calls
    seen = fake.launches[-1]
    assert (seen.args.x, seen.args.value, seen.block) == (0xABC0, -1, (256, 1, 1))
    assert (seen.shared, seen.function, seen.extra, seen.attributes) == (1024, 22, 0, [])
    assert len({seen.address for seen in fake.launches}) == 1  # nothing is allocated per call


def test_attributes_of_a_launch(fake: Driver) -> None:
    serial, cluster = "PROGRAMMATIC_STREAM_SERIALIZATION", "CLUSTER_DIMENSION"
    for options, names in (
        ({"use_pdl": True}, [serial]),
        ({"cluster": 7}, [cluster]),
        ({"cluster": 1}, []),
        ({"use_pdl": True, "cluster": 2}, [serial, cluster]),
    ):
        Launcher(kernel(), Args, **options)(Args(), (1, 1, 1), 32, 0)
        expected = {f"CU_LAUNCH_ATTRIBUTE_{name}" for name in names}
        assert set(fake.launches[-1].attributes) == expected


def test_how_many_clusters_fit(fake: Driver) -> None:
    loaded = CudaModule(b"cubin", name="sums")
    assert loaded.get_max_active_clusters("sum", 128, 7) == 16
    (asked,) = fake.named("cuOccupancyMaxActiveClusters")
    assert (asked[2].blockDimX, asked[2].gridDimX) == (128, 7)
    assert asked[2].attrs[0].value.clusterDim.x == 7
    fake.fails["cuOccupancyMaxActiveClusters"] = fake.real.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE
    assert loaded.get_max_active_clusters("sum", 128, 7) == 0
    fake.fails["cuOccupancyMaxActiveClusters"] = fake.real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="clusters of 7 x 128 threads of 'sum'"):
        loaded.get_max_active_clusters("sum", 128, 7)


def test_refused_launches_are_explained(fake: Driver) -> None:
    launcher = Launcher(kernel(), Args)
    for args, grid, block, text in (
        (Other(), 1, 32, "needs a Args, not a Other"),
        (Args(), 0, 32, r"grid of 'fill' is \(0, 1, 1\)"),
        (Args(), 1, 1025, "block of 'fill' is 1025"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            launcher(args, (grid, 1, 1), block, 0)
    assert fake.launches == []
    with pytest.raises(InvalidArgument, match="has 24 bytes, Args has 16"):
        Launcher(kernel(argument_bytes=24), Args)
    fake.fails["cuLaunchKernelEx"] = fake.real.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    text = r"'fill'.*\(999, 1, 1\).*block 1024.*0x77.*RESOURCES \(701\)"
    with pytest.raises(DriverError, match=text):
        launcher(Args(), (999, 1, 1), 1024, 0x77)


def test_functions_are_loaded_once_and_their_shared_memory_is_never_lowered(fake: Driver) -> None:
    code = CudaModule(b"cubin", name="code")
    function = code.function("fill", shared=100_000)
    assert (function.name, function.handle, function.argument_bytes) == ("fill", 22, 16)
    assert [function.shared, code.function("fill", shared=60_000).shared] == [100_000, 60_000]
    assert fake.named("cuModuleGetFunction") == [("cuModuleGetFunction", 11, b"fill")]
    assert fake.named("cuFuncLoad") == [("cuFuncLoad", 22)]
    assert [call[-1] for call in fake.named("cuFuncSetAttribute")] == [100_000]
    assert code.occupancy("fill", 256) == 3
    fake.fails["cuFuncSetAttribute"] = fake.real.CUresult.CUDA_ERROR_INVALID_VALUE
    text = r"'fill' to 300000 bytes .*static: 40, limit per block: 9"
    with pytest.raises(DriverError, match=text):
        code.function("fill", shared=300_000)
    code.unload()
    code.unload()
    assert fake.named("cuModuleUnload") == [("cuModuleUnload", 11)]
    for use in (code.function, code.global_bytes):
        with pytest.raises(OutOfOrder, match="'code' was unloaded"):
            use("fill")


def test_code_that_cannot_be_loaded_is_explained(fake, monkeypatch):
    def refuses(words: str) -> None:
        with pytest.raises(DriverError, match=words):
            CudaModule(b"cubin", name="code")

    fake.fails["cuModuleLoadData"] = fake.real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    refuses(r"loading 'code'.*\(209\).*current_arch")
    assert len(fake.named("cuMemAlloc")) == len(fake.named("cuMemFree")) == 1
    fake.current = 0
    refuses(r"no current CUDA context.*torch\.zeros")
    absent = Mock(side_effect=RuntimeError("libcuda.so.1 not found"))
    monkeypatch.setattr(fake, "cuCtxGetCurrent", absent, raising=False)
    refuses(r"NVIDIA driver was not found.*use CPU ranks")
    monkeypatch.undo()
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=ModuleNotFoundError("cuda")))
    load_driver.cache_clear()
    try:
        refuses(r"\[gpu\]'")
    finally:
        load_driver.cache_clear()


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


def test_dropped_code_is_unloaded_after_its_last_kernel(fake: Driver) -> None:
    """A function keeps its module loaded; permanent code is never unloaded and has no fence."""
    kernel = CudaModule(b"cubin", name="code").function("fill")
    gc.collect()
    assert fake.named("cuModuleUnload") == []
    del kernel
    assert len(fake.named("cuModuleUnload")) == len(fake.named("cuMemFree")) == 1
    CudaModule(b"cubin", name="code", permanent=True)
    assert len(fake.named("cuMemAlloc")) == 1
    CudaModule(b"cubin", name="code").unload()
    assert len(fake.named("cuModuleUnload")) == 2
    assert fake.unsafe == []


def test_architecture_of_the_current_gpu(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for (major, minor), arch in (((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((8, 6), "sm_86")):
        numbers = {"MAJOR": major, "MINOR": minor}
        monkeypatch.setattr(
            module, "_get_device_attribute", lambda name, n=numbers: n[name.rsplit("_", 1)[1]]
        )
        assert module.current_arch() == arch
