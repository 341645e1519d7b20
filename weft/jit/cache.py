"""A disk cache of compiled code, addressed by what went into it and shared by processes.

An entry is two files in one flat directory: `<key>.data` holds the bytes, `<key>.json` says what
they are. Each is written under another name and renamed, so that a reader, who takes no lock,
sees all of it or none. The directory belongs to this user, and nobody else may write it: what is in
it is code that will be run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from weft.errors import SetupError

# Raise this when entries of an older weft must not be used although every other input is equal.
ABI = 2

_log = logging.getLogger(__name__)
_OURS = re.compile(r"\.?[0-9a-f]{64}\.(?:data|json|lock|\w+\.tmp)")


def key_of(**parts: str | Sequence[str]) -> str:
    """Return the key (64 hex digits) of an entry made from these named inputs."""
    named = {name: part if isinstance(part, str) else list(part) for name, part in parts.items()}
    text = json.dumps({"abi": ABI, "parts": named}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def default_path() -> Path:
    """Return `$WEFT_CACHE`, else `$XDG_CACHE_HOME/weft`, else `~/.cache/weft`.

    Raises SetupError where none of them is set and there is no home directory.
    """
    if chosen := os.environ.get("WEFT_CACHE"):
        return Path(chosen).absolute()
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent).absolute() / "weft"
    try:
        return Path.home() / ".cache" / "weft"
    except RuntimeError as error:
        raise SetupError(f"no directory for compiled code: {error}; set WEFT_CACHE") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled thing in the cache: its size in bytes, its time in seconds since 1970."""

    key: str
    kind: str  # "cubin" or "c++"
    name: str
    arch: str
    bytes: int
    created: float


class Cache:
    """Compiled code on disk; safe to use from many processes and threads at once.

    path: the directory, made with mode 0700 if absent; default `default_path()`.
    lock_timeout: seconds to wait for another process that builds the same entry.

    Links are followed once, here; `self.path` is the directory itself. Raises SetupError where it
    cannot be made, belongs to another user, or others may write it.
    """

    def __init__(self, path: Path | None = None, *, lock_timeout: float = 300.0) -> None:
        self.path = _own_directory(default_path() if path is None else Path(path).absolute())
        self.lock_timeout = lock_timeout

    def file(self, key: str) -> Path:
        """Return where the entry's bytes are, once it was fetched."""
        return self.path / f"{key}.data"

    def fetch(self, key: str, build: Callable[[], bytes], meta: dict[str, Any]) -> bytes:
        """Return the entry's bytes; `build` runs in one process, the others wait for it.

        `meta` (name, kind, arch, compiler) is written down after `build` returned, so `build` may
        add to it.

        Raises SetupError where the directory cannot be written, or another process held the entry
        longer than `lock_timeout`; and what `build` raises: the next process then tries for itself.
        """
        began = time.monotonic()
        what = f"{meta['name']} ({meta['kind']}, {meta['arch']})"
        if (data := self._read(key)) is not None:
            _log.info("%s: read from %s in %.3f s", what, self.path, time.monotonic() - began)
            _log.debug("%s: its key is %s", what, key)
            return data
        with self._locked(key, meta["name"]):
            if (data := self._read(key)) is not None:  # built while this process waited
                waited = time.monotonic() - began
                _log.info("%s: another process compiled it, waited %.3f s", what, waited)
                return data
            data = build()
            self._write(self.path / f"{key}.json", json.dumps(meta, indent=1).encode())
            self._write(self.file(key), data)  # last: an entry is there once its data is
            took = time.monotonic() - began
            _log.info("%s: compiled in %.3f s, %d bytes", what, took, len(data))
            _log.debug("%s: by %s, kept in %s as %s", what, meta["compiler"], self.path, key)
            return data

    def entries(self) -> list[Entry]:
        """Return what is stored, oldest first."""
        found = []
        for path in self.path.glob("*.json"):
            if not _OURS.fullmatch(path.name):
                continue
            try:
                meta, status = json.loads(path.read_text()), self.file(path.stem).stat()
            except FileNotFoundError:  # it is being built, or removed
                continue
            named = {name: str(meta[name]) for name in ("kind", "name", "arch")}
            found.append(Entry(path.stem, **named, bytes=status.st_size, created=status.st_mtime))
        return sorted(found, key=lambda entry: (entry.created, entry.key))

    def clear(self) -> int:
        """Remove every entry and return how many there were. What is being built appears later.

        Files that weft did not write stay. Raises SetupError where one cannot be removed.
        """
        removed = 0
        for path in self.path.glob("*"):
            if not _OURS.fullmatch(path.name):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise SetupError(f"cannot remove {path}: {error}; remove it by hand") from error
            removed += path.suffix == ".data"
        return removed

    def _read(self, key: str) -> bytes | None:
        try:
            return self.file(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SetupError(
                f"cannot read {self.file(key)}: {error}; remove it, or set WEFT_CACHE to another "
                "directory"
            ) from error

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file so that a reader sees all of it or none, also after a crash."""
        try:
            with tempfile.NamedTemporaryFile(
                dir=self.path, prefix=f"{path.stem}.", suffix=".tmp", delete=False
            ) as file:
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            raise SetupError(
                f"cannot write {len(data)} bytes to {path}: {error}; "
                "free some space or set WEFT_CACHE to another directory"
            ) from error

    @contextlib.contextmanager
    def _locked(self, key: str, name: str) -> Iterator[None]:
        lock = FileLock(self.path / f"{key}.lock", timeout=self.lock_timeout, mode=0o600)
        try:
            lock.acquire()
        except Timeout:
            raise SetupError(
                f"waited {self.lock_timeout:g} s for another process to build {name!r}; end that "
                f"process if it hangs (fuser {lock.lock_file}): its lock goes with it"
            ) from None
        except OSError as error:
            raise SetupError(
                f"cannot lock {lock.lock_file}: {error}; "
                "set WEFT_CACHE to a directory that you can write"
            ) from error
        try:
            yield
        finally:
            lock.release()


def _own_directory(path: Path) -> Path:
    """Make the directory if needed, resolve it, and refuse one that is not this user's alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve(strict=True)
        status = path.lstat()
    except (OSError, RuntimeError) as error:  # the latter for links that go in a circle
        raise SetupError(
            f"cannot make {path} for compiled code: {error}; "
            "set WEFT_CACHE to a directory that you can write"
        ) from error
    if status.st_uid != os.geteuid():
        raise SetupError(
            f"{path} belongs to user {status.st_uid}, this process runs as user {os.geteuid()}, "
            "and code from it would be run; point WEFT_CACHE at a directory of your own"
        )
    if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
        raise SetupError(
            f"{path} has mode {mode:04o}, so others may write code into it; "
            f"expected 0700: chmod 700 {path}"
        )
    return path
