"""A wait for all ranks that may take hours: a counter in the store that they share, and no process group."""

import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
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


def in_parts():
    """Barriers of a part of a divided job, and of the whole job, at which the other part is late."""
    division.divide([[0, 1], [2]])
    is_alone = comm.rank() == 2
    with division.within_part():
        own = [] if is_alone else passed(0.3)
    wait = comm.patient_barrier()
    time.sleep(2 if is_alone else 0)
    came = time.monotonic()
    wait()
    left = time.monotonic()
    division.unite()
    return own, (came, left)


@pytest.mark.slow
def test_parts_of_a_job_have_their_own(ranks):
    (first, whole_first), (second, whole_second), (_, late) = ranks(3).run(in_parts)
    for (came, left), (other_came, other_left) in zip(first, second, strict=True):
        assert min(left, other_left) >= max(came, other_came)
    assert max(left for _, left in [*first, *second]) < late[0]
    assert min(whole_first[1], whole_second[1]) >= late[0]


def left_behind():
    """What the second rank hears where the first has ended with a message and does not come."""
    wait = comm.patient_barrier()
    if comm.rank() == 0:
        return ""
    with mock.patch.multiple(comm, _LOOK_ROUND=timedelta(seconds=0.2), another_rank_spoke=lambda: True):
        try:
            wait()
        except RuntimeError as error:
            return str(comm.is_lost_connection(error))
    return "passed"


def test_nobody_waits_for_a_rank_that_has_ended(ranks):
    assert ranks(2).run(left_behind) == ["", "True"]


def saved(overrides, ds, directory):
    """How many process groups a run's saves make."""
    run = scenarios.build(overrides, ds)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        for nimg in (8, 16, 24):
            run.counters.nimg = nimg
            scenarios.save(run, Path(directory))
    scenarios.destroy(run)
    return new_group.call_count


@pytest.mark.slow
def test_saves_make_no_groups(ranks, tmp_path):
    for overrides in ([], ["engines.generator.ranks=1"]):
        assert ranks(2).run(saved, [*ADAM, *overrides], both(1), str(tmp_path / str(len(overrides)))) == [0, 0]
