"""Machine code as what it does to memory that others see."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

_KERNEL = re.compile(r'^\s*\.section\s+\.text\."?(?:weft_[a-z]+_)?([\w$]+)', re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^\n]*;")
_ACCESS = re.compile(r"(LD|ST|ATOM|RED)G?\.(.*)")


def numbers_of(elf: bytes, symbol: bytes) -> tuple[int, ...]:
    """The 64-bit numbers of an initialised array in an ELF file."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    # Of each section: type, offset, bytes, and for a symbol table which section holds its names.
    heads = [struct.unpack_from("<4xI16xQQI", elf, start + size * i) for i in range(count)]
    _, table, length, names = next(h for h in heads if h[0] == 2)
    for entry in range(table, table + length, 24):
        name, section, value, extent = struct.unpack_from("<I2xHQQ", elf, entry)
        if elf[heads[names][1] + name :].startswith(symbol + b"\0"):
            return struct.unpack_from(f"<{extent // 8}Q", elf, heads[section][1] + value)
    raise AssertionError(f"no symbol {symbol!r}")


def disassemble(cubin: bytes) -> str:
    """A cubin's instructions, as nvdisasm writes them; it comes with triton, or a toolkit."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        assert shutil.which("nvdisasm"), "neither triton nor a toolkit has nvdisasm"
        tool = Path("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def strong_accesses(cubin: bytes) -> dict[str, list[str]]:
    """What each kernel does, in the order of its code: "ST.64.SYS" and the like, and "fence.SYS".

    A release is a fence before its store, an acquire a load before it drops its cache ("drop").
    Weak accesses are left out.
    """
    code = disassemble(cubin)
    parts = _KERNEL.split(code)[1:]
    return {name: list(_strong(text)) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _strong(text: str) -> Iterator[str]:
    for name in _INSTRUCTION.findall(text):
        if name.startswith("MEMBAR."):
            yield f"fence.{name.rsplit('.', 1)[1]}"
        elif name == "CCTL.IVALL":
            yield "drop"
        elif (match := _ACCESS.fullmatch(name)) and "STRONG" in name:
            words = match[2].split(".")
            scope = words[words.index("STRONG") + 1]
            kind = [w for w in words if w in ("ADD", "CAS", "MAX", "EXCH")] or [match[1]]
            bits = next((w for w in words if w in ("64", "128")), "32")
            yield f"{'ATOM.' * (match[1] in ('ATOM', 'RED'))}{kind[0]}.{bits}.{scope}"


def verbs(code: Iterable[str]) -> Counter[str]:
    """How often a kernel does each, by order, width and scope, as "release ST.64.SYS"."""
    found: Counter[str] = Counter()
    words, fence = [*code, ""], ""
    for word, after in zip(words, words[1:], strict=False):
        if word.startswith("fence."):
            fence = word.partition(".")[2]
        elif word and word != "drop":
            releases = fence == word.rpartition(".")[2] and not word.startswith("LD.")
            acquires = after == "drop" and not word.startswith("ST.")
            order = {(1, 0): "release", (0, 1): "acquire", (1, 1): "acq_rel"}
            found[f"{order.get((releases, acquires), 'relaxed')} {word}"] += 1
            fence = ""
    return found
