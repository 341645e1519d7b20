"""Loading and launching, against a driver that only takes notes; with a GPU, also the real one."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.errors import DriverError, InvalidArgument, LayoutMismatch, OutOfOrder
from weft.jit import launch, module
from weft.jit.args import decode, table_source, verify
from weft.jit.cache import Cache
from weft.jit.launch import Launcher
from weft.jit.module import CudaModule, Function
from weft.jit.nvrtc import compile_cubin
from weft.memory import driver as memory_driver


class Args(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_uint32), ("value", ctypes.c_int32))


class Other(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("y", ctypes.c_void_p))


# What allocates, frees, loads or waits: forbidden beside a capture, but in relaxed mode.
FREE_OF_CAPTURES = {
    "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuFuncLoad", "cuMemAlloc",
    "cuMemFree", "cuStreamCreate", "cuStreamDestroy", "cuStreamSynchronize", "cuMemcpyDtoHAsync",
}  # fmt: skip


class Driver:
    """cuda.bindings.driver without a driver: its types are the real ones, its calls are noted."""

    def __init__(self) -> None:
        self.real = pytest.importorskip(
            "cuda.bindings.driver", reason="cuda.bindings is not installed"
        )
        self.status: Any = self.real.CUresult.CUDA_SUCCESS
        self.context: tuple[Any, int] = (self.real.CUresult.CUDA_SUCCESS, 1)
        self.fails: dict[str, Any] = {}
        self.modes = self.real.CUstreamCaptureMode
        self.mode = self.modes.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.unsafe: list[str] = []  # calls outside of relaxed mode
        self.capturing = self.real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[SimpleNamespace] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self.real, name)
        answers: dict[str, tuple[Any, ...]] = {
            "cuModuleLoadData": (11,),
            "cuMemAlloc": (33,),
            "cuStreamCreate": (44,),
            "cuStreamIsCapturing": (self.capturing,),
            "cuModuleGetFunction": (22,),
            "cuDriverGetVersion": (13000,),
            "cuFuncGetParamInfo": (0, ctypes.sizeof(Args)),
            "cuFuncGetAttribute": (40,),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (3,),
            "cuOccupancyMaxActiveClusters": (16,),
            "cuModuleGetGlobal": (0x1000, 8),
            "cuCtxGetDevice": (0,),
            "cuDeviceGetAttribute": (9,),
        }

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            if (
                name in FREE_OF_CAPTURES
                and self.mode is not self.modes.CU_STREAM_CAPTURE_MODE_RELAXED
            ):
                self.unsafe.append(name)
            if name in self.fails:
                return (self.fails[name], *([None] * len(answers.get(name, ()))))
            return (self.real.CUresult.CUDA_SUCCESS, *answers.get(name, ()))

        return call

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, Any]:  # noqa: N802
        before, self.mode = self.mode, mode
        return self.real.CUresult.CUDA_SUCCESS, before

    def cuCtxGetCurrent(self) -> tuple[Any, int]:  # noqa: N802
        return self.context

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"as the driver says"

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> tuple[Any]:  # noqa: N802
        address = ctypes.c_uint64.from_address(params).value
        self.launches.append(
            SimpleNamespace(
                args=Args.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(Args))),
                address=address,
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared=config.sharedMemBytes,
                stream=int(config.hStream),
                attributes=[attribute.id.name for attribute in config.attrs[: config.numAttrs]],
                function=function,
                extra=extra,
            )
        )
        return (self.status,)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(memory_driver, "driver", lambda: driver)
    return driver


def kernel(**changes: Any) -> Function:
    values: dict[str, Any] = {"name": "fill", "handle": 22, "shared": 0, "argument_bytes": 16}
    return Function(**{**values, **changes})


def test_struct_grid_block_and_stream_are_packed(fake: Driver) -> None:
    launcher = Launcher(kernel(shared=1024), Args)
    launcher(Args(x=0xABC0, n=5, value=-1), (4, 2, 1), 256, 0x77)
    (seen,) = fake.launches
    assert (seen.args.x, seen.args.n, seen.args.value) == (0xABC0, 5, -1)
    assert (seen.grid, seen.block, seen.stream) == ((4, 2, 1), (256, 1, 1), 0x77)
    assert (seen.shared, seen.function, seen.extra) == (1024, 22, 0)
    assert seen.attributes == []


def test_each_call_takes_the_values_of_its_time(fake: Driver) -> None:
    launcher = Launcher(kernel(), Args)
    args = Args(n=1)
    for n, (grid, block, stream) in enumerate(
        [((1, 1, 1), 32, 0), ((1, 1, 1), 32, 0), ((2, 1, 1), 32, 0), ((2, 1, 1), 64, 9)]
    ):
        args.n = n
        launcher(args, grid, block, stream)
    assert [seen.args.n for seen in fake.launches] == [0, 1, 2, 3]
    assert [seen.grid[0] for seen in fake.launches] == [1, 1, 2, 2]
    assert [seen.block[0] for seen in fake.launches] == [32, 32, 32, 64]
    assert [seen.stream for seen in fake.launches] == [0, 0, 0, 9]
    assert len({seen.address for seen in fake.launches}) == 1  # nothing is made per call


def test_attributes_of_a_launch(fake: Driver) -> None:
    for options, names in (
        ({"programmatic": True}, ["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"]),
        ({"cooperative": True}, ["CU_LAUNCH_ATTRIBUTE_COOPERATIVE"]),
        ({"cluster": 7}, ["CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"]),
        ({"cluster": 1}, []),
    ):
        Launcher(kernel(), Args, **options)(Args(), (1, 1, 1), 32, 0)
        assert fake.launches[-1].attributes == names
    Launcher(kernel(), Args, programmatic=True, cooperative=True)(Args(), (1, 1, 1), 32, 0)
    assert len(fake.launches[-1].attributes) == 2


def test_how_many_clusters_fit(fake: Driver) -> None:
    loaded = CudaModule(b"cubin", name="sums")
    assert loaded.resident_clusters("sum", 128, 7) == 16
    (asked,) = fake.named("cuOccupancyMaxActiveClusters")
    assert (asked[2].blockDimX, asked[2].gridDimX) == (128, 7)
    assert asked[2].attrs[0].value.clusterDim.x == 7
    fake.fails["cuOccupancyMaxActiveClusters"] = fake.real.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE
    assert loaded.resident_clusters("sum", 128, 7) == 0
    fake.fails["cuOccupancyMaxActiveClusters"] = fake.real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="clusters of 7 x 128 threads of 'sum'"):
        loaded.resident_clusters("sum", 128, 7)


def test_refused_launch_names_kernel_grid_and_block(fake: Driver) -> None:
    fake.status = fake.real.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    with pytest.raises(DriverError) as caught:
        Launcher(kernel(), Args, cooperative=True)(Args(), (999, 1, 1), 1024, 0x77)
    text = str(caught.value)
    for part in ("'fill'", "(999, 1, 1)", "block 1024", "0x77", "TOO_LARGE (720)", "occupancy"):
        assert part in text


def test_wrong_argument_type_and_shape_are_refused(fake: Driver) -> None:
    launcher = Launcher(kernel(), Args)
    with pytest.raises(InvalidArgument, match="takes a Args, not a Other"):
        launcher(Other(), (1, 1, 1), 32, 0)
    with pytest.raises(InvalidArgument, match=r"grid of 'fill' is \(0, 1, 1\)"):
        launcher(Args(), (0, 1, 1), 32, 0)
    with pytest.raises(InvalidArgument, match="block of 'fill' is 1025"):
        launcher(Args(), (1, 1, 1), 1025, 0)
    assert fake.launches == []


def test_struct_of_another_size_than_the_kernels_is_refused(fake: Driver) -> None:
    with pytest.raises(LayoutMismatch, match="takes 24 bytes, Args has 16"):
        Launcher(kernel(argument_bytes=24), Args)
    Launcher(kernel(argument_bytes=None), Args)


def test_functions_are_loaded_when_taken(fake: Driver) -> None:
    code = CudaModule(b"cubin", name="code")
    function = code.function("fill")
    assert (function.name, function.handle, function.argument_bytes) == ("fill", 22, 16)
    code.function("fill")
    assert fake.named("cuModuleGetFunction") == [("cuModuleGetFunction", 11, b"fill")]
    assert fake.named("cuFuncLoad") == [("cuFuncLoad", 22)]
    assert code.occupancy("fill", 256) == 3
    assert code.attributes("fill")["registers"] == 40


def test_shared_memory_is_raised_and_never_lowered(fake: Driver) -> None:
    code = CudaModule(b"cubin", name="code")
    assert code.function("fill", shared=100_000).shared == 100_000
    assert code.function("fill", shared=60_000).shared == 60_000
    assert [call[-1] for call in fake.named("cuFuncSetAttribute")] == [100_000]
    fake.fails["cuFuncSetAttribute"] = fake.real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match=r"'fill' 300000 bytes.*40 static.*9 in all"):
        code.function("fill", shared=300_000)


def test_unload_is_idempotent_and_final(fake: Driver) -> None:
    code = CudaModule(b"cubin", name="code")
    code.unload()
    code.unload()
    assert fake.named("cuModuleUnload") == [("cuModuleUnload", 11)]
    for use in (code.function, code.attributes, code.global_bytes):
        with pytest.raises(OutOfOrder, match="'code' was unloaded"):
            use("fill")


def test_code_goes_behind_a_wait_that_no_capture_minds(fake: Driver) -> None:
    """Loading, reading and unloading leave everybody's captures alone, and the thread's mode."""
    code = CudaModule(b"cubin", name="code")
    code.function("fill")
    assert code.global_bytes("table") == bytes(8)
    with code.own_stream() as stream:
        assert stream == 44
    made = len(fake.calls)
    code.unload(after=0x77)
    names = [name for name, *_ in fake.calls[made:] if name != "cuInit"]
    assert names == [
        "cuCtxPushCurrent", "cuStreamIsCapturing", "cuStreamSynchronize", "cuMemFree",
        "cuModuleUnload", "cuCtxPopCurrent",
    ]  # fmt: skip
    assert fake.unsafe == []
    assert fake.mode is fake.modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    streams = [name for name, *_ in fake.calls if name.startswith("cuStream")]
    assert streams.count("cuStreamCreate") == streams.count("cuStreamDestroy") == 2


def test_a_stream_that_is_captured_is_not_waited_for(fake: Driver) -> None:
    """Nor the default stream while one is captured that blocks with it."""
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


def test_code_that_stays_holds_nothing_to_wait_by(fake: Driver) -> None:
    CudaModule(b"cubin", name="code", stays=True)
    assert fake.named("cuMemAlloc") == []


def test_no_current_context_is_explained(fake: Driver) -> None:
    uninitialised = fake.real.CUresult.CUDA_ERROR_NOT_INITIALIZED
    for status in (fake.real.CUresult.CUDA_SUCCESS, uninitialised):
        fake.context = (status, 0)
        with pytest.raises(DriverError, match=r"no current CUDA context.*torch\.zeros"):
            CudaModule(b"cubin", name="code")


def test_refused_code_is_explained(fake: Driver) -> None:
    fake.fails["cuModuleLoadData"] = fake.real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(DriverError, match=r"loading 'code'.*\(209\).*current_arch"):
        CudaModule(b"cubin", name="code")
    assert len(fake.named("cuMemAlloc")) == len(fake.named("cuMemFree")) == 1


def test_architecture_of_the_current_gpu(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for (major, minor), arch in (((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((8, 6), "sm_86")):
        numbers = {"MAJOR": major, "MINOR": minor}
        monkeypatch.setattr(
            module, "_device_attribute", lambda name, n=numbers: n[name.rsplit("_", 1)[1]]
        )
        assert module.current_arch() == arch


def test_absent_binding_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    module.driver.cache_clear()
    try:
        with pytest.raises(DriverError, match=r"pip install .weft\[cuda\]"):
            module.current_arch()
    finally:
        module.driver.cache_clear()


def test_absent_driver_is_explained(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(fake, "cuCtxGetCurrent", absent, raising=False)
    with pytest.raises(DriverError, match=r"NVIDIA driver was not found.*use CPU ranks"):
        CudaModule(b"cubin", name="code")


KERNEL = """\
struct Args { int* x; unsigned n; int value; };
extern "C" __global__ void fill(const __grid_constant__ Args a) {
    extern __shared__ int staged[];
    staged[threadIdx.x] = a.value;
    __syncthreads();
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.x[i] = staged[threadIdx.x];
}
"""


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    x = torch.zeros(1000, dtype=torch.int32, device="cuda")
    source = KERNEL + table_source(Args, "Args", "args_table", device=True)
    cubin = compile_cubin(
        source, name="fill", arch=module.current_arch(), cache=Cache(tmp_path / "cache")
    )
    code = CudaModule(cubin, name="fill")
    verify(Args, decode(code.global_bytes("args_table")))
    assert code.attributes("fill")["registers"] > 0
    assert code.occupancy("fill", 256, shared=65536) >= 1
    function = code.function("fill", shared=65536)
    assert function.argument_bytes == ctypes.sizeof(Args)
    stream = torch.cuda.current_stream().cuda_stream
    for value, options in enumerate(({}, {"programmatic": True}, {"cooperative": True}), start=1):
        Launcher(function, Args, **options)(
            Args(x=x.data_ptr(), n=1000, value=value), (4, 1, 1), 256, stream
        )
        torch.cuda.synchronize()
        assert x.tolist() == [value] * 1000
    launcher, args = Launcher(function, Args), Args(x=x.data_ptr(), n=1000, value=9)
    start = time.perf_counter()
    for _ in range(500):
        launcher(args, (4, 1, 1), 256, stream)
    record_property("launch_us", (time.perf_counter() - start) / 500 * 1e6)
    torch.cuda.synchronize()
    with pytest.raises(DriverError, match="'absent'"):
        code.function("absent")
    with pytest.raises(DriverError, match="300000 bytes"):
        code.function("fill", shared=300_000)
    code.unload()
