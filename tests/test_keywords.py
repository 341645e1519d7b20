# SPDX-License-Identifier: Apache-2.0
"""Errors for misspelt keyword arguments suggest the right name."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest

import weft
from tests.test_public_arguments import MODULES, calls
from weft.errors import BadCall, InvalidArgument

CALLS = [
    pytest.param(name.partition(".")[0], call, id=name)
    for name, call in calls()
    if call.__module__.startswith("weft.")
    and name not in ("ExpertGroups.scatter", "ExpertGroups.send", "lease")
    and not (isinstance(call, type) and "__init__" not in vars(call))
]


@pytest.mark.parametrize(("kind", "call"), CALLS)
def test_every_misspelt_keyword_gets_a_suggestion(kind: str, call: Any) -> None:
    """The suggestion comes before any argument is checked."""
    parameters = inspect.signature(call).parameters
    names = [name for name in parameters if name[0] != "_" and name != "self"]
    required: dict[str, Any] = dict.fromkeys(
        name for name in names if parameters[name].default is inspect.Parameter.empty
    )
    owner = []
    if "self" in parameters:
        owner = [object.__new__(next(getattr(m, kind) for m in MODULES if kind in m.__all__))]
    draw = random.Random(call.__qualname__)
    for name in names:
        place = draw.randrange(len(name))
        wrong = name[:place] + name[place + 1 :] if len(name) > 3 else name + "s"
        if wrong in names or parameters[name].kind in (2, 4):
            continue
        with pytest.raises(BadCall) as caught:
            call(*owner, **required, **{wrong: 1})
        text = str(caught.value)
        assert f"has no argument {wrong}: did you mean" in text, text
        assert isinstance(caught.value, InvalidArgument | TypeError)


def test_the_intended_name_is_suggested() -> None:
    """The error has the class, the keyword, the nearest name and all names."""
    with pytest.raises(
        TypeError,
        match=r"AllReduce\(\) has no argument max_token: did you mean "
        r"'max_tokens'\? AllReduce\(\) accepts group, max_tokens, hidden, dtype",
    ):
        weft.AllReduce(None, max_token=8, hidden=256)  # type: ignore
    with pytest.raises(BadCall, match=r"AllReduce\(\): missing a required argument: 'hidden'"):
        weft.AllReduce(None, max_tokens=8)  # type: ignore
    with pytest.raises(BadCall, match=r"Group.from_torch\(\) has no argument timeou: did you"):
        weft.Group.from_torch(timeou=3)  # type: ignore


def test_a_lease_names_the_option_of_its_operator() -> None:
    """A lease takes the options of its operator."""

    def body(group: weft.Group) -> None:
        with pytest.raises(
            BadCall, match=r"AllReduce\(\) has no argument hiden: did you mean 'hid"
        ):
            weft.lease(group, weft.AllReduce, max_tokens=4, hiden=256)

    weft.launch(body, ranks=1, device="threads")


def test_a_type_error_from_within_is_not_touched() -> None:
    """Only errors about the arguments of the call itself are explained."""

    def broken(local: Any) -> Any:
        raise TypeError("of a caller's function")

    def body(group: weft.Group) -> None:
        config = weft.MoEConfig(hidden=128, intermediate=128, routing=weft.moe.Routing(4, 2))
        with pytest.raises(Exception, match="of a caller's function") as caught:
            weft.MoE(group, config, broken, max_tokens=4)
        assert not isinstance(caught.value, BadCall)

    weft.launch(body, ranks=1, device="threads")
