"""A disk cache of compiled code, addressed by what went into it and shared by processes.

An entry is three names in one flat directory: `<key>.data` holds the bytes, `<key>.json` says what
they are and what they hash to, and `<key>.lock` exists only while somebody builds. Readers take no
lock: data and sidecar are each renamed into place, and a pair that does not hash is a miss. So is
whatever stands in an entry's place and is not a regular file that this user alone may write: links
are not followed, and the next build puts a file there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument, SetupError
from weft.jit.files import in_the_way, names, own_directory, read_own, regular, remove

# Raise this when entries of an older weft must not be used although every other input is equal.
ABI = 1

_log = logging.getLogger(__name__)
_KEY = re.compile(r"[0-9a-f]{64}")
_OURS = re.compile(r"\.?([0-9a-f]{64})\.(?:data|json|lock|\w+\.tmp)")
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def key_of(**parts: str | Sequence[str]) -> str:
    """Return the key (64 hex digits) of an entry made from these named inputs."""
    named = {name: part if isinstance(part, str) else list(part) for name, part in parts.items()}
    text = json.dumps({"abi": ABI, "parts": named}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def default_path() -> Path:
    """Return `$WEFT_CACHE`, else `$XDG_CACHE_HOME/weft`, else `~/.cache/weft`.

    Raises:
        SetupError: none of them is set and there is no home directory.
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
    """One compiled thing in the cache: sizes in bytes, times in seconds since 1970."""

    key: str
    kind: str  # "cubin", "shared" or "program"
    name: str
    bytes: int
    created: float
    last_used: float
    arch: str


@dataclass(frozen=True, slots=True)
class _Sidecar:
    fields: dict[str, Any]
    modified: float


