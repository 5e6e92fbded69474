"""A lock keeps a second process out, ends with the process that holds it, and is done without where there is none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigsgan.errors import UserError
from bigsgan.runtime import locking

HOLD = """
import os, sys, time
from pathlib import Path
from bigsgan.runtime.locking import hold
hold(Path(sys.argv[1]), "out", "run", "wait")
if os.fork() == 0:
    print(os.getppid(), flush=True)
    os.close(1)
time.sleep(600)
"""


def hold(path: Path, remedy: str = "wait for its end"):
    return locking.hold(path, "out", "run", remedy)


def test_a_killed_process_lets_go_though_a_child_of_its_lives(tmp_path):
    path = tmp_path / ".lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            with pytest.raises(UserError) as caught:
                hold(path)
            told = str(caught.value)
            assert told.startswith(f"out: 'run' is in use by process {pid} on {socket.gethostname()} since 20")
            assert told.endswith("; wait for its end")
            process.kill()
            process.wait()
            hold(path)()
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_who_has_let_go_is_not_named_any_more(tmp_path):
    path = tmp_path / ".lock"
    release = hold(path)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        hold(path)
    release()
    assert path.read_text() == ""
    again = hold(path)
    release()  # once more, which is not the second's
    with pytest.raises(UserError, match="in use by process"):
        hold(path)
    again()


def test_a_holder_on_another_host_is_waited_for(tmp_path, monkeypatch, caplog):
    """Its host may be lost, and the server keep the lock for a while."""
    path = tmp_path / ".lock"
    release = hold(path)
    path.write_text(json.dumps({"host": "lost", "pid": 7, "since": "noon"}))
    monkeypatch.setattr(locking, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(locking, "_POLL_SECONDS", 0.05)
    start = time.monotonic()
    with pytest.raises(UserError, match="out: 'run' is in use by process 7 on lost since noon; wait for its end"):
        hold(path)
    assert 0.3 <= time.monotonic() - start < 10
    assert caplog.messages == ["run is in use by process 7 on lost since noon, waiting for 0 s in case it is dead"]
    polls = []
    monkeypatch.setattr(locking.time, "sleep", lambda seconds: (polls.append(seconds), release()))
    hold(path)()
    assert polls == [0.05]


def test_a_lock_on_a_file_that_was_removed_counts_for_nothing(tmp_path, monkeypatch):
    """As between two processes, of which the first removes the directory at its end."""
    path = tmp_path / ".lock"
    real, files = fcntl.flock, []

    def flock(file, operation):
        real(file, operation)
        files.append(file)
        if len(files) == 1:
            path.unlink()

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    release = hold(path)
    assert os.path.samestat(os.fstat(files[-1].fileno()), path.stat())
    assert files[0].closed
    release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, number):
    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locking.fcntl, "flock", refuse)
    hold(tmp_path / ".lock")()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{tmp_path / '.lock'} is on a file system without locks ([Errno {number}] " in record.message


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_only_a_file_of_its_own_is_locked_and_emptied(tmp_path, kind):
    (tmp_path / "important").write_text("kept")
    if kind == "pipe":
        os.mkfifo(tmp_path / "lock")
    else:
        (tmp_path / "lock").symlink_to(tmp_path / ("important" if kind == "link" else "missing"))
    with pytest.raises(UserError, match="cannot be locked: "):
        hold(tmp_path / "lock")
    assert (tmp_path / "important").read_text() == "kept"
    assert not (tmp_path / "missing").exists()


def test_a_full_disk_does_not_keep_anybody_out(tmp_path, monkeypatch):
    class Full(locking.FileIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(locking, "FileIO", Full)
    release = hold(tmp_path / ".lock")
    monkeypatch.setattr(locking, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(locking, "_POLL_SECONDS", 0.01)
    with pytest.raises(UserError, match="is in use by another process; wait"):
        hold(tmp_path / ".lock")
    release()
