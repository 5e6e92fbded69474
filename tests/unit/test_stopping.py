"""Requests to stop: which signals, whose parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigsgan.runtime.signals import STOPPING, is_training
from bigsgan.training import stopping
from bigsgan.training.stopping import StopRequests
from tests import REPOSITORY
from tests.tiny import tiny_recipe


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_noted_and_has_its_usual_effect_after_a_failure(request, number):
    inherited = signal.signal(number, signal.SIG_DFL)  # `nohup` ignores SIGHUP, and what is ignored stays so
    request.addfinalizer(lambda: signal.signal(number, inherited))
    requests = StopRequests(launched=False)
    assert requests.reason is None

    def fail() -> None:
        with requests.listening():
            signal.raise_signal(number)  # to this thread: of two for the process, another may get the first
            signal.raise_signal(signal.SIGUSR1)  # the first one counts
            assert requests.reason == number.name
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert signal.getsignal(number) is signal.SIG_DFL


BACKGROUND = """
import os, signal, sys
from bigsgan.runtime.signals import Noted
from bigsgan.training.stopping import StopRequests
number = signal.Signals[sys.argv[1]]
signal.signal(number, signal.SIG_IGN)
noted = Noted() if sys.argv[2:] else None
requests = StopRequests(launched=False, noted=noted)
with requests.listening():
    os.kill(os.getpid(), number)
    print(requests.reason)
"""


@pytest.mark.parametrize("name, noted", [("SIGINT", []), ("SIGHUP", ["noted"])])
def test_a_job_in_the_background_ignores_what_its_shell_or_nohup_has_set(name, noted):
    command = [sys.executable, "-c", BACKGROUND, name, *noted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


INTERRUPTED = """
import importlib, os, signal, sys
from bigsgan import __main__ as command
imported = importlib.import_module
def interrupted(name, package=None):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    return imported(name, package)
importlib.import_module = interrupted
sys.exit(command.main(sys.argv[3:]))
"""


def interrupted(directory, *words):
    command = [sys.executable, "-c", INTERRUPTED, *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_before_anything_is_imported_ends_a_run_with_its_status(name, tmp_path):
    tiny_recipe(tmp_path)
    done = interrupted(tmp_path, name, "bigsgan.cli", "train", "--config", "tiny.yaml", "--stopped-status", "85")
    assert "Traceback" not in done.stderr
    message = f"bigsgan: stopped by {name} before training started; the same command resumes"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (85, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_ctrl_c_before_anything_is_imported_ends_any_command_without_a_traceback(tmp_path):
    done = interrupted(tmp_path, "SIGINT", "bigsgan.cli", "plan", "--config", "missing.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "name, status, where",
    [
        ("SIGINT", 130, "bigsgan.trainer"),
        ("SIGTERM", -signal.SIGTERM, "bigsgan.cli"),
        ("SIGHUP", -signal.SIGHUP, "bigsgan.commands.choosing"),
    ],
)
def test_a_dry_run_ends_at_once(name, status, where, tmp_path):
    """There is nothing to save."""
    tiny_recipe(tmp_path)
    done = interrupted(tmp_path, name, where, "train", "--config", "tiny.yaml", "out=run", "--dry-run")
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


@pytest.mark.parametrize("word", ["--dry-run", "--dr", "--print=batch", "--pr", "--list", "--help", "-h"])
def test_what_only_checks_or_prints_does_not_train(word):
    assert is_training(["train", "--config", "tiny.yaml", "--data-root=--dry-run"])
    assert not is_training(["--local_rank=0", "train", "--config", "tiny.yaml", word])


CLOSED = """
import os, sys
from bigsgan import cli
status = cli.main(["train", "--config", "missing.yaml"])
assert [sys.stdin.read(), sys.stderr.isatty()] == ["", False]
print("said", file=sys.stderr, flush=True)
file = os.open("file", os.O_CREAT | os.O_RDWR)
os.write(1, b"printed by a library")
sys.exit(status if file > 2 else 99)
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed, tmp_path):
    command = f"exec {sys.executable} -c '{CLOSED}' {closed}"
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, shell=True, cwd=tmp_path, timeout=60, **pipes)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == ""
    if "2>&-" not in closed:
        assert "bigsgan: --config: 'missing.yaml' does not exist" in done.stderr


