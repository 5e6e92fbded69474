"""Notices on any host that the process or the host of another rank is gone.

Each rank listens, and is connected to the next one. The system of the other host ends that connection with the process,
whatever the process was doing, and stays silent with its host. No data is sent.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from bigsgan.runtime import launched

_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
"""Seconds and tries after which the system gives up a host that does not answer: 14 s."""

_CONNECTING_SECONDS = 3.0


class Door:
    """Where this rank listens; its connections are never accepted, and end with the process.

    Attributes:
        address: The host and port, as others reach it.
    """

    def __init__(self) -> None:
        """Listen at a free port."""
        family = socket.AF_INET6 if socket.has_ipv6 and socket.has_dualstack_ipv6() else socket.AF_INET
        self._listening = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=16
        )
        self.address = f"{_own_host()} {self._listening.getsockname()[1]}"


class Line:
    """The connection to another rank."""

    def __init__(self) -> None:
        """Begin without one."""
        self._socket: socket.socket | None = None

    def holds(self, address: str) -> bool | None:
        """Return whether the connection is there, made now if need be: not if it has ended and cannot be made again.

        None if it was never made: the other rank has ended already, or is behind a firewall. Waits for 3 s at most.
        """
        if self._socket is not None and not _has_ended(self._socket):
            return True
        host, _, port = address.rpartition(" ")
        try:
            made = socket.create_connection((host, int(port)), _CONNECTING_SECONDS)
        except OSError:
            return None if self._socket is None else False
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if self._socket is not None:
            self._socket.close()
        self._socket = made
        return True


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _own_host() -> str:
    """Return this host's address on the way to the meeting place; that itself for rank 0, whose host it is."""
    host, port = launched.meeting_place()
    if launched.rank() == 0:
        return host
    with suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect(address)  # sends nothing
                return str(way.getsockname()[0])
    return os.uname().nodename
