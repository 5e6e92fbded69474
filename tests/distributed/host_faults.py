"""Faults of one rank's host, of its disk and of what is installed there, that the doctor has to find."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from bigsgan.doctor import host, same_hosts, storage, versions
from bigsgan.runtime import comm

FAULTY = 1


def locks_that_keep_nobody_out():
    """As a file system that is mounted without them: here alone, so that another process gets the lock."""
    return mock.patch.object(fcntl, "flock", return_value=None)


def old_library():
    found = {**versions.packages(), **({"deepspeed": "0.18.2"} if comm.rank() == FAULTY else {})}
    return mock.patch.object(versions, "packages", return_value=found)


def another_version():
    found = {**same_hosts.versions(), **({"torch": "2.8.0"} if comm.rank() == FAULTY else {})}
    return mock.patch.object(same_hosts, "versions", return_value=found)


@contextmanager
def another_file():
    """A copy of the package in which one line is added."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "bigsgan")
        shutil.copytree(same_hosts.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if comm.rank() == FAULTY:
            with (copy / "draws.py").open("a") as file:
                file.write("# edited on one host\n")
        with mock.patch.object(same_hosts, "PACKAGE", copy):
            yield


@contextmanager
def few_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if comm.rank() == FAULTY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def ranks_on_one_core():
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def small_shared_memory():
    """64 MiB, as Docker gives."""
    found = SimpleNamespace(f_bavail=16 << 10, f_bfree=16 << 10, f_blocks=16 << 10, f_frsize=4096)
    calls = {host.SHARED_MEMORY: found}
    return mock.patch.object(os, "statvfs", lambda path, real=os.statvfs: calls.get(path) or real(path))


@contextmanager
def directory_of_its_own():
    """What rank 0 writes is not seen on the other host."""

    def read(path, *arguments, real=Path.read_text, **options):
        if comm.rank() == FAULTY and path.name.startswith(".doctor-"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return real(path, *arguments, **options)

    with mock.patch.object(Path, "read_text", read), mock.patch.object(storage, "SHARED_SECONDS", 0.3):
        yield
