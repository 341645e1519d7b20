# SPDX-License-Identifier: Apache-2.0
"""Keep one architecture's GPU code in shared objects: trim_kernels.py [--zero] ARCH LIB.so...

A fat binary is a header and entries, each PTX or a cubin of one architecture. Entries of other
architectures are removed in place, and the rest is filled with zeros, so that no address changes
and a compressed archive is small. A fat binary without a cubin of ARCH keeps its newest PTX for
ARCH or older, which the driver compiles (Marlin's kernels). Without PTX it keeps its first entry,
with zeros for its code; its header lets the driver report that there is no image for the device.

With --zero, all entries stay, and only the code of other architectures is filled with zeros. NCCL's
library needs that: some of its fat binaries are linked again at run time, by their offsets.
"""

import re
import struct
import subprocess
import sys
from pathlib import Path

MAGIC = 0xBA55ED50
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of what follows
CUBIN, ARCH_AT = 2, 28  # kind of a cubin; offset of the architecture in an entry


def section(library: Path) -> tuple[int, int]:
    """Return offset and size of a file's fat binaries, or zeros."""
    command = ["readelf", "-S", "-W", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"\.nv_fatbin\s+PROGBITS\s+\w+\s+(\w+)\s+(\w+)", listing)
    return (int(match[1], 16), int(match[2], 16)) if match else (0, 0)


def trim(data: memoryview, arch: int) -> tuple[int, int]:
    """Trim every container in a section; return their number, and how many have ARCH's code."""
    offset, containers, kept = 0, 0, 0
    while offset + HEADER.size <= len(data):
        magic, _, header, size = HEADER.unpack_from(data, offset)
        if magic != MAGIC:
            if magic:
                raise SystemExit(f"no fat binary at {offset}: {magic:#x}")
            offset += 8  # between containers
            continue
        begin, end = offset + header, offset + header + size
        if end > len(data):
            raise SystemExit(
                f"the container at {offset} has {size} bytes, and the section ends before"
            )
        own, other, ptx, entry_at = b"", b"", (0, b""), begin
        while entry_at < end:
            kind, _, head, length = ENTRY.unpack_from(data, entry_at)
            if head <= ARCH_AT:
                raise SystemExit(f"no entry at {entry_at} of the container at {offset}")
            entry = bytes(data[entry_at : entry_at + head + length])
            target = struct.unpack_from("<I", entry, ARCH_AT)[0]
            if kind == CUBIN and target == arch:
                own += entry
            elif kind != CUBIN and target <= arch:
                ptx = max(ptx, (target, entry))
            elif not other:
                other = entry[:head] + bytes(length)
            entry_at += head + length
        if entry_at != end:
            raise SystemExit(
                f"the last entry of the container at {offset} ends at {entry_at}, not {end}"
            )
        remaining = own or ptx[1] or other
        data[begin:end] = remaining + bytes(size - len(remaining))
        struct.pack_into("<Q", data, offset + 8, len(remaining))
        offset, containers, kept = end, containers + 1, kept + bool(own)
    return containers, kept


def zero(data: bytearray, arch: int) -> tuple[int, int]:
    """Zero other code in every container of a file; return counts as `trim` does."""
    containers, kept, offset = 0, 0, 0
    while (offset := data.find(struct.pack("<I", MAGIC), offset)) >= 0:
        _, _, header, size = HEADER.unpack_from(data, offset)
        entry_at, end, has_code = offset + header, offset + header + size, False
        if header != HEADER.size or not size or end > len(data):  # the number by chance
            offset += 4
            continue
        while entry_at < end:
            kind, _, head, length = ENTRY.unpack_from(data, entry_at)
            if head <= ARCH_AT or entry_at + head + length > end:
                raise SystemExit(f"no entry at {entry_at} of the container at {offset}")
            if kind == CUBIN and struct.unpack_from("<I", data, entry_at + ARCH_AT)[0] == arch:
                has_code = True
            else:
                data[entry_at + head : entry_at + head + length] = bytes(length)
            entry_at += head + length
        offset, containers, kept = end, containers + 1, kept + has_code
    return containers, kept


def main(arguments: list[str]) -> None:
    """Trim the files in place."""
    zeroes = arguments[0] == "--zero"
    number, *names = arguments[zeroes:]
    for library in map(Path, names):
        data = bytearray(library.read_bytes())
        offset, size = section(library)
        if zeroes:
            counts = zero(data, int(number))
        else:
            counts = trim(memoryview(data)[offset : offset + size], int(number))
        library.write_bytes(data)
        print(f"{library.name}: {counts[1]} of {counts[0]} fat binaries have code of sm_{number}")


if __name__ == "__main__":
    main(sys.argv[1:])
