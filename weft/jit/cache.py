# SPDX-License-Identifier: Apache-2.0
"""A disk cache of compiled code, keyed by a hash of all inputs and shared by processes.

An entry is one file in a flat directory, `<key>.data`: a line of JSON with the key, the length and
the digest of the content and a description, followed by the content. It is written under a
temporary name and renamed, so that readers, which acquire no lock, never see a partial entry.

Cached code will be executed, so the cache loads no file that another user could have written. Each
use checks owner and mode of the entry, of the directory and of all its parents on open descriptors.
An entry that fails this check, or whose content does not match its first line, is compiled again
and replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import SetupError

# Increment this if entries of older versions are invalid even when all inputs are equal.
ABI = 3

_log = logging.getLogger(__name__)
# Includes .json files, which ABI 2 wrote.
_CACHE_FILE = re.compile(r"\.?[0-9a-f]{64}\.(?:data|json|lock|\w+\.tmp)")
_DESCRIPTION_LIMIT = 1 << 20  # bytes of an entry's first line
_ENTRY_LIMIT = 1 << 30  # bytes of an entry; weft's largest entry is a few MiB
_LOCK_POLL = 0.05  # seconds between two attempts to lock
_ALL_IDS = 0xFFFFFFFF  # number of user ids that the initial user namespace maps
# Errors of open() for an entry that is not a regular file that its owner can read.
_NOT_A_FILE_ERRORS = frozenset((errno.ELOOP, errno.EACCES, errno.ENXIO, errno.ENODEV))


def build_key(**parts: str | Sequence[str]) -> str:
    """Hash the named inputs of an entry to its key (64 hex digits)."""
    inputs = {name: part if isinstance(part, str) else list(part) for name, part in parts.items()}
    text = json.dumps({"abi": ABI, "parts": inputs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def default_path() -> Path:
    """Return `$WEFT_CACHE`, else `$XDG_CACHE_HOME/weft`, else `~/.cache/weft`.

    Raises:
        SetupError: neither variable is set and there is no home directory.
    """
    if directory := os.environ.get("WEFT_CACHE"):
        return Path(directory).absolute()
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent).absolute() / "weft"
    try:
        return Path.home() / ".cache" / "weft"
    except RuntimeError as error:
        raise SetupError(f"no directory for compiled code: {error}; set WEFT_CACHE") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One cached compilation result."""

    key: str
    kind: str  # "cubin" or "c++"
    name: str
    arch: str
    bytes: int
    created: float  # seconds since 1970


class BadEntryError(Exception):
    """A cache file must not be used: another user could have written it, or it is damaged."""


