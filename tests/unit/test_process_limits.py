"""Limits of a process (`ulimit`), and a file system without inodes: what the messages name."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bigsgan import errors
from bigsgan.commands import parsing
from bigsgan.errors import UserError
from bigsgan.runtime import launched, limits, memory
from bigsgan.runtime.ending import exit_status
from bigsgan.runtime.paths import writing
from tests.examined import small_disk

UNLIMITED = resource.RLIM_INFINITY
MORE_MEMORY = "ulimit -v: must allow more KiB of address space, got 2000; run `ulimit -v unlimited` before"
TWENTY = "ulimit -n: must allow at least 128 open files, got 20; run `ulimit -n 65536` before"
FILES = "ulimit -n: must allow more open files, got 1024; run `ulimit -n 65536` before"


@pytest.fixture
def limited(monkeypatch):
    """Sets limits as this process sees them."""

    def limit(**given: int) -> None:
        found = {"RLIMIT_NOFILE": 1024, "RLIMIT_AS": UNLIMITED, "RLIMIT_NPROC": UNLIMITED, **given}
        numbers = {getattr(resource, name): (value, value) for name, value in found.items()}
        monkeypatch.setattr(resource, "getrlimit", numbers.__getitem__)

    limit()
    return limit


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files", "x"),
        RuntimeError("[enforce fail at loop.cc:48] rv != -1. -1 vs -1. pipe: Too many open files"),
    ],
)
def test_open_files(limited, error):
    assert str(limits.reached(error)) == FILES


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),
        RuntimeError("can't start new thread"),
    ],
)
def test_address_space(limited, error):
    assert limits.reached(error) is None  # without a limit, something else is the cause
    limited(RLIMIT_AS=2000 * 1024)
    assert str(limits.reached(error)) == MORE_MEMORY


def test_processes(limited, monkeypatch):
    limited(RLIMIT_NPROC=50)
    busy = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    with pytest.raises(OSError, match="temporarily") as lock:
        fail(busy)
    assert limits.reached(lock.value) is None  # of a lock or a pipe
    monkeypatch.setattr(subprocess, "_fork_exec", lambda *_: fail(busy))
    with pytest.raises(OSError, match="temporarily") as start:
        subprocess.run([sys.executable, "-c", ""], close_fds=True, cwd=".")
    said = "ulimit -u: must allow more processes and threads of this user, got 50"
    assert str(limits.reached(start.value)).startswith(said)


def test_other_errors_are_not_of_a_limit(limited):
    limited(RLIMIT_NOFILE=1, RLIMIT_AS=1, RLIMIT_NPROC=1)
    for error in (ValueError("x"), RuntimeError("connection reset"), OSError(errno.ENOENT, "No such file", "x"),
                  RuntimeError("could not create a grid")):  # fmt: skip
        assert limits.reached(error) is None


def test_few_open_files_are_refused_before_a_rank_would_fail_at_its_first_save(limited):
    limited(RLIMIT_NOFILE=limits.LEAST_FILES)
    launched.check_launcher()
    limited(RLIMIT_NOFILE=UNLIMITED)  # -1
    launched.check_launcher()
    limited(RLIMIT_NOFILE=20)
    with pytest.raises(UserError) as caught:
        launched.check_launcher()
    assert str(caught.value) == TWENTY


@pytest.mark.parametrize(
    "soft, hard, num_ranks, raised",
    [
        (64, 4096, 1, 520),
        (256, UNLIMITED, 64, 1024),
        (1024, 1 << 19, 1024, 8704),
        (1024, 4400, 1024, 4400),
        (1024, 1024, 2, None),
        (UNLIMITED, UNLIMITED, 1024, None),
        (1024, 4000, 1024, "ulimit -n: must allow at least 4220 open files, got 4000; run `ulimit -n 65536` before"),
    ],
)
def test_the_soft_limit_of_open_files_is_raised_as_the_ranks_need_it(monkeypatch, soft, hard, num_ranks, raised):
    now = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: now.__setitem__(slice(None), both))
    if isinstance(raised, str):
        with pytest.raises(UserError) as caught:
            limits.allow_open_files(num_ranks)
        assert str(caught.value) == raised
    else:
        limits.allow_open_files(num_ranks)
        assert now == [raised or soft, hard]


def fail(error: Exception) -> int:
    raise error


def test_a_limit_is_named_where_torch_is_loaded_and_where_ranks_work(limited, monkeypatch, capsys):
    limited(RLIMIT_AS=2000 * 1024)
    monkeypatch.setattr(parsing.importlib, "import_module", lambda name: fail(ImportError("failed to map segment")))
    with pytest.raises(UserError) as caught:
        parsing.import_late("bigsgan.trainer")
    assert str(caught.value) == MORE_MEMORY
    with pytest.raises(UserError) as caught, memory.naming_remedy("on rank 0", "set activation_checkpointing"):
        fail(MemoryError())
    assert str(caught.value) == MORE_MEMORY
    assert exit_status(lambda: fail(RuntimeError("pipe: Too many open files"))) == 2
    assert capsys.readouterr().err == f"bigsgan: {FILES}\n"


@pytest.mark.slow
def test_a_real_limit_of_open_files(tmp_path):
    script = f"ulimit -n 20; exec {sys.executable} -m bigsgan train out=run total_nimg=64"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"bigsgan: {TWENTY}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free, ends", [(0, "no inode left for another file; remove files there"), (1, "on device")])
def test_a_full_table_of_inodes_is_named(monkeypatch, tmp_path, free, ends):
    monkeypatch.setattr(errors.os, "statvfs", lambda path: SimpleNamespace(f_files=10, f_favail=free))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert errors.reason(error, tmp_path / "not" / "there").endswith(ends)


def test_a_file_system_without_inodes(tmp_path):
    disk = tmp_path / "small"
    with small_disk(disk, "4m,nr_inodes=3"):
        for name in "ab":
            (disk / name).write_text("x")
        said = "No space left on device: its file system has no inode left"
        with pytest.raises(UserError, match=said), writing(disk / "c"):
            (disk / "c").write_text("x")
