"""What a report says of all ranks, against what each of them put in."""

from unittest.mock import patch

import pytest
import torch.distributed as dist

from bigsgan import comm
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
        loop._report_metrics(run, numbers, 0.5, loop._Clock(0))
    scenarios.destroy(run)
    (nimg, metrics), _ = reported.call_args
    assert nimg == 8
    assert {"loss/generator", "lr/generator", "images_per_second"} <= metrics.keys()
    return {name: value for name, value in metrics.items() if name.startswith("memory/")}, all_reduce.call_count


@pytest.mark.parametrize("most_ranks_shown", [1, 2])
def test_memory_of_each_rank(ranks, most_ranks_shown):
    expected = {"memory/mean_gib": 0.875, "memory/max_gib": 1.5}
    if most_ranks_shown == 2:
        expected |= {"memory/rank0_gib": 1.5, "memory/rank1_gib": 0.25}
    assert ranks(2).run(report, most_ranks_shown) == [(expected, 1)] * 2
