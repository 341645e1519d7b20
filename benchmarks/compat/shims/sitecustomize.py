# SPDX-License-Identifier: Apache-2.0
"""With RIVALS_CPU=N, runs a program for N GPUs on CPU ranks: "cuda" is mapped to "cpu".

A graph capture runs its body and records the shims' calls in it; a replay repeats those calls. A
float32 tensor divided by a number is multiplied by the reciprocal, as torch does on GPUs. Streams
and events do nothing. weft itself still sees no GPU.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

DEVICES = int(os.environ.get("RIVALS_CPU", "0"))
IDLE = ("set_device", "synchronize", "empty_cache", "_sleep", "manual_seed", "manual_seed_all")
captures: list[list[Callable[[], Any]]] = []  # open captures of CPU ranks


def on_cpu() -> None:
    """Replace the parts of torch that need a GPU."""
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def read(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return cpu
        return cpu if isinstance(value, str) and value.split(":")[0] == "cuda" else value

    def is_float32(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype == torch.float32

    divisions = {torch.Tensor.__truediv__, torch.Tensor.div, torch.div}

    class Cpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.cuda:
                return args[0]
            if func in divisions and not kwargs:
                x, by = args
                if is_float32(x) and isinstance(by, int | float) and by:
                    return x * torch.tensor(1 / by, dtype=torch.float32)
            kwargs = {name: read(value) for name, value in (kwargs or {}).items()}
            return func(*map(read, args), **kwargs)

    Cpu().__enter__()

    class Idle:
        """A stream, an event or a graph that does nothing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.cuda_stream = 0

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: None

        def elapsed_time(self, _: Any) -> float:
            return 1.0

        def query(self) -> bool:
            return True

    class Graph(Idle):
        """The calls of one capture."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Callable[[], Any]] = []

        def replay(self) -> None:
            for call in self.calls:
                call()

    @contextmanager
    def graph(target: Graph, *_: Any, **__: Any) -> Iterator[None]:
        captures.append(target.calls)
        yield
        captures.pop()

    def has_gpu() -> bool:
        return not sys._getframe(1).f_globals.get("__name__", "").startswith("weft.")

    def new_noop() -> Any:
        # One per name, because torch's compiler identifies functions by identity.
        return lambda *_, **__: None

    def around() -> Any:
        return lambda *_, **__: nullcontext()

    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(multi_processor_count=132, name="CPU", total_memory=1 << 34)
    # No program reads the index of "cuda:1", so every rank's current device may be 0.
    for name, stand_in in {
        **{name: new_noop() for name in IDLE},
        **dict.fromkeys(("Stream", "Event"), Idle),
        **{name: around() for name in ("stream", "device")},
        "CUDAGraph": Graph,
        "graph": graph,
        "is_available": has_gpu,
        "device_count": lambda: DEVICES,
        "current_device": lambda: 0,
        "current_stream": Idle,
        "clock_rate": lambda *_: 1000,
        "get_device_name": lambda *_: "CPU",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
    }.items():
        setattr(cuda, name, stand_in)
    set_default = torch.set_default_device
    torch.set_default_device = lambda device: set_default(read(device))
    init_process_group = dist.init_process_group

    def gloo(*args: Any, **kwargs: Any) -> None:
        if args:
            kwargs["backend"] = args[0]
        if kwargs.get("backend", "nccl") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        init_process_group(**{"timeout": timedelta(seconds=120), **kwargs})

    dist.init_process_group = gloo
    gather = dist.all_gather_into_tensor

    def all_gather_into_tensor(out: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return gather(out.view(-1, *x.shape[1:]), x, *args, **kwargs)  # gloo's shape

    dist.all_gather_into_tensor = all_gather_into_tensor
    pynvml: Any = types.ModuleType("pynvml")
    pynvml.nvmlInit = new_noop()
    sys.modules["pynvml"] = pynvml


if DEVICES:
    on_cpu()
