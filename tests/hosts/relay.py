# SPDX-License-Identifier: Apache-2.0
"""A relay between two links that delays every frame: a link with latency.

Usage: python -m tests.hosts.relay LINK LINK    in the namespace of both. Each line on stdin is the
delay from then on, in seconds; frames keep their order. The end of stdin is the relay's.
"""

from __future__ import annotations

import ctypes
import fcntl
import select
import socket
import struct
import sys
import time
from collections import deque

ALL = 3  # ETH_P_ALL
SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, _STSO, _SGSO


def send_whole_frames(link: str) -> None:
    """Make a link send frames as on a wire: split to size and with checksums."""
    with socket.socket() as control:
        for which in OFFLOADS:
            off = ctypes.create_string_buffer(struct.pack("II", which, 0))
            request = struct.pack("16sQ16x", link.encode(), ctypes.addressof(off))
            fcntl.ioctl(control, SIOCETHTOOL, request)


def main() -> None:
    """Relay until stdin ends."""
    links = []
    for name in sys.argv[1:]:
        link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
        link.bind((name, ALL))
        links.append(link)
    delay = float(sys.stdin.readline())
    held: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, to, frame = held.popleft()
            to.send(frame)
        wait = max(0.0, held[0][0] - now) if held else None
        ready = select.select([*links, sys.stdin], [], [], wait)[0]
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            delay = float(line)
        for place, link in enumerate(links):
            if link not in ready:
                continue
            frame, where = link.recvfrom(1 << 16)
            if where[2] != socket.PACKET_OUTGOING:  # type: ignore[attr-defined, unused-ignore]
                held.append((time.monotonic() + delay, links[1 - place], frame))


if __name__ == "__main__":
    main()
