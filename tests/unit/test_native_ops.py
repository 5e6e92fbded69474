"""A killed build's lock is found; a running build is waited for."""

import subprocess
import threading
import time

import pytest

from bigsgan.engines.native_ops import refuse_stale_lock
from bigsgan.errors import UserError


def test_no_lock_is_no_trouble(tmp_path):
    started = time.monotonic()
    refuse_stale_lock(tmp_path / "never built", grace_seconds=5)
    assert time.monotonic() - started < 1


def test_a_killed_build_is_reported_with_its_remedy(tmp_path):
    (tmp_path / "lock").touch()
    with pytest.raises(UserError, match="left by a build that was killed") as caught:
        refuse_stale_lock(tmp_path, grace_seconds=0.5)
    assert f"rm {tmp_path / 'lock'}" in str(caught.value)
    assert (tmp_path / "lock").exists()


def test_a_lock_that_goes_away_in_time_is_no_trouble(tmp_path):
    (tmp_path / "lock").touch()
    timer = threading.Timer(0.5, (tmp_path / "lock").unlink)
    timer.start()
    refuse_stale_lock(tmp_path, grace_seconds=20)
    timer.join()
    assert not (tmp_path / "lock").exists()


def test_a_running_build_is_waited_for(tmp_path):
    """A process that works in the directory, as ninja does, outlasts the grace and then removes the lock."""
    (tmp_path / "lock").touch()
    with subprocess.Popen(["sh", "-c", "sleep 1.5; rm lock"], cwd=tmp_path) as builder:
        started = time.monotonic()
        refuse_stale_lock(tmp_path, grace_seconds=0.3)
        assert time.monotonic() - started > 1
        assert builder.wait() == 0
