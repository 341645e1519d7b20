# SPDX-License-Identifier: Apache-2.0
"""`@on_ranks(3, "cpu")` runs a test's body on every rank of a launch."""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import pytest

import weft

Test = Callable[..., Any]


def on_ranks(
    count: int | str, *devices: str, dies: Collection[int] | str = (), **options: Any
) -> Callable[[Test], Test]:
    """Run a test's body as `body(group, ...)` on each rank; the test fails if any rank raises.

    It is the innermost decorator of a test. Other arguments of the body are parameters and
    fixtures; those of processes must be picklable.

    Args:
        count: Number of ranks, or the name of the parameter that has it.
        *devices: As of `weft.launch`, "cuda" for GPU runs only. Several parametrise the test.
        dies: Ranks whose processes end early, or the name of the parameter that has them. The test
            fails if any other rank does, or one of these does not.
        **options: Of `weft.launch`.
    """

    def decorate(body: Test) -> Test:
        parameters = list(inspect.signature(body).parameters.values())[1:]
        names = [parameter.name for parameter in parameters]

        def test(**arguments: Any) -> None:
            device = arguments.get("device", devices[0])
            size = arguments[count] if isinstance(count, str) else count
            dead = arguments[dies] if isinstance(dies, str) else dies
            dead = [dead] if isinstance(dead, int) else dead
            limits = {"timeout": 220.0 if device == "cuda" else 3000.0, **options}
            kwargs = {name: arguments[name] for name in names}
            run: Any = functools.partial(body, **kwargs)
            if device != "threads":  # processes find the body by its name
                run = functools.partial(_run_named, body.__module__, body.__name__, kwargs)
            ended = weft.launch(
                functools.partial(_run, run),
                ranks=size, device=device, tolerate_deaths=bool(dead), **limits,
            )  # fmt: skip
            assert [rank for rank, end in enumerate(ended) if end is None] == sorted(dead)

        functools.update_wrapper(test, body)
        if len(devices) > 1:
            marked = [pytest.param(d, marks=pytest.mark.gpu) if d == "cuda" else d for d in devices]
            test = pytest.mark.parametrize("device", marked)(test)
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