def test_a_process_that_has_finished_ends_with_its_own_status():
    code = """
import atexit, os, signal, sys
from bigsgan.training.stopping import StopRequests
requests = StopRequests(launched=False)
with requests.listening():
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
stopping._SAVING_SECONDS = 1
requests = StopRequests(launched=bool(sys.argv[2:]))
with requests.listening():
    print("listening", flush=True)
    sys.stdin.readline()
    requests.end_at_once(85)
    if sys.argv[2:]:
        requests.joined()
    print("at once", flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)  # for ever, and no handler in Python runs
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


ENDS = {
    "SIGTERM": (60, 85, "stopped by SIGTERM before training started; the same command resumes"),
    "SIGTERM before": (60, 85, "stopped by SIGTERM before training started; the same command resumes"),
    "nothing": (1, 1, "not all ranks started within 1 s; see the launcher's messages for the rank that failed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_a_process_that_has_nothing_to_save_ends_at_once(what):
    """But before its input is known to be good the request is only noted."""
    seconds, status, message = ENDS[what]
    number = getattr(signal, what.split()[0], None)
    command = [sys.executable, "-c", STUCK, str(seconds)]
    with subprocess.Popen(command, env={**os.environ, "RANK": "0"}, **PIPES) as process:
        assert process.stdout.readline() == "listening\n"
        if what.endswith("before"):
            process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert what.endswith("before") or process.stdout.readline() == "at once\n"
        if number is not None and not what.endswith("before"):
            process.send_signal(number)
        _, error = process.communicate(timeout=20)
    assert process.returncode == status
    assert error == f"bigsgan: {message}\n"


def wait_until_stuck(process):
    assert process.stdout.readline() == "listening\n"
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "at once\n"


@pytest.mark.slow
def test_a_rank_that_is_stuck_ends_some_time_after_its_launcher_though_it_has_something_to_save():
    parent = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait()"
    command = [sys.executable, "-c", parent, STUCK, "60", "launched"]
    with subprocess.Popen(command, env={**os.environ, "RANK": "0"}, **PIPES) as process:
        wait_until_stuck(process)
        process.kill()
        _, error = process.communicate(timeout=20)  # the pipe ends with the rank
    assert error == "bigsgan: stopped 1 s after the end of its launcher\n"


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_process_that_is_stuck_and_one_that_a_launcher_passes_on_does_not():
    command = [sys.executable, "-c", STUCK, "60", "launched"]
    with subprocess.Popen(command, env={**os.environ, "RANK": "0"}, **PIPES) as process:
        wait_until_stuck(process)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.7)  # so that the two are not one
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert error == "bigsgan: stopped by SIGINT after SIGINT, without saving; the same command resumes\n"


TRAIN = [sys.executable, str(REPOSITORY / "launch" / "train.py"), "--stopped-status", "85"]


@pytest.mark.slow
@pytest.mark.parametrize("number, seconds", [("SIGUSR1", 0), ("SIGTERM", 1.0)])
def test_a_signal_while_modules_are_imported_ends_the_run_with_its_status(tmp_path, number, seconds):
    """From the moment on in which the process can be told."""
    number = signal.Signals[number]
    tiny_recipe(tmp_path)
    command, pipes = [*TRAIN, "--config", "tiny.yaml"], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    start = time.monotonic()
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        while not all(caught(process.pid, other) for other in STOPPING):
            assert time.monotonic() - start < 60
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    last = error.splitlines()[-1]  # after what the libraries say that it had come to import
    assert last == f"bigsgan: stopped by {number.name} before training started; the same command resumes"
    assert "Traceback" not in error
    assert process.returncode == 85
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def caught(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


CHILD = """
import os, sys, time
from bigsgan.training.stopping import StopRequests
requests = StopRequests(launched=sys.argv[1] == "launched")
before, until = os.getppid(), time.monotonic() + (60 if sys.argv[2:] else 0)
print(os.getpid(), requests.reason, flush=True)
while os.getppid() == before and time.monotonic() < until:
    time.sleep(0.05)
print(requests.reason, flush=True)
"""


@pytest.mark.parametrize("how", ["launched", "by hand"])
def test_the_end_of_a_launcher_is_noted(how):
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); import time; time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, CHILD, how, "waits"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline().endswith(" None\n")
    parent.kill()
    parent.wait()
    assert parent.stdout.readline() == ("the end of its launcher\n" if how == "launched" else "None\n")


@pytest.mark.skipif(not stopping._is_adopter(1), reason="process 1 is a Python program, as launchers are")
@pytest.mark.parametrize("mark, reason", [("CROSS_SIZE", stopping.LAUNCHER_ENDED), ("OTHER", "None")])
def test_a_launcher_that_ended_before_its_rank_could_look_is_missed(mark, reason):
    """Where nothing says that there was one, as in a container whose process 1 starts ranks, nothing is missed."""
    code = """
import os, sys, time
before = os.getpid()
if os.fork() == 0:
    while os.getppid() == before:
        time.sleep(0.05)
    os.execv(sys.executable, sys.argv[1:])
"""
    environment = {**os.environ, mark: "1"}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    command = [sys.executable, "-c", code, sys.executable, "-c", CHILD, "launched"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert [line.split(maxsplit=1)[-1] for line in found[:1]] == [reason]


def test_a_launcher_that_an_adopter_has_started_is_no_end(monkeypatch):
    """Such as deepspeed.launcher.launch under srun (it leads a group), or under the `sh -c` of a container."""
    monkeypatch.setenv("CROSS_SIZE", "1")
    monkeypatch.setattr(stopping, "_launchers", lambda num=None: [700, 600])
    monkeypatch.setattr(stopping, "_is_adopter", lambda process: process == 600)
    for group, reason in [(700, None), (600, None), (699, stopping.LAUNCHER_ENDED)]:
        monkeypatch.setattr(os, "getpgid", lambda process, group=group: group)
        assert stopping.StopRequests(launched=True, signals=()).reason == reason
    monkeypatch.setattr(stopping, "_is_adopter", lambda process: process == 700)
    assert stopping.StopRequests(launched=True, signals=()).reason == stopping.LAUNCHER_ENDED


@pytest.mark.parametrize(
    "command, adopts",
    [
        ("/sbin/init", True),
        ("/tini\0--\0torchrun", True),
        ("/usr/bin/python3.11\0/usr/bin/torchrun", False),  # as a container's command
    ],
)
def test_who_takes_over_children(monkeypatch, command, adopts):
    monkeypatch.setattr(stopping, "_read", lambda process, file: command)
    assert stopping._is_adopter(1) == adopts
    assert not stopping._is_adopter(2)
    monkeypatch.setattr(stopping, "_read", lambda process, file: "/usr/lib/systemd/systemd\0--user")
    assert stopping._is_adopter(1000)
