# SPDX-License-Identifier: Apache-2.0
"""Invalid values by kind of argument, and checks that public calls refuse all of them.

A refusal is a UsageError that names the parameter and shows the value or its type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from weft import Payload
from weft.arguments import format_value
from weft.errors import UsageError

NAN, INF = float("nan"), float("inf")


class Stranger:
    def __repr__(self) -> str:
        return "<stranger>"


@dataclass(frozen=True)
class Kind:
    """Invalid values of a kind of argument. `none`: None is valid."""

    values: Callable[[Any], list[Any]]
    none: bool = False

    def hostile(self, good: Any) -> Iterator[Any]:
        """Yield the values that must be refused where `good` is valid."""
        if not self.none:
            yield None
        yield from self.values(good)

    def optional(self) -> Kind:
        return Kind(self.values, none=True)


def kind_of_values(*values: Any) -> Kind:
    return Kind(lambda _: list(values))


WHOLE = (True, 1.5, NAN, "8", b"8", [8], torch.tensor(8), Stranger(), 10**30, 10**5000, -(10**30))
COUNT = kind_of_values(*WHOLE, 0, -1)  # from 1
AMOUNT = kind_of_values(*WHOLE, -1)  # from 0
FLAG = kind_of_values("no", "", 0, 1, 1.0, [], np.bool_(True), torch.tensor(True), Stranger())
WORD = kind_of_values(
    "nope", b"fp8", 3, True, 0.5, ["push"], torch.zeros(2), np.zeros(2), Stranger()
)
SECONDS = kind_of_values(
    NAN, INF, -INF, -1.0, 0, "2", True, [1.0], 1e30, 10**400, torch.tensor(1.0)
)
REAL = kind_of_values(NAN, INF, "1", True, [1.0], 1j, 10**400, torch.tensor(1.0), Stranger())
POSITIVE = kind_of_values(NAN, INF, "1", True, [1.0], 1j, 0.0, -1.0, torch.tensor(1.0), Stranger())
DTYPE = kind_of_values(
    "bfloat16", 7, True, torch.complex64, torch.quint8, torch.int8, np.float32, []
)
ANY_DTYPE = kind_of_values("bfloat16", 7, True, np.float32, [])
THING = kind_of_values("x", 7, True, [], torch.zeros(2), Stranger())  # an instance of some class
CALLED = kind_of_values("x", 7, True, [], torch.zeros(2))  # a function
TEXT = kind_of_values(7, True, [], b"x", Stranger())
FREE = Kind(lambda _: [], none=True)  # whatever it is, it is not used or not refused


def wrong_tensors(good: torch.Tensor) -> list[Any]:
    flat = good.reshape(-1)
    host = flat.float() if good.dtype == torch.bfloat16 or good.is_floating_point() else flat
    shifted = good.unsqueeze(0)
    wrong: list[Any] = [
        host.tolist(),
        tuple(host.tolist()),
        host.numpy(),
        host[0].item(),
        "a",
        True,
        Stranger(),
        host[0].clone(),
        shifted.unsqueeze(0),
        torch.zeros(good.shape, dtype=torch.complex64),
        torch.quantize_per_tensor(torch.zeros(good.shape), 1.0, 0, torch.quint8),
        torch.zeros(good.shape, dtype=torch.float64),
        good.to("meta"),
        torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]),
    ]
    strided = torch.zeros((*good.shape, 2)).to(good.dtype)[..., 0]
    if not strided.is_contiguous():
        wrong.append(strided)  # of the right shape, in steps of two
    if good.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64):
        wrong.append(good.to_sparse())
        if good.dim() == 2:
            wrong.append(good.to_sparse_csr())
    if good.dtype in (torch.float32, torch.bfloat16):
        wrong.append(good.clone().requires_grad_())
        wrong.append(good.to_mkldnn())
    freed = good.clone()
    freed.untyped_storage().resize_(0)  # as FSDP leaves a tensor
    wrong.append(freed)
    return wrong


TENSOR = Kind(wrong_tensors)


@dataclass(frozen=True)
class Row:
    """One public call with valid arguments, and the kind of each argument.

    call: what is called with keywords.   good: right arguments.   kinds: of every public parameter.
    names: how errors name a parameter, where that is another word.
    """

    call: Callable[..., Any]
    good: Mapping[str, Any]
    kinds: Mapping[str, Kind]
    names: Mapping[str, str] = field(default_factory=dict)


def public_parameters(call: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(call).parameters
    return [name for name in parameters if name != "self" and not name.startswith("_")]


def assert_complete(row: Row) -> None:
    assert sorted(row.kinds) == sorted(public_parameters(row.call)), row.call


def elements_of(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [value, *(leaf for each in value for leaf in elements_of(each))]
    if isinstance(value, Payload):
        return [value, *elements_of(value.shape), value.dtype]
    if type(value).__module__.startswith("tests."):
        return [value, *vars(value).values()]
    return [value]


def shows_value(text: str, value: Any) -> bool:
    words = []
    for leaf in elements_of(value):
        words.append(type(leaf).__name__)
        if isinstance(leaf, torch.Tensor):
            words += [str(leaf.dtype), str(leaf.layout), "gradient", "nested", "address"]
            words += [] if leaf.is_nested else [str(list(leaf.shape))]
            words += ["meta"] if leaf.is_meta else []
        elif isinstance(leaf, np.ndarray):
            words.append(str(leaf.dtype))
        elif isinstance(leaf, list | tuple):
            words += [f"{len(leaf)} ", repr(leaf)[:6]]
        elif not isinstance(leaf, int) or abs(leaf) < 10**4000:
            words.append(repr(leaf)[:6])
    return any(word in text for word in words)


def assert_refusals(row: Row) -> int:
    """Pass every hostile value to every argument and return the number of refusals."""
    count = 0
    for name, kind in row.kinds.items():
        word = row.names.get(name, name)
        for value in kind.hostile(row.good.get(name)):
            text, where = refusal_text(row, {name: value})
            assert word in text, f"{where} does not name it: {text}"
            assert shows_value(text, value), f"{where} does not show it: {text}"
            count += 1
    return count


def refusal_text(row: Row, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of the UsageError that a call raises for `values`, and the call as text."""
    shows_values = ", ".join(f"{name}={format_value(value)}" for name, value in values.items())
    where = f"{row.call.__qualname__}({shows_values})"
    try:
        row.call(**{**row.good, **values})
    except UsageError as error:
        return str(error), where
    except Exception as error:
        pytest.fail(f"{where} raised {type(error).__name__}: {error}")
    pytest.fail(f"{where} was taken")
