"""How a rank ends whose connection to others is lost."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing

import pytest
import torch.distributed as dist

from bigsgan.monitor import open_rank_log
from bigsgan.runtime import comm, ending, roster

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.1]:1234\nstack"


def end(monkeypatch, spoke, text=GLOO, kind=RuntimeError):
    waited = []
    monkeypatch.setattr(comm, "another_rank_spoke", lambda: spoke)
    monkeypatch.setattr(ending, "wait_for_termination", lambda status=2: waited.append("ended"))
    monkeypatch.setattr(ending.time, "sleep", waited.append)

    def work():
        raise kind(text)

    return ending.exit_status(work), waited


@pytest.mark.parametrize("spoke, waits", [(False, []), (None, [5.0])])
def test_a_lost_connection_is_told_with_rank_host_and_phase(monkeypatch, tmp_path, capsys, spoke, waits):
    """And is a failure, after which an agent starts the ranks again; bad input it would not."""
    with closing(open_rank_log(tmp_path, 0, print)) as log:
        log.phase = "update 12"
        assert end(monkeypatch, spoke) == (1, waits)
    assert capsys.readouterr().err == (
        f"bigsgan: rank 0 on {socket.gethostname()} lost its connection in phase 'update 12': "
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.1]:1234; "
        "another rank or its host failed first\n"
    )
    assert "Traceback" in log.path.read_text()


def test_a_lost_connection_without_a_text_is_told_by_its_kind(monkeypatch, capsys):
    assert end(monkeypatch, False, "", dist.DistNetworkError) == (1, [])
    assert "lost its connection in phase 'start': DistNetworkError; another rank" in capsys.readouterr().err


@pytest.fixture
def two_sides():
    """This process is rank 0, which holds G; rank 1 holds D, in a process that can be killed."""
    with subprocess.Popen(["sleep", "60"]) as other:
        own = roster.own("generator")
        roster.know([own, own._replace(process=other.pid, holds="discriminator")])
        yield other
        roster.know(())
        other.kill()


def test_a_rank_that_was_killed_is_named_by_the_one_that_waited_for_it(monkeypatch, tmp_path, capsys, two_sides):
    with closing(open_rank_log(tmp_path, 0, print)) as log:
        log.phase, log.awaited = "update 12", lambda: ("D judges", [1])
        two_sides.kill()
        status, waited = end(monkeypatch, None)
    assert status == 1
    assert 5.0 not in waited  # for a message, which a rank that was killed has not left
    host = socket.gethostname()
    assert capsys.readouterr().err == (
        f"bigsgan: rank 1 (discriminator) on {host} (process {two_sides.pid}) ended without a message: killed, or "
        f"crashed; rank 0 (generator) on {host} lost its connection in phase 'update 12', waiting for rank 1 "
        "(discriminator) in 'D judges': [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
        "peer [10.77.0.1]:1234\n"
    )


@pytest.mark.usefixtures("two_sides")
@pytest.mark.parametrize("first", [True, False])
def test_one_rank_tells_of_a_lost_connection(monkeypatch, capsys, first):
    monkeypatch.setattr(comm, "claim_failure", lambda: first)
    monkeypatch.setattr(roster, "_ENDING_SECONDS", 0.0)
    assert end(monkeypatch, False) == (1, [] if first else ["ended"])
    assert ("rank 0 (generator) on" in capsys.readouterr().err) == first


@pytest.mark.usefixtures("two_sides")
def test_an_error_of_one_of_several_ranks_is_announced(monkeypatch, capsys):
    monkeypatch.setattr(comm, "world_size", lambda: 2)
    monkeypatch.setattr(comm, "claim_failure", lambda: True)

    def work():
        raise KeyError("layer 3")

    def end_process(status):
        raise SystemExit(status)

    monkeypatch.setattr(ending, "end_process", end_process)
    with pytest.raises(SystemExit, match="1"):
        ending.exit_status(work)
    line, *trace = capsys.readouterr().err.splitlines()
    where = f"rank 0 (generator) on {socket.gethostname()}"
    assert line == f"bigsgan: {where} failed in phase 'start': KeyError: 'layer 3'"
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "KeyError: 'layer 3'"


def test_after_another_ranks_message_this_one_is_silent(monkeypatch, capsys):
    assert end(monkeypatch, True) == (2, ["ended"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("spoke", [False, None])
def test_our_own_mistakes_keep_their_traceback(monkeypatch, spoke):
    with pytest.raises(RuntimeError, match="shape"):
        end(monkeypatch, spoke, "mat1 and mat2 have another shape")


ABORTING = """
import atexit, os
from bigsgan.errors import UserError, at_end
from bigsgan.runtime import comm, ending, roster
atexit.register(os.abort)  # stands for threads of libraries that do not survive the end of Python
at_end(lambda: print("left behind no files"))
comm.claim_message, comm.world_size = lambda: True, lambda: {ranks}
def work():
    print("said before")
    raise UserError("batch", 3, "must be even", "set batch=4")
raise SystemExit(ending.exit_status(work))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks, status", [(2, 2), (1, -6)])
def test_one_of_several_ranks_ends_without_taking_libraries_down(ranks, status):
    command = [sys.executable, "-u", "-c", ABORTING.format(ranks=ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert "bigsgan: batch: must be even, got 3; set batch=4" in done.stderr
    assert done.stdout.endswith("said before\nleft behind no files\n")
