"""Files and directories that only this user may write: what the cache stands on.

Nothing here follows a link in a file's place, nor waits for a pipe's writer.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from weft.errors import SetupError

_NEVER = "remove it, or point WEFT_CACHE at a directory of your own"
# O_NONBLOCK: a pipe in a file's place must not make its reader wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Found:
    """A file as it was read, and when it was last modified."""

    data: bytes
    modified: float


def own_directory(path: Path) -> Path:
    """Make the directory if needed, refuse one into which another user could put code, resolve it.

    Links are judged before they are followed: whoever owns one can point it elsewhere tomorrow.
    """
    for part in (*reversed(path.parents), path):
        try:
            status = part.lstat()
        except OSError:  # to be made, or refused below
            break
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise SetupError(
                f"{part} is a symbolic link of user {status.st_uid}, this process runs as user "
                f"{os.geteuid()}, and code from behind it would be run; {_NEVER}"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        path = path.resolve(strict=True)
        status = path.lstat()
    except (OSError, RuntimeError) as error:  # the latter for links that go in a circle
        raise SetupError(
            f"cannot make {path} for compiled code: {error}; "
            "set WEFT_CACHE to a directory that you can write"
        ) from error
    if status.st_uid != os.geteuid():
        raise SetupError(
            f"{path} belongs to user {status.st_uid}, this process runs as user "
            f"{os.geteuid()}, and code from it would be run; {_NEVER}"
        )
    if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
        raise SetupError(
            f"{path} has mode {mode:04o}, so others may write code into it; "
            f"expected 0700: chmod 700 {path}"
        )
    return path


def read_own(path: Path) -> Found | None:
    """A regular file that this user alone may write, or None: absent, unreadable, or not that."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        mine = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not stat.S_ISREG(status.st_mode) or not mine:
            return None
        with open(fd, "rb", closefd=False) as file:
            return Found(file.read(), status.st_mtime)
    except OSError:
        return None
    finally:
        os.close(fd)


def regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:  # removed since it was made
        return []
    except OSError as error:
        raise SetupError(f"cannot list {directory}: {error}; set WEFT_CACHE to another") from error


def remove(path: Path) -> None:
    """Remove what stands at `path`, links themselves, a directory only if it is empty."""
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise in_the_way(path) from error


def in_the_way(path: Path) -> SetupError:
    return SetupError(
        f"{path} is in the way of compiled code: it is not a file that weft wrote there and "
        "cannot be replaced; remove it, or set WEFT_CACHE to another directory"
    )
