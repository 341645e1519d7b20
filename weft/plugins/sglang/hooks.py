"""What weft patches in SGLang, and the check that it is there before anything is patched."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from weft.errors import SetupError

SERVED = ("0.5.17",)  # versions whose sources every entry below was read in
Kind = Literal["AROUND", "REPLACE", "AFTER", "BEFORE"]  # names of SGLang's HookType


@dataclass(frozen=True, slots=True)
class Known:
    """A name of SGLang that weft calls or reads.

    target: the whole dotted path, down to a method.
    parameters: what `listed` makes of its signature; None where that is not relied on.
    names: attributes that the function's own code reads or sets, separated by spaces.
    """

    target: str
    parameters: str | None = None
    names: str = ""


@dataclass(frozen=True, slots=True)
class Hook:
    """A function or method of SGLang, and what weft hangs on it.

    kind: AROUND: function(original, *args, **kwargs) returns the result;
        REPLACE: function(*args, **kwargs) does; AFTER: function(result, *args, **kwargs) returns
        another result or None; BEFORE: function(*args, **kwargs) returns (args, kwargs) or None.
    """

    target: str
    kind: Kind
    function: Callable[..., Any]
    parameters: str


def listed(signature: inspect.Signature) -> str:
    """Parameters as the tables write them: names in order, `=` behind those with a default.

    `*` stands before keyword-only ones, as in Python: "self, x, *, scale=".
    """
    found: list[str] = []
    keyword_only = False
    for each in signature.parameters.values():
        stars = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            found.append("*")
        keyword_only = keyword_only or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        found.append(stars + each.name + ("" if each.default is each.empty else "="))
    return ", ".join(found)


def check(entries: Iterable[Hook | Known]) -> None:
    """Raise SetupError for a version that is not served, with every entry that is another there."""
    wrong = list(differences(entries))
    if not is_served(installed()):
        wrong.insert(0, "its version is another")
    if wrong:
        raise SetupError(
            f"SGLang {installed()} is not what weft's plug-in knows, so nothing of it was patched: "
            f"{'; '.join(wrong)}. Served: {', '.join(SERVED)}; install one of them, or a newer weft"
        )


def differences(entries: Iterable[Hook | Known]) -> Iterator[str]:
    """A line for each entry that the imported SGLang lacks, or whose signature is another."""
    for entry in entries:
        try:
            found = pkgutil.resolve_name(entry.target)
        except (ImportError, AttributeError, ValueError) as error:
            yield f"there is no {entry.target} ({error})"
            continue
        names = getattr(entry, "names", "")
        if names and (lost := set(names.split()) - set(inspect.unwrap(found).__code__.co_names)):
            yield f"{entry.target} has no {', '.join(sorted(lost))}"
        if entry.parameters is None:
            continue
        try:
            have = listed(inspect.signature(raw(found)))
        except (TypeError, ValueError) as error:
            yield f"{entry.target} is no function: {error}"
            continue
        if have != entry.parameters:
            yield f"{entry.target} takes ({have}), not ({entry.parameters})"


def is_served(release: str) -> bool:
    """Is it one of SERVED, or a build of one (0.5.17.post1, 0.5.17+cu130)?"""
    return any(re.fullmatch(re.escape(each) + r"([.+].*)?", release) for each in SERVED)


def raw(found: Any) -> Any:
    """The function itself, of a method that is bound to its class."""
    return getattr(found, "__func__", found)


def installed() -> str:
    """SGLang's version, as its metadata have it."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(of no known version)"


def install(hooks: Iterable[Hook]) -> None:
    """Hand the hooks to SGLang's registry, which applies them when all plug-ins have registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def check_applied(hooks: Iterable[Hook]) -> None:
    """SGLang logs a hook that it cannot apply, and goes on without: raise SetupError instead."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if missing:
        raise SetupError(
            f"SGLang did not apply weft's hooks on {', '.join(missing)}: its log says why, above"
        )
