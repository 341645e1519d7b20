"""What weft patches in SGLang, and the check that it is there before anything is patched."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from weft.errors import SetupError

SERVED = ("0.5.17", "0.5.23")  # versions whose sources every entry below was read in
Kind = Literal["AROUND", "REPLACE", "AFTER", "BEFORE"]  # names of SGLang's HookType
# What `listed` makes of a signature; None where that is not relied on. A mapping has one for each
# version where weft relies on the name.
Parameters = str | Mapping[str, str | None] | None


@dataclass(frozen=True, slots=True)
class Known:
    """A name of SGLang that weft calls or reads.

    target: the whole dotted path, down to a method.
    names: attributes that the function's own code reads or sets, separated by spaces.
    """

    target: str
    parameters: Parameters = None
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
    parameters: Parameters


def listed(signature: inspect.Signature) -> str:
    """Parameters as the tables write them: names in order, `=` after those with a default.

    `*` is before keyword-only ones, as in Python: "self, x, *, scale=".
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
    entries, release = tuple(entries), served(installed())
    if release is not None:
        wrong = list(differences(entries, release))
    else:  # what sets it apart from the version that is most like it
        wrong = min((list(differences(entries, each)) for each in SERVED), key=len)
        wrong.insert(0, "its version is another")
    if wrong:
        raise SetupError(
            f"SGLang {installed()} is not what weft's plug-in knows, so nothing of it was patched: "
            f"{'; '.join(wrong)}. Served: {', '.join(SERVED)}; install one of them, or a newer "
            "weft"
        )


def relied_on(
    entries: Iterable[Hook | Known], release: str
) -> Iterator[tuple[Hook | Known, str | None]]:
    """The entries of one of SERVED, each with its parameters there."""
    for entry in entries:
        if not isinstance(entry.parameters, Mapping):
            yield entry, entry.parameters
        elif release in entry.parameters:
            yield entry, entry.parameters[release]


def differences(entries: Iterable[Hook | Known], release: str) -> Iterator[str]:
    """A line for each entry that the imported SGLang lacks, or whose signature is another.

    release: one of SERVED, whose signatures are expected.
    """
    for entry, parameters in relied_on(entries, release):
        try:
            found = pkgutil.resolve_name(entry.target)
        except (ImportError, AttributeError, ValueError) as error:
            yield f"there is no {entry.target} ({error})"
            continue
        names = getattr(entry, "names", "")
        if names and (lost := set(names.split()) - set(inspect.unwrap(found).__code__.co_names)):
            yield f"{entry.target} has no {', '.join(sorted(lost))}"
        if parameters is None:
            continue
        try:
            have = listed(inspect.signature(raw(found)))
        except (TypeError, ValueError) as error:
            yield f"{entry.target} is no function: {error}"
            continue
        if have != parameters:
            yield f"{entry.target} takes ({have}), not ({parameters})"


def served(release: str) -> str | None:
    """The one of SERVED that it is, or is a build of (0.5.17.post1, 0.5.17+cu130), or None."""
    for each in SERVED:
        if re.fullmatch(re.escape(each) + r"([.+].*)?", release):
            return each
    return None


def raw(found: Any) -> Any:
    """The function itself, of a method that is bound to its class."""
    return getattr(found, "__func__", found)


def installed() -> str:
    """SGLang's version, as its metadata have it."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(of no known version)"


def there(hooks: Iterable[Hook]) -> list[Hook]:
    """Those for the installed SGLang; all of them where its version is not one of SERVED."""
    release = served(installed())
    if release is None:
        return list(hooks)
    return [hook for hook, _ in relied_on(hooks, release) if isinstance(hook, Hook)]


def install(hooks: Iterable[Hook]) -> None:
    """Hand the hooks to SGLang's registry, which applies them when all plug-ins have registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in there(hooks):
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def check_applied(hooks: Iterable[Hook]) -> None:
    """SGLang logs a hook that it cannot apply, and goes on without: raise SetupError instead."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [hook.target for hook in there(hooks) if hook.target not in HookRegistry._patched]
    if missing:
        raise SetupError(
            f"SGLang did not apply weft's hooks on {', '.join(missing)}: its log says why, above"
        )


def resolved(server_args: Any) -> Any:
    """The flags as SGLang resolved them; 0.5.23 leaves server_args as the user wrote them."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)
