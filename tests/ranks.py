# SPDX-License-Identifier: Apache-2.0
"""`@on_ranks(3, "cpu")` runs a test's body on every rank of a launch."""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import pytest

import weft
from tests.emulator.operators import run_emulated

Test = Callable[..., Any]
CPU, THREADS = "cpu", "threads"
CUDA: Any = pytest.param("cuda", marks=pytest.mark.gpu)
EMULATED: Any = pytest.param("emulated", marks=pytest.mark.slow)
ANY = (THREADS, CUDA)


def run_ranks(count: int, device: str, body: Test, *args: Any, **options: Any) -> list[Any]:
    """Run `body(group, *args)` on all ranks and return their results.

    Devices: "cpu" (processes), "threads" (CPU ranks in this process), "cuda" (one process each;
    more ranks than GPUs share them), "emulated" (threads that run CUDA kernels, emulated).
    """
    options = {"timeout": 220.0 if device == "cuda" else 3000.0, **options}
    with pytest.MonkeyPatch.context() as patch:
        if device == "emulated":
            run_emulated(patch)
            device = "threads"
        return weft.launch(body, *args, ranks=count, device=device, **options)


def on_ranks(
    count: int | str, *devices: str, dies: Collection[int] | str = (), **options: Any
) -> Callable[[Test], Test]:
    """Run a test's body as `body(group, ...)` on each rank; the test fails if any rank raises.

    It is the innermost decorator of a test. Other arguments of the body are parameters and
    fixtures; those of processes must be picklable.

    Args:
        count: Number of ranks, or the name of the parameter that has it.
        *devices: Of `run_ranks`; they parametrise the test. By default "threads" and "cuda", or
            what the test itself gives a body with a parameter `device`.
        dies: Ranks whose processes end early, or the name of the parameter that has them. The test
            fails if any other rank does, or one of these does not.
        **options: Of `weft.launch`.
    """
    marked = {"cuda": CUDA, "emulated": EMULATED}
    kinds = [marked.get(device, device) for device in devices or ("threads", "cuda")]

    def decorate(body: Test) -> Test:
        parameters = list(inspect.signature(body).parameters.values())[1:]
        names = [parameter.name for parameter in parameters]

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            device = arguments["device"]
            size = arguments[count] if isinstance(count, str) else count
            dead = arguments[dies] if isinstance(dies, str) else dies
            dead = [dead] if isinstance(dead, int) else dead
            kwargs = {name: arguments[name] for name in names}
            run: Any = functools.partial(body, **kwargs)
            if device in ("cpu", "cuda"):  # processes find the body by its name
                run = functools.partial(_run_named, body.__module__, body.__name__, kwargs)
            run = functools.partial(_run, run)
            ended = run_ranks(size, device, run, tolerate_deaths=bool(dead), **options)
            assert [rank for rank, end in enumerate(ended) if end is None] == sorted(dead)

        if devices or "device" not in names:
            test = pytest.mark.parametrize("device", kinds)(test)
        if "device" not in names:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter("device", kind))
        vars(test).update(body=body, __signature__=inspect.Signature(parameters))
        return test

    return decorate


def _run_named(module: str, name: str, given: dict[str, Any], group: weft.Group) -> None:
    getattr(importlib.import_module(module), name).body(group, **given)


def _run(run: Callable[[weft.Group], object], group: weft.Group) -> str:
    run(group)
    return "ended"
