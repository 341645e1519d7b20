"""A disk cache of compiled code, addressed by what went into it and shared by processes.

An entry is three names in one flat directory: `<key>.data` holds the bytes, `<key>.json` says what
they are and what they hash to, and `<key>.lock` exists only while somebody builds. Readers take no
lock: data and sidecar are each renamed into place, and a pair that does not hash is a miss.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
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

# Raise this when entries of an older weft must not be used although every other input is equal.
ABI = 1

_KEY = re.compile(r"[0-9a-f]{64}")
_OURS = re.compile(r"\.?([0-9a-f]{64})\.(?:data|json|lock|\w+\.tmp)")
_NEVER = "remove it, or point WEFT_CACHE at a directory of your own"


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


class Cache:
    """Compiled code on disk; safe to use from many processes and threads at once.

    Args:
        path: the directory, made with mode 0700 if absent; default `default_path()`.
        lock_timeout: seconds to wait for another process that builds the same entry.

    Raises:
        SetupError: the directory cannot be made, belongs to another user, or others may write it.
    """

    def __init__(self, path: Path | None = None, *, lock_timeout: float = 300.0) -> None:
        self.path = default_path() if path is None else Path(path).absolute()
        self.lock_timeout = lock_timeout
        self._open_directory()

    def get(self, key: str) -> bytes | None:
        """Return the entry's bytes, or None if it is absent or damaged."""
        sidecar = self._sidecar(key)
        if sidecar is None:
            return None
        try:
            data = self._file(key, "data").read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() != sidecar.get("sha256"):
            return None
        # The sidecar's mtime is the time of last use: a statistic, so a read-only cache may refuse.
        with contextlib.suppress(OSError):
            os.utime(self._file(key, "json"))
        return data

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
        if (data := self.get(key)) is not None:
            return data
        with self._locked(key, str(meta.get("name"))):
            if (data := self.get(key)) is not None:  # built while this process waited
                return data
            for leftover in self.path.glob(f".{key}.*.tmp"):  # of a builder that was killed
                leftover.unlink(missing_ok=True)
            data = build()
            self._write(key, data, meta)
            return data

    def entries(self) -> list[Entry]:
        """Return what is stored, oldest first. Damaged entries are not listed."""
        found = []
        for path in self.path.glob("*.json"):
            key = path.stem
            sidecar = self._sidecar(key) if _KEY.fullmatch(key) else None
            if sidecar is None:
                continue
            try:
                used = path.stat().st_mtime
            except FileNotFoundError:  # cleared by another process meanwhile
                continue
            found.append(
                Entry(
                    key=key,
                    kind=str(sidecar.get("kind", "")),
                    name=str(sidecar.get("name", "")),
                    bytes=int(sidecar.get("bytes", 0)),
                    created=float(sidecar.get("created", 0.0)),
                    last_used=used,
                    arch=str(sidecar.get("arch", "")),
                )
            )
        return sorted(found, key=lambda entry: (entry.created, entry.key))

    def clear(self) -> int:
        """Remove every entry that nobody is building; return how many there were.

        Files that weft did not write stay.
        """
        removed = 0
        matches = (_OURS.fullmatch(path.name) for path in self.path.iterdir())
        for key in sorted({match[1] for match in matches if match}):
            lock = self._acquire(self._file(key, "lock"), timeout=0.0)
            if lock is None:
                continue
            try:
                removed += self._file(key, "json").exists()
                for part in ("json", "data"):  # the sidecar first: without it there is no entry
                    self._file(key, part).unlink(missing_ok=True)
                for leftover in self.path.glob(f".{key}.*.tmp"):
                    leftover.unlink(missing_ok=True)
            finally:
                self._release(self._file(key, "lock"), lock)
        return removed

    def _open_directory(self) -> None:
        """Make the directory if needed and refuse one into which another user could put code."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            status = self.path.stat()
        except OSError as error:
            raise SetupError(
                f"cannot make {self.path} for compiled code: {error}; "
                "set WEFT_CACHE to a directory that you can write"
            ) from error
        if status.st_uid != os.geteuid():
            raise SetupError(
                f"{self.path} belongs to user {status.st_uid}, this process runs as user "
                f"{os.geteuid()}, and code from it would be run; {_NEVER}"
            )
        if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
            raise SetupError(
                f"{self.path} has mode {mode:04o}, so others may write code into it; "
                f"expected 0700: chmod 700 {self.path}"
            )

    def _file(self, key: str, part: str) -> Path:
        if not _KEY.fullmatch(key):
            raise InvalidArgument(f"a cache key is 64 hex digits, not {key!r}; make it with key_of")
        return self.path / f"{key}.{part}"

    def _sidecar(self, key: str) -> dict[str, Any] | None:
        path = self._file(key, "json")
        try:
            found = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):  # absent, or cut short: both are a miss
            return None
        return found if isinstance(found, dict) else None

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
            scratch.replace(path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise SetupError(
                f"cannot write {len(data)} bytes to {path}: {error}; "
                "free some space or set WEFT_CACHE to another directory"
            ) from error

    @contextlib.contextmanager
    def _locked(self, key: str, name: str) -> Iterator[None]:
        path = self._file(key, "lock")
        lock = self._acquire(path, timeout=self.lock_timeout)
        if lock is None:
            try:
                holder = path.read_text().strip() or "unknown"
            except FileNotFoundError:
                holder = "gone a moment ago"
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
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise SetupError(
                    f"cannot open lock file {path}: {error}; "
                    "set WEFT_CACHE to a directory that you can write"
                ) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The last holder unlinks the file: a lock on an unlinked file keeps nobody out.
                if os.path.samestat(os.fstat(lock), path.stat()):
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
        path.unlink(missing_ok=True)  # while still held, so that no lock file is left lying about
        fcntl.flock(lock, fcntl.LOCK_UN)  # explicitly: a forked child may hold the same open file
        os.close(lock)
