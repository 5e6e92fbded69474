"""A wait for all ranks that may take hours: a counter in the store that they share, and no process group."""

import os
import time
from pathlib import Path

import torch.distributed as dist

from bigsgan.runtime import comm, division
from tests.distributed import scenarios
from tests.distributed.test_state import ADAM
from tests.tiny import both


def passed(seconds):
    """When this rank came to each barrier and when it passed it; each rank is late for one."""
    found = []
    for late in range(comm.world_size()):
        wait = comm.patient_barrier()
        time.sleep(seconds if comm.rank() == late else 0)
        came = time.monotonic()
        wait()
        found.append((came, time.monotonic()))
    return found


def test_nobody_passes_before_all_have_come(ranks):
    by_rank = ranks(2).run(passed, 0.5)
    for barrier in zip(*by_rank, strict=True):
        assert min(left for _, left in barrier) >= max(came for came, _ in barrier)


def in_parts():
    """Barriers of both parts of a divided job, of which one has more, and of the whole job."""
    division.divide([[0], [1]])
    with division.within_part():
        for _ in range(1 + comm.rank()):
            comm.patient_barrier()()
    comm.patient_barrier()()
    division.unite()
    comm.patient_barrier()()
    return True


def test_parts_of_a_job_have_their_own(ranks):
    assert ranks(2).run(in_parts) == [True, True]


def saved(overrides, ds, directory):
    """Process groups and open files, after one save and after three."""
    run, found = scenarios.build(overrides, ds), []
    for nimg in (8, 16, 24):
        run.counters.nimg = nimg
        scenarios.save(run, Path(directory))
        found.append((len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))))
    scenarios.destroy(run)
    return found


def test_saves_make_no_groups_and_no_connections(ranks, tmp_path):
    for overrides in ([], ["engines.generator.ranks=1"]):
        for first, second, third in ranks(2).run(saved, [*ADAM, *overrides], both(1), str(tmp_path / str(overrides))):
            assert first[0] == second[0] == third[0]
            assert third[1] <= first[1]
