"""What a report says of all ranks, against what each of them put in."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from bigsgan.errors import UserError
from bigsgan.monitor import Statistics
from bigsgan.runtime import comm
from bigsgan.training import clock as clocks
from bigsgan.training import loop
from tests.distributed import scenarios
from tests.tiny import zero

PEAKS = [3 * 2**29, 2**28]  # 1.5 GiB and 0.25 GiB


def report(most_ranks_shown):
    """The memory in a report made after one update, and the collectives that the report took."""
    run = scenarios.build([], {"generator": zero(0), "discriminator": zero(0)})
    scenarios.update(run, 1)
    numbers = loop.scheduled(run.recipe, 0)
    with (
        patch.object(comm, "peak_memory_bytes", lambda: PEAKS[comm.rank()]),
        patch.object(loop, "MOST_RANKS_SHOWN", most_ranks_shown),
        patch.object(run.reporter, "report") as reported,
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
    ):
        loop._report_metrics(run, numbers, 0.5, clocks.Clock(0, run.reals))
    scenarios.destroy(run)
    (nimg, metrics), _ = reported.call_args
    assert nimg == 8
    assert {"loss/generator", "lr/generator", "images_per_second"} <= metrics.keys()
    assert metrics["ranks"] == comm.world_size()
    return {name: value for name, value in metrics.items() if name.startswith("memory/")}, all_reduce.call_count


@pytest.mark.parametrize("most_ranks_shown", [1, 2])
def test_memory_of_each_rank(ranks, most_ranks_shown):
    expected = {"memory/mean_gib": 0.875, "memory/max_gib": 1.5}
    if most_ranks_shown == 2:
        expected |= {"memory/rank0_gib": 1.5, "memory/rank1_gib": 0.25}
    assert ranks(2).run(report, most_ranks_shown) == [(expected, 2)] * 2  # the first compares the names


def differing():
    """What ranks are told whose last one has a statistic of its own."""
    statistics = Statistics(comm.device())
    statistics.add("loss/generator", torch.ones(()))
    if comm.rank() == 1:
        statistics.add("penalty/mine", torch.ones(()))
    with pytest.raises(UserError) as caught:
        loop._reduce(statistics, 0.0)
    return str(caught.value)


def test_ranks_with_different_statistics_are_told_which(ranks):
    told = "statistics: 'penalty/mine' is a statistic on rank 1 alone, of 2; let what adds it also declare it, on all "
    assert ranks(2).run(differing) == [f"{told}ranks: statistics.declare('penalty/mine')"] * 2


def speed(rank_waits):
    """Images a second and the ranks' mean wait, of 4 seconds in which a rank waited, and 2 that do not count."""
    run = scenarios.build([], {"generator": zero(0), "discriminator": zero(0)})
    scenarios.update(run, 1)
    clock = clocks.Clock(0, run.reals)
    run.reals.waited_seconds += rank_waits[comm.rank()]
    with patch.object(run.reporter, "report") as reported, patch.object(clocks, "time", SlowTime(clock._since)) as now:
        with clock.paused():
            now.seconds += 2
        now.seconds += 4
        loop._report_metrics(run, loop.scheduled(run.recipe, 0), 0.5, clock)
        assert clock.data_wait() == 0
    scenarios.destroy(run)
    (_, metrics), _ = reported.call_args
    return metrics["images_per_second"], metrics["data_wait"]


class SlowTime:
    """Stands in for the module time; passes when it is told to."""

    def __init__(self, seconds):
        self.seconds = seconds

    def perf_counter(self):
        return self.seconds


def test_speed_and_waiting_for_data(ranks):
    assert ranks(2).run(speed, [1.0, 0.0]) == [(pytest.approx(2.0), pytest.approx(0.125))] * 2
