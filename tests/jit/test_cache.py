# SPDX-License-Identifier: Apache-2.0
"""The disk cache: one build for all processes, atomic entries, a private directory."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.errors import SetupError
from weft.jit.cache import Cache, build_key, default_path
from weft.launcher.processes import start_fork_server

META = {"name": "thing", "kind": "cubin", "arch": "sm_90a", "compiler": "NVRTC 13.0"}
KEY = build_key(entry="int x;")
OTHER_USER = 65534


def store(cache: Cache, key: str = KEY, code: bytes = b"code") -> bytes:
    return cache.fetch(key, lambda: code, dict(META))


def refuse() -> bytes:
    raise AssertionError("nothing should be built")


def refuses(words: str, use: Callable[[], object]) -> None:
    with pytest.raises(SetupError, match=words):
        use()


def test_key_depends_on_every_part_and_on_its_name() -> None:
    keys = {
        build_key(entry="b", options=["b", "c"]),
        build_key(entry="a", headers=["b", "c"]),
        *(build_key(entry="a", options=each) for each in (["b", "c"], ["bc"], "bc")),
    }
    assert len(keys) == 5
    assert build_key(x="1", y="2") == build_key(y="2", x="1")


def test_an_entry_is_built_once_described_and_private(cache: Cache) -> None:
    meta: dict[str, object] = dict(META)

    def build() -> bytes:
        meta["log"] = "used 12 registers"
        return b"code"

    assert cache.fetch(KEY, build, meta) == cache.fetch(KEY, refuse, dict(META)) == b"code"
    head, code = cache.entry_path(KEY).read_bytes().split(b"\n", 1)
    described = json.loads(head)
    assert (code, {**described, **meta}) == (b"code", described)
    assert cache.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in cache.path.iterdir()} == {0o600}


def test_a_reader_sees_all_of_an_entry_or_nothing(cache, monkeypatch):
    """After everything is written and before the rename, there is no entry."""
    seen: list[tuple[list[str], list[str]]] = []
    sync = os.fsync

    def look(fd: int) -> None:
        sync(fd)
        names = sorted(path.suffix for path in cache.path.iterdir() if path.suffix != ".tmp")
        seen.append((names, [entry.key for entry in Cache(cache.path).entries()]))

    monkeypatch.setattr(os, "fsync", look)
    store(cache, code=b"code" * 100_000)
    assert seen == [([".lock"], [])]
    assert cache.fetch(KEY, refuse, dict(META)) == b"code" * 100_000
    assert not [path for path in cache.path.iterdir() if path.suffix == ".tmp"]


def fetch_slowly(folder: Path, seconds: float) -> None:
    """Fetch an entry, whose builder leaves a line in the log and takes so long."""

    def build() -> bytes:
        with open(folder / "log", "a") as file:
            file.write("built\n")
        time.sleep(seconds)
        return b"built"

    cache = Cache(folder / "cache", lock_timeout=1800)
    assert cache.fetch(KEY, build, dict(META)) == b"built"


def test_one_of_many_processes_builds_and_a_killed_one_releases_its_lock(tmp_path: Path) -> None:
    server, log = start_fork_server(), tmp_path / "log"
    first, *others = [
        server.Process(target=fetch_slowly, args=(tmp_path, seconds)) for seconds in (600, 0.2, 0.2)
    ]
    first.start()
    try:
        deadline = time.monotonic() + 1800
        while not (log.exists() and log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        waiting = Cache(tmp_path / "cache", lock_timeout=0.2)
        words = "waited 0.2 s for another process to build 'thing'"
        refuses(words, lambda: waiting.fetch(KEY, refuse, dict(META)))
        for each in others:
            each.start()
    finally:
        first.kill()
    for each in others:
        each.join()
        assert each.exitcode == 0
    assert len(log.read_text().splitlines()) == 2


def test_entries_are_listed_and_cleared_and_nothing_else(cache: Cache) -> None:
    keys = [build_key(entry=str(i)) for i in range(3)]
    for i, key in enumerate(keys):
        cache.fetch(key, (b"x" * (i + 1)).__bytes__, {**META, "name": f"thing{i}"})
    for name in (f"{build_key(entry='damaged')}.data", "notes.json"):
        (cache.path / name).write_text("{}")
    (cache.path / f"{KEY}.00ff.tmp").touch()  # of a builder that was killed
    result = cache.entries()
    assert [(entry.key, entry.bytes) for entry in result] == list(zip(keys, (1, 2, 3), strict=True))
    assert [entry.name for entry in result] == ["thing0", "thing1", "thing2"]
    assert {(entry.kind, entry.arch) for entry in result} == {("cubin", "sm_90a")}
    cache.clear()
    assert [path.name for path in cache.path.iterdir()] == ["notes.json"]
    assert store(cache) == b"code"
    assert (cache.clear(), cache.clear(), cache.entries()) == (1, 0, [])


def test_a_build_may_raise_and_another_process_clear_the_cache_meanwhile(cache: Cache) -> None:
    def build() -> bytes:
        cache.clear()
        return b"code"

    with pytest.raises(AssertionError, match="nothing should be built"):
        cache.fetch(KEY, refuse, dict(META))
    assert cache.fetch(KEY, build, dict(META)) == b"code"
    assert cache.fetch(KEY, refuse, dict(META)) == b"code"


@pytest.mark.parametrize(
    ("parts", "mode"),
    [
        *(("top/cache", mode) for mode in (0o770, 0o777, 0o702, 0o720, 0o1777, 0o2770)),
        *(("top", mode) for mode in (0o770, 0o703)),
    ],
)
def test_a_directory_that_others_may_write_is_refused(tmp_path, parts, mode):
    cache, place = Cache(tmp_path / "top" / "cache"), tmp_path / parts
    place.chmod(mode)
    fix = f"chmod go-w {place}" if parts == "top" else "expected 0700: chmod 700"
    for use in (lambda: Cache(cache.path), lambda: store(cache)):  # checked at every use
        refuses(rf"{place} has mode {mode:04o}.*{fix}", use)
    if parts == "top":
        place.chmod(mode | 0o1000)  # other users cannot rename entries
        assert store(cache) == b"code"


def test_directories_of_another_user_are_refused(tmp_path, monkeypatch):
    own = os.geteuid()
    if own == 0:
        cache = Cache(tmp_path / "top" / "cache")
        os.chown(cache.path.parent, OTHER_USER, OTHER_USER)
        words = rf"top belongs to user {OTHER_USER}.*this user or root"
        refuses(words, lambda: Cache(cache.path))
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    refuses(rf"belongs to user {own}.*runs as user {own + 1}", lambda: Cache(tmp_path))


def test_directories_are_made_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Cache(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert {(tmp_path / each).stat().st_mode & 0o777 for each in ("a", "a/b")} == {0o700}
    (tmp_path / "file").touch()
    refuses("set WEFT_CACHE", lambda: Cache(tmp_path / "file" / "cache"))


def test_a_link_is_followed_once_and_its_target_checked(tmp_path: Path) -> None:
    for name in ("real", "other"):
        (tmp_path / name).mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("real")
    cache = Cache(link)
    assert cache.path == tmp_path.resolve() / "real"
    store(cache)
    link.unlink()
    link.symlink_to("other")
    assert cache.fetch(KEY, refuse, dict(META)) == b"code"
    (tmp_path / "other").chmod(0o777)
    refuses("other has mode 0777", lambda: Cache(link))
    (tmp_path / "circle").symlink_to("circle")
    refuses("set WEFT_CACHE", lambda: Cache(tmp_path / "circle" / "cache"))


def renamed_entry(path: Path) -> None:
    other = build_key(entry="other")
    store(Cache(path.parent), other, b"other code")
    (path.parent / f"{other}.data").replace(path)


def symbolic_link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


def named_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def flipped_bit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


BAD: dict[str, Callable[[Path], object]] = {
    "group may write": lambda path: path.chmod(0o660),
    "others may write": lambda path: path.chmod(0o602),
    "another owner": lambda path: os.chown(path, OTHER_USER, OTHER_USER),
    "symbolic link": symbolic_link,
    "hard link": lambda path: os.link(path, path.with_suffix(".second")),
    "named pipe": named_pipe,
    "empty": lambda path: os.truncate(path, 0),
    "cut in its first line": lambda path: os.truncate(path, 20),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "bit flipped": flipped_bit,
    "of another key": renamed_entry,
    "planted code": lambda path: path.write_bytes(b"\x7fELF planted"),
    "first line of a list": lambda path: path.write_bytes(b"[1]\ncode"),
    "first line too deep": lambda path: path.write_bytes(b"[" * 100_000 + b"\ncode"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_entry_is_built_again(cache, name, caplog):
    if name == "another owner" and os.geteuid() != 0:
        pytest.skip("gives files to another user")
    store(cache)
    BAD[name](cache.entry_path(KEY))
    assert KEY not in [entry.key for entry in cache.entries()]
    assert store(cache, code=b"built again") == b"built again"
    assert "compiling it again" in caplog.text
    assert cache.fetch(KEY, refuse, dict(META)) == b"built again"
    status = cache.entry_path(KEY).lstat()
    assert (status.st_uid, status.st_mode & 0o777, status.st_nlink) == (os.geteuid(), 0o600, 1)


@pytest.mark.parametrize("planted", ["open to others", "link", "pipe"])
def test_lock_that_others_could_hold_is_replaced(cache: Cache, planted: str) -> None:
    lock, victim = cache.path / f"{KEY}.lock", cache.path / "victim"
    victim.write_text("keep")
    if planted == "link":
        lock.symlink_to(victim)
    elif planted == "pipe":
        os.mkfifo(lock)
    else:
        lock.touch()
        lock.chmod(0o666)
    assert store(cache) == b"code"
    assert victim.read_text() == "keep"


def test_file_system_errors_are_reported(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refuses(r"cannot write \d+ bytes.*No space left", lambda: store(cache))
    lock, file = cache.path / f"{KEY}.lock", cache.entry_path(KEY)
    assert [*cache.path.iterdir()] == [lock]
    file.mkdir()
    refuses(rf"cannot read .*{KEY}.data.*set WEFT_CACHE", lambda: store(cache))
    refuses(rf"cannot remove .*{KEY}.data.*by hand", cache.clear)
    file.rmdir()
    lock.unlink(missing_ok=True)
    lock.mkdir()
    refuses(rf"cannot lock .*{KEY}.lock.*set WEFT_CACHE", lambda: store(cache))


def test_default_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("WEFT_CACHE", ""), ("XDG_CACHE_HOME", "weft"), ("HOME", ".cache/weft")):
        monkeypatch.setenv(name, "/where")
        assert default_path() == Path("/where", folder)
        monkeypatch.delenv(name)