class Cache:
    """Compiled code on disk, safe for concurrent use by processes and threads.

    Symbolic links are resolved once, at construction; `self.path` is the resolved directory.

    Args:
        path: Directory, created with mode 0700 if absent. Default: `default_path()`.
        lock_timeout: Seconds to wait for another process that builds the same entry.

    Raises:
        SetupError: the directory cannot be created, or another user could write or replace it.
    """

    def __init__(self, path: Path | None = None, *, lock_timeout: float = 300.0) -> None:
        self.path = _make_directory(default_path() if path is None else Path(path).absolute())
        self.lock_timeout = lock_timeout
        with self._open_directory():
            pass

    def entry_path(self, key: str) -> Path:
        """Return the path of an entry."""
        return self.path / f"{key}.data"

    def fetch(self, key: str, build: Callable[[], bytes], meta: dict[str, Any]) -> bytes:
        """Return the content of an entry, which one process builds while others wait.

        If `build` raises, the next waiting process runs its own `build`.

        Args:
            key: Key of the entry, from `build_key`.
            build: Returns the content.
            meta: Description of the entry: name, kind, arch and compiler. Stored after `build` has
                returned, so `build` may add to it.

        Returns:
            The content.

        Raises:
            SetupError: the directory cannot be written, or another process held the lock longer
                than `lock_timeout`.
        """
        start = time.monotonic()
        label = f"{meta['name']} ({meta['kind']}, {meta['arch']})"
        with self._open_directory() as folder:
            if (data := self._read(folder, key)) is not None:
                _log.info("%s: read from %s in %.3f s", label, self.path, time.monotonic() - start)
                _log.debug("%s: its key is %s", label, key)
                return data
            with self._hold_lock(folder, key, meta["name"]):
                if (data := self._read(folder, key, warn=True)) is not None:
                    waited = time.monotonic() - start
                    _log.info("%s: another process compiled it, waited %.3f s", label, waited)
                    return data
                data = build()
                self._write(folder, key, meta, data)
                elapsed = time.monotonic() - start
                _log.info("%s: compiled in %.3f s, %d bytes", label, elapsed, len(data))
                _log.debug("%s: by %s, in %s as %s", label, meta["compiler"], self.path, key)
                return data

    def entries(self) -> list[Entry]:
        """Return all valid entries, oldest first."""
        entries = []
        with self._open_directory() as folder:
            for name in os.listdir(folder):
                if not (_CACHE_FILE.fullmatch(name) and name.endswith(".data")):
                    continue
                key = name.removesuffix(".data")
                try:
                    meta, data, status = _read_entry(folder, key)
                except (FileNotFoundError, BadEntryError):
                    continue
                described = {field: str(meta[field]) for field in ("kind", "name", "arch")}
                entries.append(Entry(key, **described, bytes=len(data), created=status.st_mtime))
        return sorted(entries, key=lambda entry: (entry.created, entry.key))

    def clear(self) -> int:
        """Remove every entry and return their number.

        Entries that are being built are stored afterwards. Other files are not removed.

        Raises:
            SetupError: a file cannot be removed.
        """
        removed = 0
        with self._open_directory() as folder:
            for name in os.listdir(folder):
                if not _CACHE_FILE.fullmatch(name):
                    continue
                try:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
                except OSError as error:
                    raise SetupError(
                        f"cannot remove {self.path / name}: {error.strerror}; remove it by hand"
                    ) from error
                removed += name.endswith(".data")
        return removed

    @contextlib.contextmanager
    def _open_directory(self) -> Iterator[int]:
        """Open the directory and check it and all its parents; close it on exit."""
        fd = open_private_directory(self.path, purpose="code from it would be executed")
        try:
            yield fd
        finally:
            os.close(fd)

    def _read(self, folder: int, key: str, *, warn: bool = False) -> bytes | None:
        """Return the content of an entry, or None if there is no valid one."""
        try:
            return _read_entry(folder, key)[1]
        except FileNotFoundError:
            return None
        except BadEntryError as error:
            if warn:
                _log.warning("%s %s; compiling it again", self.entry_path(key), error)
            return None
        except OSError as error:
            raise SetupError(
                f"cannot read {self.entry_path(key)}: {error.strerror}; remove it, or set "
                "WEFT_CACHE to another directory"
            ) from error

    def _write(self, folder: int, key: str, meta: dict[str, Any], data: bytes) -> None:
        """Write an entry atomically, even if the process or the machine crashes."""
        described = {**meta, "key": key, "bytes": len(data), "digest": _hash_content(data)}
        content = json.dumps(described).encode() + b"\n" + data
        name, temporary = f"{key}.data", f"{key}.{secrets.token_hex(8)}.tmp"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o600, dir_fd=folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    os.fchmod(fd, 0o600)
                    file.write(content)
                    file.flush()
                    os.fsync(fd)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(temporary, dir_fd=folder)
                raise
        except OSError as error:
            raise SetupError(
                f"cannot write {len(content)} bytes to {self.path / name}: {error.strerror}; "
                "free some space or set WEFT_CACHE to another directory"
            ) from error

    @contextlib.contextmanager
    def _hold_lock(self, folder: int, key: str, name: str) -> Iterator[None]:
        """Hold the lock of an entry; the system releases it when the process ends."""
        file, deadline = f"{key}.lock", time.monotonic() + self.lock_timeout
        try:
            while (lock := _try_lock(folder, file)) is None:
                if time.monotonic() >= deadline:
                    raise SetupError(
                        f"waited {self.lock_timeout:g} s for another process to build {name!r}; "
                        f"end that process if it hangs (fuser {self.path / file}), which releases "
                        "its lock"
                    )
                time.sleep(_LOCK_POLL)
        except OSError as error:
            raise SetupError(
                f"cannot lock {self.path / file}: {error.strerror}; "
                "set WEFT_CACHE to a directory that you can write"
            ) from error
        try:
            yield
        finally:
            os.close(lock)


