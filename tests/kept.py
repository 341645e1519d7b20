# SPDX-License-Identifier: Apache-2.0
"""A cache of compiled code that later test runs reuse while its sources are unchanged.

Its name has a digest of all sources and of the compiler: weft's own cache keys are under test.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from weft.jit import Cache

_SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".hpp")
_DAY = 86400.0


def decided_by(root: Path, compiler: str) -> str:
    """Return a digest of a checkout's C++ and CUDA sources, build scripts and C++ compiler."""
    digest = hashlib.sha256()
    files = [path for folder in ("weft", "tests") for path in (root / folder).rglob("*.*")]
    files = [path for path in files if path.suffix in _SUFFIXES]
    for path in sorted([*files, *(root / "weft/jit").glob("*.py")]):
        digest.update(f"{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for path in _programs(compiler):
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:24]


def _programs(compiler: str) -> list[Path]:
    driver = shutil.which(compiler)
    if driver is None:
        return []
    command = [driver, "-print-prog-name=cc1plus"]
    result = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return [path for path in map(Path, (driver, result)) if path.is_file()]


def cache_of(root: Path) -> Path | None:
    """Return the cache folder of the checkout in its current state, or None if it is read-only.

    Those that no run has used for a day are removed.
    """
    caches = root / "build" / "tests-cache"
    folder = caches / decided_by(root, os.environ.get("CXX", "c++").partition(" ")[0])
    try:
        caches.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        os.utime(folder)
    except OSError:
        return None
    for other in caches.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another worker removes it, too
            if other.stat().st_mtime < time.time() - _DAY:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def kept_file(key: str, name: str, build: Callable[[Path], object]) -> Path:
    """Return a cached file, which `build(path)` writes if it is missing."""
    path = Cache().path / f"{key[:32]}-{name}"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            fresh = Path(f"{path}.fresh")
            build(fresh)
            fresh.replace(path)
    return path
