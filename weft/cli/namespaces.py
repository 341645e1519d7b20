# SPDX-License-Identifier: Apache-2.0
"""Emulates hosts on one machine by network namespaces, connected to a switch by veth links."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import subprocess

ADDRESS = "10.77.0.{}"  # address of a host, counted from 1
CLONE_NEWNET = 0x40000000


def run_ip(*args: str) -> str:
    """Run the command `ip` and return its output. Raises CalledProcessError if it fails."""
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout


@functools.cache
def can_create_namespaces() -> bool:
    """Whether this process may create network namespaces and links."""
    name = f"weft-{os.getpid()}-try"
    try:
        run_ip("netns", "add", name)
        try:
            run_ip("-n", name, "link", "add", "bridge", "type", "bridge")
        finally:
            run_ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class Namespaces:
    """Context manager that creates the namespaces of hosts, with addresses `ADDRESS` on eth0."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._name = f"weft-{os.getpid()}"

    def __enter__(self) -> Namespaces:
        remove_stale()
        try:
            self._create("switch")
            run_ip("-n", self.get_name("switch"), "link", "add", "bridge", "type", "bridge")
            run_ip("-n", self.get_name("switch"), "link", "set", "bridge", "up")
            for host in range(self.hosts):
                self._create(host)
                self._connect(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in _list_namespaces():
            if name.startswith(f"{self._name}-"):
                run_ip("netns", "delete", name)

    def get_name(self, which: int | str) -> str:
        """Return the name of a host's namespace, or of the "switch", as `ip netns` uses it."""
        return f"{self._name}-{which}"

    def _create(self, which: int | str) -> None:
        run_ip("netns", "add", self.get_name(which))
        run_ip("-n", self.get_name(which), "link", "set", "lo", "up")

    def _connect(self, host: int) -> None:
        namespace, switch, port = self.get_name(host), self.get_name("switch"), f"port{host}"
        run_ip(
            "-n",
            switch,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            namespace,
        )
        run_ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        run_ip("-n", namespace, "address", "add", f"{ADDRESS.format(host + 1)}/24", "dev", "eth0")
        run_ip("-n", namespace, "link", "set", "eth0", "up")


def remove_stale() -> None:
    """Delete the namespaces of processes that no longer exist."""
    for name in _list_namespaces():
        match = re.fullmatch(r"weft-(\d+)-(switch|\d+|try)", name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):
            with contextlib.suppress(subprocess.CalledProcessError):  # another process deleted it
                run_ip("netns", "delete", name)


def _list_namespaces() -> list[str]:
    return [line.split()[0] for line in run_ip("netns", "list").splitlines()]


def enter_namespace(name: str) -> None:
    """Move this thread and its later threads to a namespace. Raises OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"setns to {name}: {os.strerror(error)}")
