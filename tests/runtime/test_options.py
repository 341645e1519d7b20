# SPDX-License-Identifier: Apache-2.0
"""Constructors restate the parameters of the specs that they fill, with the same defaults."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest

import weft
from tests import patience
from weft.alltoall.config import AllToAllSpec
from weft.lowlatency.config import LowLatencySpec
from weft.moe.layer.config import LayerOptions
from weft.runtime.options import RunOptions

# Parameters that the constructor itself reads, and parameters of the specs that it does not have.
ALL_TO_ALL: set[str] = {"group", "split_phase"}
CASES: list[tuple[type, tuple[type, ...], set[str], set[str]]] = [
    (weft.AllToAll, (RunOptions, AllToAllSpec), ALL_TO_ALL, {"ranks"}),
    (weft.LowLatencyAllToAll, (RunOptions, LowLatencySpec), ALL_TO_ALL, {"ranks"}),
    (weft.MoE, (LayerOptions,), {"group", "config", "weights", "shared", "correction"}, set()),
    (
        weft.AllReduce,
        (RunOptions,),
        {"group", "max_tokens", "hidden", "dtype", "backends", "epilogue_at", "missing"},
        {"num_sms", "profile"},
    ),
]


@pytest.mark.parametrize(("kind", "specs", "own", "absent"), CASES)
def test_a_constructor_fills_its_specs(
    kind: type, specs: tuple[type[Any], ...], own: set[str], absent: set[str]
) -> None:
    parameters = inspect.signature(kind).parameters
    public = {p.name: p.default for p in parameters.values() if p.name[0] != "_"}
    expected = {
        f.name: inspect.Parameter.empty if f.default is MISSING else f.default
        for spec in specs
        for f in fields(spec)
        if f.name not in absent
    }
    expected |= {"timeout": patience.SECONDS, "first_timeout": patience.SECONDS}
    assert expected.keys() == public.keys() - own
    assert expected == {name: public[name] for name in expected}
