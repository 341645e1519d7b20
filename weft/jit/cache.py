# SPDX-License-Identifier: Apache-2.0
"""A disk cache of compiled code, addressed by what went into it and shared by processes.

An entry is one file in a flat directory, `<key>.data`: a line of JSON that names the key, the
length and the digest of the content and says what it is, then the content. It is written under
another name and renamed, so that a reader, who takes no lock, sees all of it or none.

What is in the cache is code that will be run, so nothing is loaded that another user could have
written. Of the directory, of every directory above it, and of the entry itself, owner and mode are
checked on the opened descriptor, at every use. An entry that fails this check, or whose content
does not match its first line, is compiled again and replaced.
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

# Raise this when entries of an older weft must not be used although every other input is equal.
ABI = 3

_log = logging.getLogger(__name__)
# .json files are those of ABI 2.
_OURS = re.compile(r"\.?[0-9a-f]{64}\.(?:data|json|lock|\w+\.tmp)")
_DESCRIPTION_LIMIT = 1 << 20  # bytes of an entry's first line
_ENTRY_LIMIT = 1 << 30  # bytes of an entry; the largest of weft has a few MiB
_LOCK_POLL = 0.05  # seconds between two tries of a lock
_ALL_IDS = 0xFFFFFFFF  # user ids that the initial user namespace maps
# These errors of open() say that the entry is no plain file that its owner can read.
_NO_PLAIN_FILE = frozenset((errno.ELOOP, errno.EACCES, errno.ENXIO, errno.ENODEV))


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


class BadEntryError(Exception):
    """Why a file in the cache is not used: another user could have written it, or it is damaged."""


class Cache:
    """Compiled code on disk; safe to use from many processes and threads at once.

    path: the directory, made with mode 0700 if absent; default `default_path()`.
    lock_timeout: seconds to wait for another process that builds the same entry.

    Links are followed once, here; `self.path` is the directory itself. Raises SetupError where it
    cannot be made, or where another user could write it or replace it.
    """

    def __init__(self, path: Path | None = None, *, lock_timeout: float = 300.0) -> None:
        self.path = _make_directory(default_path() if path is None else Path(path).absolute())
        self.lock_timeout = lock_timeout
        with self._opened():
            pass

    def file(self, key: str) -> Path:
        """Return the path of an entry."""
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
        with self._opened() as folder:
            if (data := self._read(folder, key)) is not None:
                _log.info("%s: read from %s in %.3f s", what, self.path, time.monotonic() - began)
                _log.debug("%s: its key is %s", what, key)
                return data
            with self._locked(folder, key, meta["name"]):
                if (data := self._read(folder, key, warn=True)) is not None:
                    waited = time.monotonic() - began
                    _log.info("%s: another process compiled it, waited %.3f s", what, waited)
                    return data
                data = build()
                self._write(folder, key, meta, data)
                took = time.monotonic() - began
                _log.info("%s: compiled in %.3f s, %d bytes", what, took, len(data))
                _log.debug("%s: by %s, in %s as %s", what, meta["compiler"], self.path, key)
                return data

    def entries(self) -> list[Entry]:
        """Return what is stored and would be used, oldest first."""
        found = []
        with self._opened() as folder:
            for name in os.listdir(folder):
                if not (_OURS.fullmatch(name) and name.endswith(".data")):
                    continue
                key = name.removesuffix(".data")
                try:
                    meta, data, status = _read_entry(folder, key)
                except (FileNotFoundError, BadEntryError):
                    continue
                named = {field: str(meta[field]) for field in ("kind", "name", "arch")}
                found.append(Entry(key, **named, bytes=len(data), created=status.st_mtime))
        return sorted(found, key=lambda entry: (entry.created, entry.key))

    def clear(self) -> int:
        """Remove every entry and return how many there were. What is being built appears later.

        Files that weft did not write stay. Raises SetupError where one cannot be removed.
        """
        removed = 0
        with self._opened() as folder:
            for name in os.listdir(folder):
                if not _OURS.fullmatch(name):
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
    def _opened(self) -> Iterator[int]:
        """Open the directory, check it and all above it, and close it at the end."""
        fd = open_private_directory(self.path, purpose="code from it would be run")
        try:
            yield fd
        finally:
            os.close(fd)

    def _read(self, folder: int, key: str, *, warn: bool = False) -> bytes | None:
        """Return an entry's content, or None where there is none that may be used."""
        try:
            return _read_entry(folder, key)[1]
        except FileNotFoundError:
            return None
        except BadEntryError as bad:
            if warn:
                _log.warning("%s %s; it is compiled again", self.file(key), bad)
            return None
        except OSError as error:
            raise SetupError(
                f"cannot read {self.file(key)}: {error.strerror}; remove it, or set WEFT_CACHE to "
                "another directory"
            ) from error

    def _write(self, folder: int, key: str, meta: dict[str, Any], data: bytes) -> None:
        """Write an entry so that a reader sees all of it or none, also after a crash."""
        described = {**meta, "key": key, "bytes": len(data), "digest": _digest(data)}
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
    def _locked(self, folder: int, key: str, name: str) -> Iterator[None]:
        """Hold the lock of an entry; it goes with its process."""
        file, deadline = f"{key}.lock", time.monotonic() + self.lock_timeout
        try:
            while (lock := _try_lock(folder, file)) is None:
                if time.monotonic() >= deadline:
                    raise SetupError(
                        f"waited {self.lock_timeout:g} s for another process to build {name!r}; "
                        f"end that process if it hangs (fuser {self.path / file}): its lock goes "
                        "with it"
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
    """Return the descriptor of a locked file, or None while another process holds the lock.

    A file that another user could open is replaced: that user could hold the lock for ever.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_PLAIN_FILE:
            raise
        os.unlink(name, dir_fd=folder)  # an error for a directory
        return None
    try:
        status = os.fstat(lock)
        if _fault_of(status) or status.st_mode & 0o077:
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
    """Return what is known of an entry, its content and its status.

    Raises FileNotFoundError without one, BadEntryError where it must not be used, and OSError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(f"{key}.data", flags, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_PLAIN_FILE:
            raise BadEntryError(f"is no file that can be read ({error.strerror})") from error
        raise
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if fault := _fault_of(status):
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
        raise BadEntryError("does not begin as an entry does") from error
    if not complete or expected != (key, len(data), _digest(data)):
        raise BadEntryError(
            f"is damaged: {len(data)} bytes of digest {_digest(data)[:12]}, where "
            f"{str(expected[1])[:20]} bytes of digest {str(expected[2])[:12]} were written"
        )
    return meta, data, status


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _fault_of(status: os.stat_result) -> str:
    """Return why a file of the cache must not be used, "" if it may.

    A second name of a file may lie where another user put it.
    """
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
        return f"has mode {mode:04o}, so that others may write it"
    if status.st_nlink > 1:
        return f"has {status.st_nlink} names (hard links)"
    return ""


def _make_directory(path: Path) -> Path:
    """Make a directory if it is absent, with those above it, and return where it is.

    Directories are made with mode 0700 whatever the umask is. Raises SetupError.
    """
    try:
        for each in (*reversed(path.parents), path):
            with contextlib.suppress(FileExistsError):
                if not each.exists():
                    each.mkdir(mode=0o700)
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # the latter for links that go in a circle
        raise SetupError(
            f"cannot make {path} for compiled code: {error}; "
            "set WEFT_CACHE to a directory that you can write"
        ) from error


def open_private_directory(path: Path, *, purpose: str, variable: str = "WEFT_CACHE") -> int:
    """Open a directory that this user alone can write or replace, and return its descriptor.

    path: absolute, without links.   purpose: why nobody else may, for the error.
    variable: in the environment, which chooses another directory.

    Every directory from the root on is opened by its name in the one above it and judged by its
    descriptor, so a directory that is exchanged meanwhile is judged, too. The directory itself has
    to belong to this user. Those above it belong to this user or to root, and others may write
    them only where the sticky bit keeps them from renaming what is not theirs.

    Raises SetupError which names the directory and what is wrong with it.
    """
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_directory(Path("/"), fd, last=len(path.parts) == 1, doing=(purpose, variable))
        for depth, name in enumerate(path.parts[1:], start=2):
            last, here = depth == len(path.parts), Path(*path.parts[:depth])
            flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(name, flags | (os.O_RDONLY if last else os.O_PATH), dir_fd=fd)
            os.close(fd)
            fd = inner
            _check_directory(here, fd, last=last, doing=(purpose, variable))
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


def _check_directory(path: Path, fd: int, *, last: bool, doing: tuple[str, str]) -> None:
    """Raise SetupError unless a directory is safe.

    last: it is the one in question, and no parent of it.   doing: the purpose and the variable.
    """
    purpose, variable = doing
    status, me = os.fstat(fd), os.geteuid()
    owners = {me} if last else {me, 0, *_unmapped_owners()}
    if status.st_uid not in owners:
        who = "this user" if last else "this user or root"
        raise SetupError(
            f"{path} belongs to user {status.st_uid}, this process runs as user {me}, and "
            f"{purpose}; expected a directory of {who}: set {variable} to one of your own, below "
            "your home directory"
        )
    mode = stat.S_IMODE(status.st_mode)
    if not mode & 0o022 or (not last and mode & stat.S_ISVTX):
        return
    if last:
        raise SetupError(
            f"{path} has mode {mode:04o}, so others may write code into it, and {purpose}; "
            f"expected 0700: chmod 700 {path}"
        )
    raise SetupError(
        f"{path} has mode {mode:04o}, so others may put another directory in the place of the "
        f"one below it, and {purpose}; chmod go-w {path}, or set {variable} to a directory "
        "elsewhere"
    )


def _unmapped_owners() -> set[int]:
    """Return the id that stands for users outside of this user namespace, where there are any.

    In a rootless container the host's root, who owns `/` and `/home` there, appears under it.
    """
    try:
        ranges = Path("/proc/self/uid_map").read_text().split()
        if sum(map(int, ranges[2::3])) >= _ALL_IDS:
            return set()
        return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return set()
