"""The API reference: HTML pages made from docstrings by pdoc, without a network.

Usage: api_reference.py folder    writes `folder/weft.html` and the pages beside it; returns 1, and
prints what is wrong, if pdoc warned of anything or a public name is on no page
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pdoc
import pdoc.render

# pdoc adds weft.errors and weft.reference by itself, because weft.__all__ names them. A module
# without __all__ shows what its file defines.
MODULES = (
    *("weft", "weft.moe", "weft.gemm"),
    *("weft.compat.flashinfer", "weft.compat.deep_ep", "weft.compat.triton_dist"),
    "weft.plugins.sglang",
    "weft.plugins.transformers",
)


def build(folder: Path, modules: Iterable[str] = MODULES) -> list[str]:
    """Write the pages below `folder` and return what is wrong with them."""
    names = list(modules)
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pdoc.pdoc(*names, output_directory=folder)
    return [*(str(each.message) for each in found), *_missing(folder, names)]


def _public(module: str) -> dict[str, object]:
    loaded = importlib.import_module(module)
    return {name: getattr(loaded, name) for name in getattr(loaded, "__all__", ())}


def _missing(folder: Path, modules: Iterable[str]) -> Iterator[str]:
    """Public names without a section, and public modules without a page."""
    for module in modules:
        page = _page(folder, module)
        sections = set(re.findall(r'<section id="([^"]+)">', page.read_text()))
        for name, value in _public(module).items():
            if isinstance(value, ModuleType):
                if not _page(folder, value.__name__).is_file():
                    yield f"{module}.{name}: {value.__name__} has no page"
            elif name not in sections:
                yield f"{module}.{name} is not on {page.name}"


def _page(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".html")


if __name__ == "__main__":
    wrong = build(Path(sys.argv[1]))
    print("\n".join(wrong) if wrong else f"API reference: {_page(Path(sys.argv[1]), 'weft')}")
    sys.exit(1 if wrong else 0)
