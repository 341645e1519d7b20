"""The disk cache where something else stands in the place of its files."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.errors import SetupError
from weft.jit.cache import Cache, key_of

META = {"name": "thing", "kind": "shared", "arch": "x86_64"}
KEY = key_of(entry="int x;")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", lock_timeout=5.0)


def refuse() -> bytes:
    raise AssertionError("nothing should be built")


def make_directory(path: Path) -> None:
    path.mkdir()


def make_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("keep")


def make_link_to_a_copy(path: Path) -> None:
    """Where it points is right, today."""
    copy = path.with_name("copy")
    path.rename(copy)
    path.symlink_to(copy)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_PATH)
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def make_writable_by_others(path: Path) -> None:
    path.chmod(0o666)


ODD = [
    make_directory,
    make_link_to_a_copy,
    make_loop,
    make_pipe,
    make_socket,
    make_writable_by_others,
]
KEEP = (make_link_to_a_copy, make_writable_by_others)  # they begin with the entry's own file


@pytest.mark.parametrize("part", ["data", "json"])
@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_file_of_weft_is_built_again(
    cache: Cache, part: str, odd: Callable[[Path], None]
) -> None:
    path = cache.put(KEY, b"code", META).with_suffix(f".{part}")
    if odd not in KEEP:
        path.unlink()
    odd(path)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert cache.get(KEY) is None
    assert len(os.listdir("/proc/self/fd")) == descriptors
    if part == "json":
        assert cache.entries() == []
    assert cache.fetch(KEY, lambda: b"again", dict(META)) == b"again"
    assert cache.get(KEY) == b"again"
    assert path.is_file()
    assert not path.is_symlink()
    assert cache.clear() == 1


@pytest.mark.parametrize("part", ["data", "json"])
@pytest.mark.parametrize("odd", [each for each in ODD if each not in KEEP])
def test_clear_removes_what_stands_in_an_entrys_place(
    cache: Cache, part: str, odd: Callable[[Path], None]
) -> None:
    odd(cache.path / f"{KEY}.{part}")
    assert cache.clear() == (part == "json")
    assert list(cache.path.iterdir()) == []


@pytest.mark.parametrize("part", ["data", "json"])
def test_a_directory_with_somebodys_files_is_not_removed(cache: Cache, part: str) -> None:
    path = cache.path / f"{KEY}.{part}"
    make_full_directory(path)
    assert cache.get(KEY) is None
    for call in (lambda: cache.fetch(KEY, lambda: b"code", dict(META)), cache.clear):
        with pytest.raises(SetupError, match=rf"{KEY}.{part} is in the way .*remove it"):
            call()
    assert (path / "inside").read_text() == "keep"
    assert not [each for each in cache.path.iterdir() if each.suffix in (".tmp", ".lock")]


@pytest.mark.parametrize("odd", [make_directory, make_pipe, make_socket])
def test_a_lock_that_is_no_file_is_reported(cache: Cache, odd: Callable[[Path], None]) -> None:
    odd(cache.path / f"{KEY}.lock")
    descriptors = len(os.listdir("/proc/self/fd"))
    for call in (lambda: cache.fetch(KEY, refuse, dict(META)), cache.clear):
        with pytest.raises(SetupError, match=rf"{KEY}.lock is in the way .*remove it"):
            call()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_leftover_that_is_a_directory_is_removed(cache: Cache) -> None:
    (cache.path / f".{KEY}.00ff.tmp").mkdir()
    assert cache.fetch(KEY, lambda: b"code", dict(META)) == b"code"
    (cache.path / f".{KEY}.00ff.tmp").mkdir()
    assert cache.clear() == 1
    assert list(cache.path.iterdir()) == []


SIDECARS: dict[str, list[Any]] = {
    "bytes": ["4", None, -1, 1e999, True, [4], 10**30],
    "created": ["now", None, [], {}, True, -1, 1e999, float("nan")],
    "sha256": [None, 7, [], {"a": 1}],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in SIDECARS for value in SIDECARS[field]]
)
def test_a_sidecar_with_odd_types_is_no_entry(cache: Cache, field: str, value: object) -> None:
    path = cache.put(KEY, b"code", META).with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    if field == "sha256":
        assert cache.get(KEY) is None
    else:
        assert cache.entries() == []
    path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": ""}))
    assert cache.fetch(KEY, lambda: b"again", dict(META)) == b"again"
    assert [entry.bytes for entry in cache.entries()] == [5]


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "7", '"{}"', "null", ""])
def test_a_sidecar_that_is_no_mapping_is_built_again(cache: Cache, text: str) -> None:
    cache.put(KEY, b"code", META).with_suffix(".json").write_text(text)
    assert cache.get(KEY) is None
    assert cache.entries() == []
    assert cache.fetch(KEY, lambda: b"again", dict(META)) == b"again"


def test_the_holder_of_a_lock_may_be_written_in_any_bytes(cache: Cache) -> None:
    path = cache.path / f"{KEY}.lock"
    path.write_bytes(b"\xff\xfe\x00" * 1000)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SetupError, match=r"waited 0 s .*to build 'thing'"):
            Cache(cache.path, lock_timeout=0.0).fetch(KEY, refuse, dict(META))


def test_a_directory_that_is_gone_has_no_entries(cache: Cache) -> None:
    cache.path.rmdir()
    assert cache.entries() == []
    assert cache.clear() == 0
    with pytest.raises(SetupError, match="cannot open lock file"):
        cache.fetch(KEY, refuse, dict(META))


def test_a_link_of_ones_own_is_followed_once(tmp_path: Path) -> None:
    for name in ("real", "other"):
        (tmp_path / name).mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("real")
    cache = Cache(link)
    assert cache.path == tmp_path.resolve() / "real"
    cache.put(KEY, b"code", META)
    link.unlink()
    link.symlink_to("other")
    assert cache.get(KEY) == b"code"
    assert Cache(link / "below").path == tmp_path.resolve() / "other" / "below"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives links away")
@pytest.mark.parametrize("below", ["", "weft"])
def test_a_link_of_another_user_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("real")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(SetupError, match=r"link is a symbolic link of user 12345.*WEFT_CACHE"):
        Cache(link / below)
    assert list((tmp_path / "real").iterdir()) == []


def test_where_a_link_leads_is_judged_as_the_directory_itself(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    with pytest.raises(SetupError, match=r"open has mode 0777"):
        Cache(tmp_path / "link")
    (tmp_path / "nowhere").symlink_to("absent")
    with pytest.raises(SetupError, match="set WEFT_CACHE"):
        Cache(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(SetupError, match="set WEFT_CACHE"):
        Cache(tmp_path / "circle" / "cache")
