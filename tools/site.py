"""The documentation site: pages of the API from docstrings, and two rewrites (mkdocs.yml).

As an mkdocs hook it adds a page for each entry of API and unlinks what is outside docs/. As a
griffe extension it makes lists of the parameters in docstrings, `name: what it is` a line.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# Page: its title, and the modules whose public names it has.
API = {
    "operators": ("Operators and groups", ("weft.public",)),
    "moe": ("MoE layers", ("weft.moe",)),
    "gemm": ("Grouped GEMM", ("weft.gemm",)),
    "errors": ("Errors", ("weft.errors",)),
    "reference": ("Reference results", ("weft.reference",)),
    "compat": (
        "Other projects' names",
        ("weft.compat.flashinfer", "weft.compat.deep_ep", "weft.compat.triton_dist"),
    ),
    "plugins": (
        "Plug-ins",
        ("weft.plugins.sglang", "weft.plugins.transformers", "weft.plugins.vllm"),
    ),
}
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)")
PARAMETER = re.compile(r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): (.*)")
NEXT_PARAMETER = re.compile(r" {3,}(?=[a-z_]\w*(?:, [a-z_]\w*)*: )")


def public_names(module: str) -> list[str]:
    """What a module offers: its __all__, or every public class and function that it defines."""
    loaded = importlib.import_module(module)
    named = getattr(loaded, "__all__", None)
    if named is not None:
        return [name for name in named if not _is_module(getattr(loaded, name))]
    return [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]


def page(modules: tuple[str, ...], title: str) -> str:
    """The Markdown of one page of the API."""
    lines = [f"# {title}", ""]
    for module in modules:
        if len(modules) > 1:
            lines += [f"## `{module}`", ""]
        lines += [f"::: {_path(module, name)}\n" for name in public_names(module)]
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the API."""
    for name, (title, modules) in API.items():
        files.append(File.generated(config, f"api/{name}.md", content=page(modules, title)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link to a file of the repository that is no page becomes its text."""
    return OUTSIDE.sub(r"\1", markdown)


class ParameterLists(griffe.Extension):
    """Paragraphs of `name: what it is`, one or more a line, become lists; private ones go."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring, and one signature."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
        if isinstance(obj, griffe.Function):
            for parameter in [p.name for p in obj.parameters]:
                if parameter.startswith("_"):
                    del obj.parameters[parameter]


def with_lists(text: str) -> str:
    """The docstring in Markdown."""
    return "\n\n".join(_list_of(each) for each in text.split("\n\n"))


def _list_of(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not lines or not PARAMETER.fullmatch(lines[0]):
        return paragraph
    items: list[str] = []
    for line in lines:
        for place, part in enumerate(NEXT_PARAMETER.split(line.strip())):
            found = PARAMETER.fullmatch(part) if place or not line.startswith(" ") else None
            if found:
                names = ", ".join(f"`{name}`" for name in found[1].split(", "))
                items.append(f"- {names}: {found[2]}")
            else:
                items[-1] += f" {part.strip()}"
    return "\n".join(items)


def _path(module: str, name: str) -> str:
    """Where it is defined, for a function, since a module may have the same name."""
    value = getattr(importlib.import_module(module), name)
    return f"{value.__module__}.{name}" if inspect.isfunction(value) else f"{module}.{name}"


def _is_module(value: object) -> bool:
    return type(value).__name__ == "module"
