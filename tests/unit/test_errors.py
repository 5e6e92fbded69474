"""The form of messages, and how ranks exit that leave the printing to another."""

from __future__ import annotations

import errno
import pickle
import signal
import subprocess
import sys

import pytest

from bigsgan.errors import UserError, counted, reason

WAITING = """
from bigsgan import errors
errors.time.sleep = lambda seconds, sleep=errors.time.sleep: (print("waiting", flush=True), sleep(seconds))
errors.wait_for_termination()
"""


@pytest.mark.parametrize("one", ["image", "other file", "class", "micro-batch", "entry"])
def test_one_thing_is_no_several(one):
    several = {"class": "classes", "micro-batch": "micro-batches", "entry": "entries"}.get(one, f"{one}s")
    assert [counted(num, one) for num in (0, 1, 2)] == [f"0 {several}", f"1 {one}", f"2 {several}"]


def test_a_silent_rank_that_is_ended_has_the_status_of_bad_input():
    """`srun --kill-on-bad-exit` sends SIGTERM, and the job's status is the highest of its tasks'."""
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 2


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("a.b", 4, "must be 1 or 3", "set a.b=1"), "a.b: must be 1 or 3, got 4; set a.b=1"),
        (("a.b", 4, "must be 1 or 3", "set a.b=1", "grey"), "a.b: must be 1 or 3, got 4 (grey); set a.b=1"),
        (("a.b", True, "must be false", "set it"), "a.b: must be false, got true; set it"),
        (("a.b", None, "must be given", "add it"), "a.b: must be given; add it"),
        (("a.b", None, "unknown key", "did you mean a.c?"), "a.b: unknown key; did you mean a.c?"),
        (("--out", "x", "cannot be written: why", "move it"), "--out: 'x' cannot be written: why; move it"),
        (("a", "x", "does not exist", "make it", "since noon"), "a: 'x' does not exist (since noon); make it"),
    ],
)
def test_the_two_forms_of_a_message(arguments, text):
    error = UserError(*arguments)
    assert str(error) == text
    assert str(pickle.loads(pickle.dumps(error))) == text


@pytest.mark.parametrize(
    "error, path, text",
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/x/y"), "/x/y", "Is a directory"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y/z"), "/x/y", "Permission denied: /x/y/z"),
        (OSError(errno.ENOSPC, "No space left on device"), "/x", "No space left on device"),
        (ValueError("two\n  lines"), "", "two lines"),
        (KeyError(), "", "KeyError"),
    ],
)
def test_reasons_name_another_file_alone(error, path, text):
    assert reason(error, path) == text
