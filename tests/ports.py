"""Ports for the ranks of tests."""

from __future__ import annotations

import random
import socket

RANGE = range(15_000, 32_000)
"""Below the ports that Linux gives to outgoing connections (32768 and above), of which one could take a port that was
found free before rank 0 listens there."""

_random = random.Random()  # not the seeded one: tests beside this one must find other ports


def free_port() -> int:
    """A port of this host on which nothing listens."""
    while True:
        port = _random.choice(RANGE)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
