# SPDX-License-Identifier: Apache-2.0
"""Machine code, reduced to its accesses to memory that others see."""

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
FRAME_SIZE = 0x11  # attribute of a kernel in .nv.info: bytes of local memory, where spills go
_ACCESS = re.compile(r"(LD|ST|ATOM|RED)G?\.(.*)")
_VECTOR = re.compile(r"\b(?:LD|ST)[GS]?\.\S*?(64|128)\b[^\n\[]*\[[^\]\n]*\+-?(0x[0-9a-f]+)\]")


def numbers_of(elf: bytes, symbol: bytes) -> tuple[int, ...]:
    """Return the 64-bit numbers of an initialised array in an ELF file."""
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


def frames(cubin: bytes) -> dict[str, int]:
    """Return the bytes of local memory of each kernel in a cubin, by entry."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQII", cubin, start + size * i) for i in range(count)]
    names = heads[names_at][4]
    by_name = {_text(cubin, names + head[0]): head for head in heads}
    symbols = next(head for head in heads if head[1] == 2)
    strings = heads[symbols[6]][4]
    at, result = by_name[".nv.info"][4], {}
    end = at + by_name[".nv.info"][5]
    while at < end:
        kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if kind == 4 and attribute == FRAME_SIZE:
            symbol, value = struct.unpack_from("<II", cubin, at + 4)
            (name,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
            result[re.sub(r"^weft_[a-z]+_", "", _text(cubin, strings + name))] = value
        at += 4 + (length if kind == 4 else 0)
    return result


def _text(raw: bytes, at: int) -> str:
    return raw[at : raw.index(b"\0", at)].decode()


def disassemble(cubin: bytes) -> str:
    """Return a cubin's instructions from nvdisasm, which comes with triton or a toolkit.

    Asserts that vectors lie on boundaries of their size, as far as the code tells it: their
    constant offsets. The emulator takes vectors anywhere, a GPU refuses them.
    """
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        assert shutil.which("nvdisasm"), "neither triton nor a toolkit has nvdisasm"
        tool = Path("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    crooked = [m[0] for m in _VECTOR.finditer(code) if int(m[2], 16) % (int(m[1]) // 8)]
    assert not crooked, crooked[:4]
    return code


def strong_accesses(cubin: bytes) -> dict[str, list[str]]:
    """Return each kernel's accesses in code order: "ST.64.SYS" and so on, and "fence.SYS".

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
    """Count a kernel's accesses by order, width and scope, such as "release ST.64.SYS"."""
    result: Counter[str] = Counter()
    words, fence = [*code, ""], ""
    for word, after in zip(words, words[1:], strict=False):
        if word.startswith("fence."):
            fence = word.partition(".")[2]
        elif word and word != "drop":
            releases = fence == word.rpartition(".")[2] and not word.startswith("LD.")
            acquires = after == "drop" and not word.startswith("ST.")
            order = {(1, 0): "release", (0, 1): "acquire", (1, 1): "acq_rel"}
            result[f"{order.get((releases, acquires), 'relaxed')} {word}"] += 1
            fence = ""
    return result
