# SPDX-License-Identifier: Apache-2.0
"""Emulates hosts on one machine: network namespaces on one switch, joined by veth links."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import subprocess

ADDRESS = "10.77.0.{}"  # address of a host, counted from 1
CLONE_NEWNET = 0x40000000


def ip(*words: str) -> str:
    """Run `ip WORDS` and return its output. Raises CalledProcessError if it fails."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@functools.cache
def can_create() -> bool:
    """Whether this process may create network namespaces and links between them."""
    name = f"weft-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "bridge", "type", "bridge")
        finally:
            ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class Namespaces:
    """A context manager of hosts with addresses `ADDRESS` on eth0."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._name = f"weft-{os.getpid()}"

    def __enter__(self) -> Namespaces:
        remove_abandoned()
        try:
            self._create("switch")
            ip("-n", self.of("switch"), "link", "add", "bridge", "type", "bridge")
            ip("-n", self.of("switch"), "link", "set", "bridge", "up")
            for host in range(self.hosts):
                self._create(host)
                self._connect(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in _namespaces():
            if name.startswith(f"{self._name}-"):
                ip("netns", "delete", name)

    def of(self, which: int | str) -> str:
        """Return the name of a host's namespace, or of the "switch", as `ip netns` uses it."""
        return f"{self._name}-{which}"

    def _create(self, which: int | str) -> None:
        ip("netns", "add", self.of(which))
        ip("-n", self.of(which), "link", "set", "lo", "up")

    def _connect(self, host: int) -> None:
        own, switch, port = self.of(host), self.of("switch"), f"port{host}"
        ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", own)
        ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", own, "address", "add", f"{ADDRESS.format(host + 1)}/24", "dev", "eth0")
        ip("-n", own, "link", "set", "eth0", "up")


def remove_abandoned() -> None:
    """Delete the namespaces of processes that were killed."""
    for name in _namespaces():
        match = re.fullmatch(r"weft-(\d+)-(switch|\d+|try)", name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):
            with contextlib.suppress(subprocess.CalledProcessError):  # another process deleted it
                ip("netns", "delete", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines()]


def enter(name: str) -> None:
    """Move this thread, and threads that it starts later, to a namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {name}: {os.strerror(number)}")
