"""Requests to stop: which signals, whose parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bigsgan.signals import STOPPING
from bigsgan.training.stopping import StopRequests


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_noted_and_has_its_usual_effect_after_a_failure(number):
    before = signal.getsignal(number)
    requests = StopRequests(launched=False)
    assert requests.reason is None

    def fail() -> None:
        with requests.listening():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGUSR1)  # the first one counts
            assert requests.reason == number.name
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert signal.getsignal(number) is before


def test_a_process_that_has_finished_ends_with_its_own_status():
    code = """
import atexit, os, signal, sys
from bigsgan.training.stopping import StopRequests
requests = StopRequests(launched=False)
with requests.listening():
    pass
requests.end_undisturbed()
class AtTheVeryEnd:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):
        kill(process, number)
sys.kept = AtTheVeryEnd()
sys.exit(85)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 85


STUCK = """
import ctypes, sys
from bigsgan.training import stopping
from bigsgan.training.stopping import StopRequests
stopping._JOINING_SECONDS = float(sys.argv[1])
requests = StopRequests(launched=False)
with requests.listening():
    with requests.joining(85):
        pass
    print("joined", flush=True)
    sys.stdin.readline()
    with requests.joining(85):
        print("again", flush=True)
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)  # for ever, and no handler in Python runs
"""


ENDS = {
    "SIGTERM": (60, 85, "stopped by SIGTERM before all ranks had come"),
    "SIGUSR1": (60, 85, "stopped by SIGUSR1 before all ranks had come"),
    "SIGTERM before": (60, 85, "stopped by SIGTERM before all ranks had come"),
    "nothing": (1, 1, "not all ranks came within 1 s: the launcher's messages say which ended"),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_process_that_waits_for_other_ranks_ends_at_once(what):
    """But one that has joined goes on, as it may have something to save."""
    seconds, status, message = ENDS[what]
    number = getattr(signal, what.split()[0], None)
    command = [sys.executable, "-c", STUCK, str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "RANK": "0"}, **pipes) as process:
        assert process.stdout.readline() == "joined\n"
        if what.endswith("before"):
            process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "again\n"
        if number is not None and not what.endswith("before"):
            process.send_signal(number)
        _, error = process.communicate(timeout=20)
    assert process.returncode == status
    assert error == f"bigsgan: {message}\n"


CHILD = """
import os, sys, time
from bigsgan.training.stopping import StopRequests
requests = StopRequests(launched=sys.argv[1] == "launched")
print(os.getpid(), requests.reason, flush=True)
time.sleep(1.5)
print(requests.reason, flush=True)
"""


@pytest.mark.parametrize("how", ["launched", "by hand"])
def test_the_end_of_a_launcher_is_noted(how):
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); import time; time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, CHILD, how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline().endswith(" None\n")
    parent.kill()
    parent.wait()
    assert parent.stdout.readline() == ("the end of its launcher\n" if how == "launched" else "None\n")
    time.sleep(0.1)
