"""The doctor on two ranks: faults are planted in checks, and what the user reads is compared."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from bigsgan.doctor import examine
from bigsgan.doctor import ranks as doctor_ranks
from bigsgan.doctor.checks import Subject
from bigsgan.runtime import comm
from tests.planted import plant


class Kept:
    """A report that keeps the results."""

    def begin(self, ranks, checks):
        self.results = []

    def add(self, result):
        self.results.append(result)

    def end(self):
        self.results = tuple(self.results)


def examined(names, faulty=1):
    """Checks of these names on this rank of a pool: whether all is well, and what rank 0 shows."""
    name = f"doctor{faulty}{names}"
    default = dist.distributed_c10d._get_default_store()
    job = doctor_ranks.Job(dist.PrefixStore(name, default), comm.open_board(name), comm.rank(), comm.world_size())
    report = Kept()
    is_well = examine.Examiner(Subject(job), job, report).examine(plant(names, faulty))
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
