# SPDX-License-Identifier: Apache-2.0
"""Build the API pages of the documentation site from docstrings, without importing weft.

mkdocs loads this file as a hook (`mkdocs.yml`) and griffe loads it as an extension. Both read the
sources only, so `make docs` needs neither torch nor Triton.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Chapter of the reference -> module, the file that lists its public names, and whether every class
# gets its own page. Functions of a chapter share one page.
CHAPTERS = {
    "Operators and groups": ("weft", "weft/public.py", True),
    "MoE layers": ("weft.moe", "weft/moe/__init__.py", True),
    "Grouped GEMM": ("weft.gemm", "weft/gemm/__init__.py", True),
    "Errors": ("weft.errors", "weft/errors.py", False),
    "Reference results": ("weft.reference", "weft/reference.py", False),
}
# Modules with one page each.
PAGES = {
    "FlashInfer": "weft.compat.flashinfer",
    "DeepEP": "weft.compat.deep_ep",
    "Triton-distributed": "weft.compat.triton_dist",
    "SGLang plug-in": "weft.plugins.sglang",
    "vLLM plug-in": "weft.plugins.vllm",
    "transformers plug-in": "weft.plugins.transformers",
}
# Names with a page elsewhere: modules of `weft`, and classes that `weft` also exports.
ELSEWHERE = {"weft.errors", "weft.reference", "weft.moe.MoE", "weft.moe.MoEConfig"}
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)]*)\)")


def public_names(file: str) -> list[str]:
    """Return the names that a module lists in `__all__`, or its public classes and functions."""
    body = ast.parse((ROOT / file).read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    kinds = ast.ClassDef | ast.FunctionDef
    return [node.name for node in body if isinstance(node, kinds) and node.name[0] != "_"]


def _source(module: str) -> str:
    path = module.replace(".", "/")
    package = f"{path}/__init__.py"
    return package if (ROOT / package).exists() else f"{path}.py"


def reference_pages() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield chapter, title, file name and object paths of every page of the reference."""
    for chapter, (module, file, split) in CHAPTERS.items():
        paths = [f"{module}.{name}" for name in public_names(file)]
        paths = [path for path in paths if path not in ELSEWHERE]
        classes = [path for path in paths if path.rsplit(".", 1)[1][0].isupper()]
        constants = [path for path in classes if path.rsplit(".", 1)[1].isupper()]
        stem = module.replace(".", "-")
        if not split:
            yield chapter, chapter, f"api/{stem}.md", paths
            continue
        for path in sorted(set(classes) - set(constants)):
            yield chapter, path.rsplit(".", 1)[1], f"api/{path.replace('.', '-')}.md", [path]
        rest = [path for path in paths if path not in classes] + constants
        yield chapter, "Functions and constants", f"api/{stem}-functions.md", rest
    for title, module in PAGES.items():
        names = [f"{module}.{name}" for name in public_names(_source(module))]
        yield "Other libraries and engines", title, f"api/{module.replace('.', '-')}.md", names


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the reference to the navigation."""
    chapters: dict[str, list[dict[str, str]]] = {}
    for chapter, title, file, _ in reference_pages():
        chapters.setdefault(chapter, []).append({title: file})
    nav = [pages[0] if len(pages) == 1 else {chapter: pages} for chapter, pages in chapters.items()]
    assert config.nav is not None
    config.nav.append({"API": nav})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    for _, title, file, paths in reference_pages():
        bases = "\n    options: {show_bases: true}" if title == "Errors" else ""
        text = "\n\n".join([f"# {title}", *(f"::: {path}{bases}" for path in paths)])
        if len(paths) == 1:
            text = f"::: {paths[0]}\n    options: {{heading_level: 1}}"
        files.append(File.generated(config, file, content=text + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace a link that leaves docs/ by its text, because the site has no page for it."""
    depth = page.file.src_uri.count("/")

    def text_of(link: re.Match[str]) -> str:
        return link[1] if link[2].count("../") > depth else link[0]

    return OUTSIDE.sub(text_of, markdown)


class PublicSignatures(griffe.Extension):
    """Complete what docstrings alone cannot show.

    Private parameters and methods marked `internal` are hidden, methods without a docstring get
    that of their base class, and `memory_bytes = staticmethod(...)` is shown as a function.
    """

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Hide parameters that only weft passes."""
        for parameter in [each.name for each in func.parameters]:
            if parameter.startswith("_"):
                del func.parameters[parameter]

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit every class once all modules are loaded."""
        for cls in _classes(pkg):
            for name, member in list(cls.members.items()):
                if isinstance(member, griffe.Function) and any(
                    str(decorator.value) == "internal" for decorator in member.decorators
                ):
                    cls.del_member(name)
        for cls in _classes(pkg):
            for name, member in list(cls.members.items()):
                if member.is_alias:
                    continue
                if member.is_function and not member.has_docstring and name[0] != "_":
                    bases = (base.members.get(name) for base in cls.mro())
                    documented = [base for base in bases if base is not None and base.has_docstring]
                    member.docstring = documented[0].docstring if documented else None
                elif name == "memory_bytes" and isinstance(member, griffe.Attribute):
                    cls.set_member(name, _sizes_function(cls, name))
            # Inherited members follow a class's own, whatever their line in another file.
            for number, (name, member) in enumerate(cls.inherited_members.items()):
                inherited = copy.copy(member.final_target)
                inherited.lineno, inherited.parent = 10**6 + number, cls
                cls.set_member(name, inherited)


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Module):
            yield from _classes(member)
        elif isinstance(member, griffe.Class):
            yield member


def _sizes_function(cls: griffe.Class, name: str) -> griffe.Function:
    """Return `name = build_size_function(make, ...)` with the parameters of `make`."""
    source: Any = cls.module.members[name]
    source = source.final_target if source.is_alias else source
    call: Any = ast.parse(str(source.value), mode="eval").body
    make: Any = source.module
    for part in ast.unparse(call.args[0]).split("."):
        make = make.members[part]
        make = make.final_target if make.is_alias else make
    helper: Any = source.module.members[call.func.id]
    texts = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
    text = inspect.cleandoc(texts[0]) if texts else _text_of(helper.final_target)
    shown = [p for p in make.parameters if p.name not in ("self", "cls") and p.name[0] != "_"]
    function = griffe.Function(name, parameters=griffe.Parameters(*shown), returns="int")
    function.parent = cls
    function.docstring = griffe.Docstring(text, parent=function, parser="google")
    function.labels.add("staticmethod")
    return function


def _text_of(helper: griffe.Function) -> str:
    """Return the text of a helper's `doc = ...`, the docstring of the functions that it makes."""
    for node in ast.walk(ast.parse(textwrap.dedent(helper.source))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "doc":
            return inspect.cleandoc(str(ast.literal_eval(node.value)))
    raise ValueError(f"{helper.path} assigns no doc")