class Cache:
    """Compiled code on disk; safe to use from many processes and threads at once.

    Args:
        path: the directory, made with mode 0700 if absent; default `default_path()`.
        lock_timeout: seconds to wait for another process that builds the same entry.

    The directory may be a symbolic link, or lie behind one, if this user or root made the link. It
    is followed once, here; from then on `self.path` is the directory itself, so that nobody can
    lead this process elsewhere later.

    Raises:
        SetupError: the directory cannot be made, belongs to another user, lies behind another
            user's link, or others may write it.
    """

    def __init__(self, path: Path | None = None, *, lock_timeout: float = 300.0) -> None:
        self.path = own_directory(default_path() if path is None else Path(path).absolute())
        self.lock_timeout = lock_timeout

    def get(self, key: str) -> bytes | None:
        """Return the entry's bytes, or None if it is absent or damaged."""
        sidecar = self._sidecar(key)
        if sidecar is None:
            return None
        found = read_own(self._file(key, "data"))
        if found is None or hashlib.sha256(found.data).hexdigest() != sidecar.fields.get("sha256"):
            return None
        # The sidecar's mtime is the time of last use: a statistic, so a read-only cache may refuse.
        with contextlib.suppress(OSError):
            os.utime(self._file(key, "json"), follow_symlinks=False)
        return found.data

    def put(self, key: str, data: bytes, meta: dict[str, Any]) -> Path:
        """Store `data` under `key` and return its path.

        `meta` needs `name` and `kind`; what else it holds goes into the sidecar as it is.

        Raises:
            SetupError: the disk refused, or another process held the entry too long.
        """
        with self._locked(key, str(meta.get("name"))):
            return self._write(key, data, meta)

    def get_or_build(self, key: str, build: Callable[[], bytes], meta: dict[str, Any]) -> Path:
        """Return the path of the entry; `build` runs in one process, the others wait for it.

        `meta` is written down after `build` returned, so `build` may add to it.

        Raises:
            SetupError: another process held the entry longer than `lock_timeout`.
            Whatever `build` raises; the next process then tries for itself.
        """
        self.fetch(key, build, meta)
        return self._file(key, "data")

    def fetch(self, key: str, build: Callable[[], bytes], meta: dict[str, Any]) -> bytes:
        """Like `get_or_build`, but return the entry's bytes."""
        began = time.monotonic()
        what = f"{meta.get('name')} ({meta.get('kind')}, {meta.get('arch')})"
        if (data := self.get(key)) is not None:
            _log.info("%s: read from %s in %.3f s", what, self.path, time.monotonic() - began)
            _log.debug("%s: its key is %s", what, key)
            return data
        with self._locked(key, str(meta.get("name"))):
            if (data := self.get(key)) is not None:  # built while this process waited
                waited = time.monotonic() - began
                _log.info("%s: another process compiled it, waited %.3f s", what, waited)
                return data
            for leftover in self.path.glob(f".{key}.*.tmp"):  # of a builder that was killed
                remove(leftover)
            data = build()
            self._write(key, data, meta)
            took = time.monotonic() - began
            _log.info("%s: compiled in %.3f s, %d bytes", what, took, len(data))
            _log.debug("%s: by %s, kept in %s as %s", what, meta.get("compiler"), self.path, key)
            return data

    def entries(self) -> list[Entry]:
        """Return what is stored, oldest first. Damaged entries are not listed."""
        found = []
        for path in self.path.glob("*.json"):
            key = path.stem
            sidecar = self._sidecar(key) if _KEY.fullmatch(key) else None
            if sidecar is None:
                continue
            said = sidecar.fields
            size, created = said.get("bytes"), said.get("created")
            # A sidecar that says otherwise is not weft's. To Python a bool is an int, too.
            if type(size) is not int or isinstance(created, bool):
                continue
            if not isinstance(created, int | float):
                continue
            if not 0 <= size < 1 << 63 or not 0 <= created < math.inf:
                continue
            found.append(
                Entry(
                    key=key,
                    kind=str(said.get("kind", "")),
                    name=str(said.get("name", "")),
                    bytes=size,
                    created=float(created),
                    last_used=sidecar.modified,
                    arch=str(said.get("arch", "")),
                )
            )
        return sorted(found, key=lambda entry: (entry.created, entry.key))

    def clear(self) -> int:
        """Remove every entry that nobody is building; return how many there were.

        Files that weft did not write stay.

        Raises:
            SetupError: something stands in an entry's place that cannot be removed.
        """
        removed = 0
        matches = (_OURS.fullmatch(name) for name in names(self.path))
        for key in sorted({match[1] for match in matches if match}):
            lock = self._acquire(self._file(key, "lock"), timeout=0.0)
            if lock is None:
                continue
            try:
                removed += os.path.lexists(self._file(key, "json"))
                for part in ("json", "data"):  # the sidecar first: without it there is no entry
                    remove(self._file(key, part))
                for leftover in self.path.glob(f".{key}.*.tmp"):
                    remove(leftover)
            finally:
                self._release(self._file(key, "lock"), lock)
        return removed

    def _file(self, key: str, part: str) -> Path:
        if not _KEY.fullmatch(key):
            raise InvalidArgument(f"a cache key is 64 hex digits, not {key!r}; make it with key_of")
        return self.path / f"{key}.{part}"

    def _sidecar(self, key: str) -> _Sidecar | None:
        found = read_own(self._file(key, "json"))
        if found is None:
            return None
        try:
            fields = json.loads(found.data)
        except (ValueError, RecursionError):  # cut short, or not weft's: both are a miss
            return None
        return _Sidecar(fields, found.modified) if isinstance(fields, dict) else None

    def _write(self, key: str, data: bytes, meta: dict[str, Any]) -> Path:
        if missing := {"name", "kind"} - meta.keys():
            lacking = " and ".join(sorted(missing))
            raise InvalidArgument(f"meta needs name and kind, this one lacks {lacking}")
        sidecar = {
            **meta,
            "created": time.time(),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        mode = 0o700 if meta["kind"] == "program" else 0o600
        self._replace(self._file(key, "data"), data, mode)
        text = json.dumps(sidecar, indent=1, sort_keys=True)
        self._replace(self._file(key, "json"), text.encode(), 0o600)
        return self._file(key, "data")

    def _replace(self, path: Path, data: bytes, mode: int) -> None:
        """Write a file so that a reader sees all of it or none, also after a crash."""
        scratch = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(scratch, flags, mode), "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if path.is_dir() and not path.is_symlink():  # the only thing a rename cannot replace
                remove(path)
            scratch.replace(path)
        except BaseException as error:
            scratch.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise SetupError(
                f"cannot write {len(data)} bytes to {path}: {error}; "
                "free some space or set WEFT_CACHE to another directory"
            ) from error

    @contextlib.contextmanager
    def _locked(self, key: str, name: str) -> Iterator[None]:
        path = self._file(key, "lock")
        lock = self._acquire(path, timeout=self.lock_timeout)
        if lock is None:
            written = read_own(path)
            said = "" if written is None else written.data.decode("ascii", "replace").strip()
            holder = said[:20] or "unknown"
            raise SetupError(
                f"waited {self.lock_timeout:g} s for another process (pid {holder}) to build "
                f"{name!r}; end that process if it hangs: {path} is then released by itself"
            )
        try:
            yield
        finally:
            self._release(path, lock)

    @staticmethod
    def _acquire(path: Path, *, timeout: float) -> int | None:
        """Lock `path` and return the open file, or None when the deadline passed.

        flock and not lockf: it also keeps two threads of one process apart, and it goes with the
        process that held it.
        """
        deadline = time.monotonic() + timeout
        pause = 0.002
        while True:
            try:
                lock = os.open(path, _LOCK_FLAGS, 0o600)
            except OSError as error:
                if os.path.lexists(path) and not regular(path):
                    raise in_the_way(path) from error
                raise SetupError(
                    f"cannot open lock file {path}: {error}; "
                    "set WEFT_CACHE to a directory that you can write"
                ) from error
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                os.close(lock)
                raise in_the_way(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder unlinks the file: a lock on an unlinked file keeps nobody out.
                if os.path.samestat(os.fstat(lock), path.lstat()):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, str(os.getpid()).encode(), 0)
                    return lock
            except (BlockingIOError, FileNotFoundError):
                pass  # held, or just unlinked: try again below
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    @staticmethod
    def _release(path: Path, lock: int) -> None:
        # While still held, so that no lock file is left lying about. One that stays, because the
        # directory was closed to writing meanwhile, keeps nobody out.
        with contextlib.suppress(OSError):
            path.unlink()
        fcntl.flock(lock, fcntl.LOCK_UN)  # explicitly: a forked child may hold the same open file
        os.close(lock)
