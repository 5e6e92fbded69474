"""One message for an error that ranks on several hosts find before they are connected, without a collective.

Rank 0 prints the message, and then answers at the rendezvous address until all other hosts have asked.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress

from bigsgan.errors import number_from_environment as number
from bigsgan.runtime.launched import has_launcher, keeps_store

_PATIENCE_SECONDS, _BY_HAND_SECONDS = 30.0, 10.0
"""How long rank 0 and the others wait for each other, as few imports come before this point: launched, and by hand."""

_STORE_SECONDS, ALONE_SECONDS = 10.0, 2.0
"""How long a rank that has an error of its own waits for the store that ranks meet at: launched, and by hand."""

_ANSWER_SECONDS = 1.0
_POLL_SECONDS = 0.2
_WORD = b"rank 0 of bigsgan has spoken\n"


def is_on_another_host() -> bool:
    """Return whether this rank may be on another host than rank 0: on rank 0's, global and local ranks are equal.

    Ranks that each see only their own device all have local rank 0 and LOCAL_SIZE 1: each counts as a host.
    """
    return number("RANK") != number("LOCAL_RANK") and _address() is not None


def tell_other_hosts(patience: float | None = None) -> None:
    """Tell the ranks of other hosts that rank 0, this one, has spoken, until all have asked or ``patience`` is over."""
    patience = patience or (_PATIENCE_SECONDS if has_launcher() else _BY_HAND_SECONDS)
    num, address = number("WORLD_SIZE", 1) - number("LOCAL_SIZE", number("LOCAL_WORLD_SIZE", 1)), _address()
    if num <= 0 or address is None:
        return
    if not has_launcher():  # with a launcher, the others are there
        text = f"rank 0 of {number('WORLD_SIZE')} waits up to {patience:.0f} s for ranks on other hosts, to end them"
        print(f"bigsgan: {text}", file=sys.stderr, flush=True)
    until = time.monotonic() + patience
    with suppress(OSError), socket.create_server(("", address[1])) as server:
        while num > 0 and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(ConnectionError), server.accept()[0] as connection:
                connection.sendall(_WORD)
                num -= 1


def rank_zero_spoke(patience: float = _PATIENCE_SECONDS) -> bool:
    """Return whether rank 0, on another host, has spoken; False if its store waits for ranks or does not answer."""
    address, until = _address(), time.monotonic() + patience
    while address is not None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(address, _ANSWER_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            try:
                return connection.recv(len(_WORD)) == _WORD
            except TimeoutError:  # it is the rendezvous store, which sends nothing before it is asked
                return False
        time.sleep(_POLL_SECONDS)
    return False


def meets_store() -> bool:
    """Return whether somebody listens where ranks meet, if need be after the seconds in which rank 0 may come so far.

    It is asked without torch, which tries for longer and prints its own frames. Without a launcher this rank may be
    alone, and does not wait long.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), number("MASTER_PORT")
    is_launched = has_launcher()
    until = time.monotonic() + (_STORE_SECONDS if is_launched else ALONE_SECONDS)
    while host and 0 < port < 65_536 and time.monotonic() < until:
        try:
            socket.create_connection((host, port), _ANSWER_SECONDS).close()
            return True
        except ValueError:  # no host can have that name
            return False
        except OSError as error:
            if isinstance(error, socket.gaierror) and not is_launched:  # else its name may come later, as a pod's
                return False
            time.sleep(_POLL_SECONDS)
    return False


def _address() -> tuple[str, int] | None:
    host, port = os.environ.get("MASTER_ADDR"), number("MASTER_PORT")
    # torchrun may host the store itself, and then answers for a rank 0 that has ended.
    return (host, port) if host and 0 < port < 65_536 and keeps_store(0) else None
