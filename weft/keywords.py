# SPDX-License-Identifier: Apache-2.0
"""Say which argument a misspelt keyword meant, in constructors and public functions.

`explain_keywords` runs once for each public module. It leaves out what runs in every forward pass
(`PER_PASS`): one more Python frame takes a microsecond there, and Python itself suggests a name
from version 3.13 on. Elsewhere the signature is looked at only when Python refuses the arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, MutableMapping
from types import FunctionType
from typing import Any, NoReturn

from weft.arguments import suggestion
from weft.errors import BadCall

PER_PASS = {
    *("__call__", "forward", "fused", "gather", "scatter", "stream", "output", "check"),
    *("dispatch", "dispatch_send", "dispatch_recv", "combine", "combine_send", "combine_recv"),
    *("low_latency_dispatch", "low_latency_combine", "internode_dispatch", "internode_combine"),
    *("get_dispatch_layout", "get_combine_payload_tensor_in_workspace", "allreduce_fusion"),
    *("route", "router_logits", "weigh", "normalize_topk", "global_ids", "send", "sent"),
    *("grouped_gemm", "quantize_rows", "get_next_low_latency_combine_buffer"),
}
_MARK = "_weft_explained"


def explain_keywords(names: MutableMapping[str, Any]) -> None:
    """Let public functions and classes raise BadCall for arguments that they do not take.

    Args:
        names: Globals of a module with `__all__`. Its functions are replaced there, so that calls
            within weft stay bare. Constructors and methods are replaced in their classes.
    """
    for name in names["__all__"]:
        value = names[name]
        if isinstance(value, FunctionType) and _is_own(value) and name not in PER_PASS:
            names[name] = _explained(value, name)
        elif isinstance(value, type) and _is_own(value) and not issubclass(value, BaseException):
            _explain_class(value)


def _explain_class(kind: type[Any]) -> None:
    for name, value in list(vars(kind).items()):
        if name in PER_PASS or (name.startswith("_") and name != "__init__"):
            continue
        shown = kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"
        if isinstance(value, FunctionType):
            setattr(kind, name, _explained(value, shown))
        elif isinstance(value, classmethod | staticmethod):
            inner = value.__func__
            if isinstance(inner, FunctionType):
                setattr(kind, name, type(value)(_explained(inner, shown)))


def _explained(function: Callable[..., Any], shown: str) -> Callable[..., Any]:
    if hasattr(function, _MARK):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if isinstance(error, BadCall):
                raise
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as mistake:
                _refuse(signature, shown, kwargs, mistake)
            raise  # from within the function

    setattr(call, _MARK, True)
    return call


def _refuse(
    signature: inspect.Signature, shown: str, kwargs: dict[str, Any], mistake: TypeError
) -> NoReturn:
    parameters = signature.parameters
    known = [
        name
        for name, each in parameters.items()
        if each.kind is not each.POSITIONAL_ONLY and name not in ("self", "cls") and name[0] != "_"
    ]
    takes = f"{shown}() takes {', '.join(known)}"
    unknown = [name for name in kwargs if name not in parameters]
    if not unknown:
        raise BadCall(f"{shown}(): {mistake}. {takes}") from None
    meant = ", ".join(name + suggestion(name, known).replace("; did", ": did") for name in unknown)
    raise BadCall(
        f"{shown}() has no argument {meant}{'' if meant[-1] == '?' else '.'} {takes}"
    ) from None


def _is_own(value: Any) -> bool:
    return str(value.__module__).split(".")[0] == "weft"
