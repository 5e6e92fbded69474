"""Processes that have imported torch and deepspeed, from which ranks fork: these take seconds of a core to import.

Forked before any thread or group of torch's is there. Ranks of one pool come from two of them by turns: each has a seed
of its own for hashes, so that what follows the order of a set differs between ranks, as between those of a launcher.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np

SPAWN = multiprocessing.get_context("spawn")
MODULES = (
    "deepspeed",
    "bigsgan.runtime.comm",
    "tests.tiny",
    "tests.distributed.scenarios",
    "tests.stand_in.sanitizing",
    "bigsgan.engines.compiling",  # with torch's compiler, which torch's optimizers import too
)
"""What a rank imports."""

SECONDS = 100
"""Within which a process has begun, or has gone that is killed."""


class Forked:
    """A rank's process, which the nursery's process is the parent of."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        until = time.monotonic() + SECONDS
        while os.path.exists(f"/proc/{self.pid}") and time.monotonic() < until:
            time.sleep(0.002)


class Nursery:
    """One such process.

    Args:
        environment: Variables that it and its ranks begin with.
        modules: What it imports, in this order.
    """

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = MODULES) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        with mock.patch.dict(os.environ, environment):
            SPAWN.Process(target=_tend, args=(theirs, modules), daemon=True).start()
        theirs.close()

    def begin(self, function: Callable[..., None], *arguments: Any) -> Callable[[], tuple[Forked, Connection]]:
        """Have a process call ``function(pipe, *arguments)``; the returned function waits until it is there."""
        directory = tempfile.mkdtemp()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{directory}/socket")
        listener.listen()
        listener.settimeout(SECONDS)
        self._pipe.send((f"{directory}/socket", function, arguments))

        def wait() -> tuple[Forked, Connection]:
            with listener:
                ours, _ = listener.accept()
            shutil.rmtree(directory)
            ours.setblocking(True)
            pipe = Connection(ours.detach())
            return Forked(pipe.recv()), pipe

        return wait


@lru_cache
def nurseries(accelerator: str) -> tuple[Nursery, ...]:
    """The two of this process. Their ranks have a thread each, as tensors are small and cores are few."""
    return tuple(Nursery({"DS_ACCELERATOR": accelerator, "OMP_NUM_THREADS": "1"}) for _ in range(2))


def _tend(pipe: Connection, modules: Sequence[str]) -> None:
    gc.disable()  # a sixth of the imports' time
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks
    while True:
        try:
            address, function, arguments = pipe.recv()
        except EOFError:
            return
        if not os.fork():
            try:
                pipe.close()
                _begin(address, function, arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)


def _begin(address: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    np.random.seed()
    theirs = socket.socket(socket.AF_UNIX)
    theirs.connect(address)
    connection = Connection(theirs.detach())
    connection.send(os.getpid())
    function(connection, *arguments)
