# SPDX-License-Identifier: Apache-2.0
"""Create empty CUDA libraries with which a CUDA build of PyTorch imports without a GPU.

make_cuda_stubs.py OUT_DIR LIB.so...    Each library has the versioned symbols that the LIBs import
from it; every function returns 999, cudaErrorUnknown. Unversioned symbols go to libplain.so, which
is preloaded.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CUDA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJitLink|nvToolsExt|nvtx)")
UNVERSIONED = re.compile(r"(nccl|cu|nvrtc|nvshmem|nvtx|__cuda)")
Versions = dict[str, set[str]]  # version: symbols


def readelf(flag: str, file: Path) -> str:
    """Return one of readelf's listings, with wide lines."""
    command = ["readelf", flag, "-W", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def owners(file: Path) -> dict[str, str]:
    """Return the library of each symbol version that a file needs."""
    libraries: dict[str, str] = {}
    library = ""
    for line in readelf("-V", file).partition("Version needs section")[2].splitlines():
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        if (match := re.search(r"Name: (\S+)", line)) and library:
            libraries.setdefault(match[1], library)
    return libraries


def undefined(file: Path) -> list[tuple[str, str]]:
    """Return (symbol, version or "") of a file's undefined symbols."""
    rows = (line.split() for line in readelf("--dyn-syms", file).splitlines())
    names = (row[7].partition("@") for row in rows if len(row) >= 8 and row[6] == "UND")
    return [(name, version.strip("@")) for name, _, version in names]


def write(path: Path, versions: Versions) -> None:
    """Compile a library with these symbols."""
    source, script = path.with_suffix(".c"), path.with_suffix(".map")
    names = sorted({name for each in versions.values() for name in each})
    source.write_text("\n".join(f"long {name}(void) {{ return 999; }}" for name in names) + "\n")
    command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{path.name}"]
    if versioned := {version: each for version, each in versions.items() if version}:
        script.write_text(
            "".join(
                f"{version} {{ global: {' '.join(f'{name};' for name in sorted(each))} }};\n"
                for version, each in versioned.items()
            )
        )
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, "-o", str(path), str(source)], check=True)


def main(out: Path, files: list[Path]) -> None:
    """Read all files, then write every library that they need."""
    out.mkdir(parents=True, exist_ok=True)
    imported: dict[str, Versions] = defaultdict(lambda: defaultdict(set))
    plain: set[str] = set()
    needed: set[str] = set()
    for file in files:
        libraries = re.findall(r"NEEDED.*\[(.*?)\]", readelf("-d", file))
        needed |= {name for name in libraries if CUDA.match(name)}
        owner = owners(file)
        for name, version in undefined(file):
            if version in owner:
                imported[owner[version]][version].add(name)
            elif not version and UNVERSIONED.match(name):
                plain.add(name)
    for library in sorted(needed):
        write(out / library, imported.get(library, {}))
    write(out / "libplain.so", {"": plain})
    print(f"{len(needed)} libraries, {len(plain)} unversioned symbols")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
