"""One message for an error that ranks on several hosts find before they are connected, without a collective.

Rank 0 prints the message, and then answers at the rendezvous address until all other hosts have asked.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

_PATIENCE_SECONDS = 30.0
"""How long rank 0 and the others wait for each other: few imports come before this point."""

_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.2
_WORD = b"rank 0 of bigsgan has spoken\n"


def is_on_another_host() -> bool:
    """Return whether this rank may be on another host than rank 0, where global and local ranks are equal.

    Ranks that see a device of their own all have the local rank 0, and LOCAL_SIZE says so: they are counted as hosts.
    """
    return _number("RANK") != _number("LOCAL_RANK") and _address() is not None


def tell_other_hosts(patience: float = _PATIENCE_SECONDS) -> None:
    """Tell ranks of other hosts that this one, rank 0, has spoken, until all have asked or ``patience`` is over."""
    num, address = _number("WORLD_SIZE", 1) - _number("LOCAL_SIZE", _number("LOCAL_WORLD_SIZE", 1)), _address()
    if num <= 0 or address is None:
        return
    until = time.monotonic() + patience
    with suppress(OSError), socket.create_server(("", address[1])) as server:
        while num > 0 and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(ConnectionError), server.accept()[0] as connection:
                connection.sendall(_WORD)
                num -= 1


def rank_zero_spoke(patience: float = _PATIENCE_SECONDS) -> bool:
    """Whether rank 0, on another host, has spoken; not where it waits for the ranks there, or does not answer."""
    address, until = _address(), time.monotonic() + patience
    while address is not None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(address, _ANSWER_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            try:
                return connection.recv(len(_WORD)) == _WORD
            except TimeoutError:  # the ranks' store, which waits to be asked
                return False
        time.sleep(_POLL_SECONDS)
    return False


def _address() -> tuple[str, int] | None:
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT")
    # torchrun may keep the store itself, and answers for a rank 0 that has ended.
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return (host, port) if host and 0 < port < 65_536 and not kept else None


def _number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else default
