"""The doctor on two ranks: faults are planted in checks, and what the user reads is compared."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from bigsgan.doctor import examine, watch
from bigsgan.doctor import ranks as doctor_ranks
from bigsgan.doctor.checks import Subject
from bigsgan.runtime import comm
from tests import REPOSITORY
from tests.distributed.launching import TIMEOUT, needs_two_devices
from tests.examined import Kept
from tests.planted import plant
from tests.ports import free_port


def examined(names, faulty=1):
    """Checks of these names on this rank of a pool: whether all is well, and what rank 0 shows."""
    name = f"doctor{faulty}{names}"
    default = dist.distributed_c10d._get_default_store()
    job = doctor_ranks.Job(dist.PrefixStore(name, default), comm.open_board(name), comm.rank(), comm.world_size())
    report = Kept()
    is_well = examine.Examiner(Subject(job), report).examine(plant(names, faulty))
    job.leave()
    if comm.rank():
        return is_well, None
    return is_well, [
        (r.check.name, r.finding.status, r.finding.said, r.rank, [f.status for f in r.findings]) for r in report.results
    ]


def host(rank):
    return f"rank {rank} on {os.uname().nodename}"


def test_the_worst_rank_speaks(ranks):
    (first, shown), (second, nothing) = ranks(2).run(examined, ["good", "fails", "is_not_for_some", "good"])
    assert (first, second, nothing) == (False, False, None)
    assert shown == [
        ("planted.good", "pass", "all is well", 1, ["pass", "pass"]),
        ("planted.fails", "fail", f"{host(1)}: it is broken", 1, ["pass", "fail"]),
        ("planted.is_not_for_some", "pass", "all is well", 1, ["not applicable", "pass"]),
        ("planted.good", "pass", "all is well", 1, ["pass", "pass"]),
    ]


@pytest.mark.parametrize("faulty", [0, 1])
def test_an_exception_fails_its_check_and_the_doctor_goes_on(ranks, faulty):
    found = ranks(2).run(examined, ["raises", "raises_before_a_gather", "collective"], faulty)
    assert [is_well for is_well, _ in found] == [False, False]
    alone, before, after = found[0][1]
    said = f"{host(faulty)}: ValueError: a planted error"
    assert alone == ("planted.raises", "fail", said, faulty, ["fail", "pass"] if faulty == 0 else ["pass", "fail"])
    more = " (and 1 more rank)"
    assert before[1:3] == ("fail", said.replace(":", f"{more}:", 1))
    assert after[1:3] == ("pass", "added")


def launched(directory, launcher, faulty, *names):
    """The doctor with planted checks on two ranks of a launcher."""
    ranks = ["--num_gpus", "2", "--no_python"] if launcher == "deepspeed" else ["--nproc_per_node", "2", "--no-python"]
    if launcher == "none":
        return by_hand(faulty, *names)
    program = directory / "planted.sh"  # deepspeed puts --local_rank behind the program's name
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -m tests.planted {faulty} {' '.join(names)}\n")
    program.chmod(0o755)
    command = [launcher, *ranks, "--master_port", str(free_port()), str(program)]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(REPOSITORY), "PATH": f"{os.path.dirname(sys.executable)}:{env['PATH']}"}
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=TIMEOUT)


def by_hand(faulty, *names):
    """The same with ranks whose launcher ends none of them."""
    port, processes = str(free_port()), []
    for rank in map(str, range(2)):
        env = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "tests.planted", str(faulty), *names]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=env, text=True, **pipes))
    outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    statuses = [process.returncode for process in processes]
    return subprocess.CompletedProcess(statuses, max(statuses), *map("".join, zip(*outputs, strict=True)))


def last_words(done):
    return [line for line in done.stderr.splitlines() if line.startswith("bigsgan doctor: ")]


@needs_two_devices
@pytest.mark.parametrize(
    "launcher, faulty",
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("torchrun", 0), ("none", 1)]),
        *(pytest.param("deepspeed", faulty, marks=pytest.mark.nightly) for faulty in (0, 1)),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [("torchrun", 1), ("none", 0)]),
    ],
)
def test_a_rank_that_dies_ends_the_doctor_with_one_line(tmp_path, launcher, faulty):
    done = launched(tmp_path, launcher, faulty, "good", "dies", "good")
    # Nobody but a launcher tells of the death of another rank than the store's.
    said = f"no answer from {host(1)} within 5 s" if (launcher, faulty) == ("none", 1) else f"{host(faulty)} died"
    assert last_words(done) == [
        f"bigsgan doctor: planted.dies: {said}; the doctor ends here; `--only planted.dies` runs this check alone"
    ], done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("planted")] in (
        [["planted.good", "pass"]],
        [],  # rank 0 is the one that prints
    )
    assert done.returncode != 0


@needs_two_devices
@pytest.mark.parametrize(
    "faulty", [pytest.param(0, marks=pytest.mark.nightly), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_rank_that_hangs_ends_the_doctor_with_one_line(tmp_path, faulty):
    start = time.monotonic()
    done = launched(tmp_path, "none", faulty, "good", "hangs", "good")
    said = watch.last_words("planted.hangs", f"no answer from {host(faulty)} within 5 s").rstrip()
    assert last_words(done) == [said], done.stderr
    assert done.args[0] == done.args[1] == 1
    assert time.monotonic() - start < 60


@pytest.mark.slow
@needs_two_devices
@pytest.mark.parametrize("names, status", [(["good", "collective"], 0), (["good", "fails"], 1)])
def test_the_exit_status_says_whether_all_passed(tmp_path, names, status):
    done = launched(tmp_path, "torchrun", 1, *names)
    assert done.returncode == status, done.stderr
    assert f"{2 - status} passed, {status} failed, 0 not applicable" in done.stdout
    assert ("remedy: mend it" in done.stdout) == bool(status)
    again = "again, by the same launcher: bigsgan doctor --only planted.fails"
    assert (again in done.stdout) == bool(status)


@pytest.mark.slow
@needs_two_devices
def test_a_collective_that_a_rank_does_not_come_to(tmp_path):
    done = launched(tmp_path, "none", 1, "collective", "raises_before_a_collective", "collective", "good")
    shown = [line.split(maxsplit=3) for line in done.stdout.splitlines() if line.startswith("planted.")]
    assert [(name, result, said) for name, result, _, said in shown] == [
        ("planted.collective", "pass", "added"),
        ("planted.raises_before_a_collective", "FAIL", f"{host(1)} (and 1 more rank): ValueError: a planted error"),
        ("planted.collective", "n/a", "the ranks have no connection since planted.raises_before_a_collective"),
        ("planted.good", "pass", "all is well"),
    ], done.stderr
    assert done.args == [1, 1]
