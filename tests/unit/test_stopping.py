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