def _try_lock(folder: int, name: str) -> int | None:
    """Lock a file and return its descriptor, or None while another process holds the lock.

    A file that another user could open is replaced, because that user could hold the lock forever.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NOT_A_FILE_ERRORS:
            raise
        os.unlink(name, dir_fd=folder)  # raises for a directory
        return None
    try:
        status = os.fstat(lock)
        if _find_fault(status) or status.st_mode & 0o077:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            os.close(lock)
            return None
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink == 0:  # `clear` removed it before it was locked
            raise BlockingIOError
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _read_entry(folder: int, key: str) -> tuple[dict[str, Any], bytes, os.stat_result]:
    """Return the description, content and status of an entry.

    Raises:
        FileNotFoundError: there is no entry.
        BadEntryError: the entry must not be used.
        OSError: the entry cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(f"{key}.data", flags, dir_fd=folder)
    except OSError as error:
        if error.errno in _NOT_A_FILE_ERRORS:
            raise BadEntryError(f"is not a readable file ({error.strerror})") from error
        raise
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if fault := _find_fault(status):
            raise BadEntryError(fault)
        if status.st_size > _ENTRY_LIMIT:
            raise BadEntryError(f"has {status.st_size} bytes, more than {_ENTRY_LIMIT}")
        first = file.readline(_DESCRIPTION_LIMIT)
        data = file.read(status.st_size)
    try:
        meta = json.loads(first)
        expected = meta["key"], meta["bytes"], meta["digest"]
        complete = {"name", "kind", "arch", "compiler"} <= meta.keys()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadEntryError("does not begin with the line of an entry") from error
    if not complete or expected != (key, len(data), _hash_content(data)):
        raise BadEntryError(
            f"is damaged: {len(data)} bytes with digest {_hash_content(data)[:12]}, expected "
            f"{str(expected[1])[:20]} bytes with digest {str(expected[2])[:12]}"
        )
    return meta, data, status


def _hash_content(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _find_fault(status: os.stat_result) -> str:
    """Return the reason why a cache file must not be used, or "".

    Hard links are rejected: another user could have created one to a file of this user.
    """
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
        return f"has mode {mode:04o}, so other users can write it"
    if status.st_nlink > 1:
        return f"has {status.st_nlink} names (hard links)"
    return ""


def _make_directory(path: Path) -> Path:
    """Create a directory and its parents with mode 0700 if absent; return the resolved path.

    Raises:
        SetupError: a directory cannot be created.
    """
    try:
        for directory in (*reversed(path.parents), path):
            with contextlib.suppress(FileExistsError):
                if not directory.exists():
                    directory.mkdir(mode=0o700)
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of symbolic links
        raise SetupError(
            f"cannot create {path} for compiled code: {error}; "
            "set WEFT_CACHE to a directory that you can write"
        ) from error


def open_private_directory(path: Path, *, purpose: str, variable: str = "WEFT_CACHE") -> int:
    """Open a directory that only this user can write or replace, and return its descriptor.

    Every directory from the root on is opened relative to its parent and checked by its descriptor,
    so that a concurrent replacement is detected. The directory itself must belong to this user. Its
    parents must belong to this user or to root; other users may write them only if the sticky bit
    prevents renaming files of other users.

    Args:
        path: Absolute path without symbolic links.
        purpose: Reason why no other user may write it, for the error.
        variable: Environment variable that selects another directory.

    Raises:
        SetupError: names the directory and the reason.
    """
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_last = len(path.parts) == 1
        _check_directory(Path("/"), fd, purpose, variable, is_last=is_last)
        for depth, name in enumerate(path.parts[1:], start=2):
            is_last, prefix = depth == len(path.parts), Path(*path.parts[:depth])
            flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(name, flags | (os.O_RDONLY if is_last else os.O_PATH), dir_fd=fd)
            os.close(fd)
            fd = inner
            _check_directory(prefix, fd, purpose, variable, is_last=is_last)
    except OSError as error:
        os.close(fd)
        raise SetupError(
            f"cannot open {path}: {error.strerror}; set {variable} to a directory that you can "
            "write"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_directory(path: Path, fd: int, purpose: str, variable: str, *, is_last: bool) -> None:
    """Raise SetupError unless a directory, or a parent of it (not `is_last`), is safe."""
    status, user = os.fstat(fd), os.geteuid()
    owners = {user} if is_last else {user, 0, *_get_unmapped_owners()}
    if status.st_uid not in owners:
        owner = "this user" if is_last else "this user or root"
        raise SetupError(
            f"{path} belongs to user {status.st_uid}, this process runs as user {user}, and "
            f"{purpose}; expected a directory of {owner}: set {variable} to a directory of yours, "
            "below your home directory"
        )
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o022 or (not is_last and mode & stat.S_ISVTX):
        return
    if is_last:
        raise SetupError(
            f"{path} has mode {mode:04o}, so other users can write code into it, and {purpose}; "
            f"expected 0700: chmod 700 {path}"
        )
    raise SetupError(
        f"{path} has mode {mode:04o}, so other users can replace the directory below it, and "
        f"{purpose}; chmod go-w {path}, or set {variable} to a directory elsewhere"
    )


def _get_unmapped_owners() -> set[int]:
    """Return the overflow uid, which stands for users that this user namespace does not map.

    In a rootless container it owns `/` and `/home`, which belong to the host's root.
    """
    try:
        ranges = Path("/proc/self/uid_map").read_text().split()
        if sum(map(int, ranges[2::3])) >= _ALL_IDS:
            return set()
        return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return set()
