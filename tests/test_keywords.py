# SPDX-License-Identifier: Apache-2.0
"""Misspelt keyword arguments are answered with the name that was meant."""

from __future__ import annotations

import inspect
import random
from types import ModuleType
from typing import Any

import pytest

import weft
import weft.compat.deep_ep
import weft.compat.flashinfer
import weft.compat.triton_dist
import weft.gemm
import weft.moe
from weft.errors import BadCall, InvalidArgument
from weft.keywords import PER_PASS

MODULES: tuple[ModuleType, ...] = (
    *(weft, weft.moe, weft.gemm),
    *(weft.compat.flashinfer, weft.compat.deep_ep, weft.compat.triton_dist),
)
CALLS = [
    pytest.param(value, id=f"{module.__name__}.{name}")
    for module in MODULES
    for name in module.__all__
    if callable(value := getattr(module, name))
    and name not in PER_PASS
    and value.__module__.startswith("weft.")
    and not (isinstance(value, type) and "__init__" not in vars(value))
]


@pytest.mark.parametrize("call", CALLS)
def test_every_misspelt_keyword_is_answered(call: Any) -> None:
    """With the name that was meant; no argument is looked at before."""
    names = [name for name in inspect.signature(call).parameters if name[0] != "_"]
    draw = random.Random(call.__name__)
    for name in names:
        place = draw.randrange(len(name))
        wrong = name[:place] + name[place + 1 :] if len(name) > 3 else name + "s"
        if wrong in names or inspect.signature(call).parameters[name].kind in (2, 4):
            continue
        with pytest.raises(BadCall) as caught:
            call(**{wrong: 1})
        text = str(caught.value)
        assert f"has no argument {wrong}: did you mean" in text, text
        assert isinstance(caught.value, InvalidArgument | TypeError)


def test_what_is_meant_is_named() -> None:
    """The class, the keyword, the nearest name and all names; a missing one likewise."""
    with pytest.raises(
        TypeError,
        match=r"AllReduce\(\) has no argument max_token: did you mean "
        r"'max_tokens'\? AllReduce\(\) takes group, max_tokens, hidden, dtype",
    ):
        weft.AllReduce(None, max_token=8, hidden=256)  # type: ignore
    with pytest.raises(BadCall, match=r"AllReduce\(\): missing a required argument: 'hidden'"):
        weft.AllReduce(None, max_tokens=8)  # type: ignore
    with pytest.raises(BadCall, match=r"Group.from_torch\(\) has no argument timeou: did you"):
        weft.Group.from_torch(timeou=3)  # type: ignore


def test_a_type_error_from_within_is_not_touched() -> None:
    """Only the arguments of the call itself are explained."""

    def broken(local: Any) -> Any:
        raise TypeError("of a caller's function")

    def body(group: weft.Group) -> None:
        config = weft.MoEConfig(hidden=128, intermediate=128, routing=weft.moe.Routing(4, 2))
        with pytest.raises(Exception, match="of a caller's function") as caught:
            weft.MoE(group, config, broken, max_tokens=4)
        assert not isinstance(caught.value, BadCall)

    weft.launch(body, ranks=1, device="threads")
