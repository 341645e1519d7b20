"""The disk cache: one build for many processes, no trust in damaged or foreign files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from weft.errors import InvalidArgument, SetupError
from weft.jit.cache import Cache, default_path, key_of
from weft.jit.source import INCLUDE_ROOT

META = {"name": "thing", "kind": "shared", "arch": "x86_64", "compiler": "c++ 12"}
KEY = key_of(entry="int x;")

# One process that wants an entry: appends a line to the log when it builds, prints what it got.
BUILDER = """
import os, sys, time
from pathlib import Path
from weft.jit.cache import Cache
directory, key, log, seconds = sys.argv[1:]
def build():
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(float(seconds))
    return b"built"
path = Cache(Path(directory), lock_timeout=1800).get_or_build(
    key, build, {"name": "thing", "kind": "shared"}
)
print(path.read_bytes().decode())
"""


def start_builder(directory: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(directory), KEY, str(log), str(seconds)],
        env={**os.environ, "PYTHONPATH": str(INCLUDE_ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, seconds: float = 1800.0) -> None:
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear within {seconds} s"
        time.sleep(0.01)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", lock_timeout=600.0)


def refuse() -> bytes:
    raise AssertionError("nothing should be built")


def test_key_depends_on_every_part_and_on_its_name() -> None:
    keys = {
        key_of(entry="a", options=["b", "c"]),
        key_of(entry="a", options=["bc"]),
        key_of(entry="a", options="bc"),
        key_of(entry="a", headers=["b", "c"]),
        key_of(entry="b", options=["b", "c"]),
    }
    assert len(keys) == 5
    assert key_of(x="1", y="2") == key_of(y="2", x="1")


def test_put_then_get(cache: Cache) -> None:
    assert cache.get(KEY) is None
    path = cache.put(KEY, b"code", META)
    assert path.read_bytes() == b"code"
    assert cache.get(KEY) == b"code"
    assert cache.get_or_build(KEY, refuse, dict(META)) == path
    assert cache.fetch(KEY, refuse, dict(META)) == b"code"


def test_sidecar_says_what_the_entry_is(cache: Cache) -> None:
    path = cache.put(KEY, b"code", META)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    assert sidecar.keys() == {*META, "created", "bytes", "sha256"}
    assert sidecar["bytes"] == 4
    assert sidecar["name"] == "thing"


def test_build_may_add_to_the_sidecar(cache: Cache) -> None:
    meta: dict[str, object] = dict(META)

    def build() -> bytes:
        meta["log"] = "used 12 registers"
        return b"code"

    path = cache.get_or_build(KEY, build, meta)
    assert json.loads(path.with_suffix(".json").read_text())["log"] == "used 12 registers"


def test_modes_are_private(cache: Cache) -> None:
    code = cache.put(KEY, b"code", META)
    program = cache.put(key_of(entry="main"), b"code", {**META, "kind": "program"})
    assert cache.path.stat().st_mode & 0o777 == 0o700
    assert code.stat().st_mode & 0o777 == 0o600
    assert code.with_suffix(".json").stat().st_mode & 0o777 == 0o600
    assert program.stat().st_mode & 0o777 == 0o700


def test_nothing_but_the_entry_is_left_behind(cache: Cache) -> None:
    cache.get_or_build(KEY, lambda: b"code", dict(META))
    assert sorted(path.name for path in cache.path.iterdir()) == [f"{KEY}.data", f"{KEY}.json"]


def test_two_processes_one_build(tmp_path: Path) -> None:
    log = tmp_path / "log"
    builders = [start_builder(tmp_path / "cache", log, 0.5) for _ in range(2)]
    outputs = [builder.communicate()[0].strip() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert outputs == ["built", "built"]
    assert len(log.read_text().splitlines()) == 1


def test_many_threads_one_build(cache: Cache) -> None:
    builds: list[int] = []
    results: list[bytes] = []

    def build() -> bytes:
        builds.append(threading.get_ident())
        time.sleep(0.1)
        return b"code"

    def want() -> None:
        results.append(cache.fetch(KEY, build, dict(META)))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"code"] * 8
    assert len(builds) == 1


def test_killed_builder_releases_its_lock(tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = start_builder(tmp_path / "cache", log, 600)
    try:
        wait_for(log)
        leftover = tmp_path / "cache" / f".{KEY}.0123456789abcdef.tmp"
        leftover.write_bytes(b"half")
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        assert victim.returncode == -signal.SIGKILL
        path = Cache(tmp_path / "cache", lock_timeout=600).get_or_build(
            KEY, lambda: b"built by another", dict(META)
        )
    finally:
        victim.kill()
        victim.wait()
    assert path.read_bytes() == b"built by another"
    assert not leftover.exists()
    assert not path.with_suffix(".lock").exists()


def test_waiting_for_a_builder_has_a_deadline(tmp_path: Path) -> None:
    log = tmp_path / "log"
    holder = start_builder(tmp_path / "cache", log, 600)
    try:
        wait_for(log)
        with pytest.raises(SetupError, match=rf"waited 0.2 s .*pid {holder.pid}.*'thing'"):
            Cache(tmp_path / "cache", lock_timeout=0.2).get_or_build(KEY, refuse, dict(META))
        assert Cache(tmp_path / "cache").clear() == 0  # and does not pull the rug from under it
        assert (tmp_path / "cache" / f"{KEY}.lock").exists()
    finally:
        holder.kill()
        holder.communicate()


def test_a_build_that_raises_leaves_the_entry_free(cache: Cache) -> None:
    def fail() -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get_or_build(KEY, fail, dict(META))
    assert list(cache.path.iterdir()) == []
    assert cache.fetch(KEY, lambda: b"code", dict(META)) == b"code"


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("data", b"codE"),
        ("data", b""),
        ("data", None),
        ("json", b"{"),
        ("json", b"[]"),
        ("json", b"{}"),
        ("json", b"\xff\xfe"),
        ("json", None),
    ],
)
def test_a_damaged_entry_is_built_again(cache: Cache, part: str, content: bytes | None) -> None:
    path = cache.put(KEY, b"code", META).with_suffix(f".{part}")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert cache.get(KEY) is None
    assert cache.fetch(KEY, lambda: b"again", dict(META)) == b"again"
    assert cache.get(KEY) == b"again"


def test_entries_lists_what_is_stored(cache: Cache) -> None:
    keys = [key_of(entry=str(i)) for i in range(3)]
    for i, key in enumerate(keys):
        cache.put(key, b"x" * (i + 1), {**META, "name": f"thing{i}"})
    (cache.path / "notes.json").write_text("{}")
    (cache.path / f"{key_of(entry='bad')}.json").write_text("{")
    found = cache.entries()
    assert [entry.key for entry in found] == keys
    assert [entry.bytes for entry in found] == [1, 2, 3]
    assert [entry.name for entry in found] == ["thing0", "thing1", "thing2"]
    assert {entry.kind for entry in found} == {"shared"}
    assert {entry.arch for entry in found} == {"x86_64"}


def test_get_marks_the_time_of_last_use(cache: Cache) -> None:
    sidecar = cache.put(KEY, b"code", META).with_suffix(".json")
    os.utime(sidecar, (1.0, 1.0))
    assert cache.entries()[0].last_used == 1.0
    cache.get(KEY)
    assert cache.entries()[0].last_used > 1.0


def test_clear_removes_entries_and_nothing_else(cache: Cache) -> None:
    for i in range(3):
        cache.put(key_of(entry=str(i)), b"code", META)
    (cache.path / f"{KEY}.lock").touch()  # of a builder that was killed
    (cache.path / f".{KEY}.00ff.tmp").touch()
    (cache.path / "mine.txt").write_text("keep")
    assert cache.clear() == 3
    assert [path.name for path in cache.path.iterdir()] == ["mine.txt"]
    assert cache.entries() == []
    assert cache.clear() == 0


def test_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SetupError, match=r"mode 0777.*expected 0700: chmod 700"):
        Cache(tmp_path)


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(SetupError, match=rf"belongs to user {mine}.*runs as user {mine + 1}"):
        Cache(tmp_path)


def test_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="set WEFT_CACHE"):
        Cache(tmp_path / "file" / "cache")


def test_lock_that_cannot_be_opened_is_reported(cache: Cache) -> None:
    (cache.path / f"{KEY}.lock").symlink_to(cache.path / "elsewhere")
    with pytest.raises(SetupError, match=f"{KEY}.lock is in the way .*remove it"):
        cache.get_or_build(KEY, refuse, dict(META))


def test_disk_that_refuses_is_reported(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SetupError, match=r"cannot write 4 bytes.*No space left"):
        cache.put(KEY, b"code", META)
    assert list(cache.path.iterdir()) == []


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "w"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    monkeypatch.setenv("HOME", str(tmp_path / "h"))
    assert default_path() == tmp_path / "w"
    monkeypatch.delenv("WEFT_CACHE")
    assert default_path() == tmp_path / "x" / "weft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path() == tmp_path / "h" / ".cache" / "weft"


def test_bad_key_and_bad_meta_are_refused(cache: Cache) -> None:
    with pytest.raises(InvalidArgument, match="64 hex digits"):
        cache.get("../../etc/passwd")
    with pytest.raises(InvalidArgument, match="lacks kind"):
        cache.put(KEY, b"code", {"name": "thing"})
