# SPDX-License-Identifier: Apache-2.0
"""Leave one architecture's GPU code in shared objects: trim_kernels.py ARCH LIB.so...

A fat binary is a header and entries, each PTX or a cubin of one architecture. What is not ARCH's is
cut out where it is, and zeros follow: no address changes, and a compressed archive is small. One
that has no cubin of ARCH keeps its first entry, a cubin with zeros for its code, by whose header
the driver says that there is no image for the device.
"""

import re
import struct
import subprocess
import sys
from pathlib import Path

MAGIC = 0xBA55ED50
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of what follows
CUBIN, ARCH_AT = 2, 28  # a kind; where an entry names its architecture


def section(library: Path) -> tuple[int, int]:
    """Where in a file its fat binaries are: offset and bytes; both 0 where it has none."""
    command = ["readelf", "-S", "-W", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"\.nv_fatbin\s+PROGBITS\s+\w+\s+(\w+)\s+(\w+)", listing)
    return (int(found[1], 16), int(found[2], 16)) if found else (0, 0)


def trim(data: memoryview, arch: int) -> tuple[int, int]:
    """Cut the entries of every container in a section; how many there are, and have ARCH's code."""
    at, containers, kept = 0, 0, 0
    while at + HEADER.size <= len(data):
        magic, _, header, size = HEADER.unpack_from(data, at)
        if magic != MAGIC:
            if magic:
                raise SystemExit(f"no fat binary at {at}: {magic:#x}")
            at += 8  # between containers
            continue
        begin, end = at + header, at + header + size
        if end > len(data):
            raise SystemExit(f"the container at {at} has {size} bytes, and the section ends before")
        own, other, place = b"", b"", begin
        while place < end:
            kind, _, head, length = ENTRY.unpack_from(data, place)
            if head <= ARCH_AT:
                raise SystemExit(f"no entry at {place} of the container at {at}")
            entry = bytes(data[place : place + head + length])
            if kind == CUBIN and struct.unpack_from("<I", entry, ARCH_AT)[0] == arch:
                own += entry
            elif not other:
                other = entry if kind != CUBIN else entry[:head] + bytes(length)
            place += head + length
        if place != end:
            raise SystemExit(f"the last entry of the container at {at} ends at {place}, not {end}")
        left = own or other
        data[begin:end] = left + bytes(size - len(left))
        struct.pack_into("<Q", data, at + 8, len(left))
        at, containers, kept = end, containers + 1, kept + bool(own)
    return containers, kept


def main(arch: int, libraries: list[Path]) -> None:
    """Trim the files in place."""
    for library in libraries:
        offset, size = section(library)
        data = bytearray(library.read_bytes())
        found = trim(memoryview(data)[offset : offset + size], arch)
        library.write_bytes(data)
        print(f"{library.name}: {found[1]} of {found[0]} fat binaries have code of sm_{arch}")


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
