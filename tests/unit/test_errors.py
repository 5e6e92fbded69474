"""How the ranks end that leave the speaking to another."""

from __future__ import annotations

import signal
import subprocess
import sys

WAITING = """
from bigsgan import errors
errors.time.sleep = lambda seconds, sleep=errors.time.sleep: (print("waiting", flush=True), sleep(seconds))
errors.wait_to_be_ended()
"""


def test_a_silent_rank_that_is_ended_has_the_status_of_bad_input():
    """`srun --kill-on-bad-exit` sends SIGTERM, and the job's status is the highest of its tasks'."""
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 2
