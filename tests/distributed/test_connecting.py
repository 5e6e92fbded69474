"""Process groups are connected before the first update: each kind of collective once, in one order on all ranks."""

from unittest import mock

import pytest
import torch.distributed as dist

from bigsgan.engines import connecting
from bigsgan.engines.pipeline.transport import MESSAGES
from tests.distributed import scenarios
from tests.tiny import both, stages

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "reduce", "broadcast")


def connected(overrides, ds):
    """What a rank calls, as if its groups were NCCL's: the ranks of the group and the collective."""
    called, of_collectives = [], connecting._of_collectives

    def noting(name):
        function = getattr(dist, name)

        def call(*arguments, group=None, **more):
            called.append((dist.get_process_group_ranks(group), name))
            return function(*arguments, group=group, **more)

        return call

    def connect():
        with mock.patch.multiple(dist, **{name: noting(name) for name in COLLECTIVES}):
            connect_groups()

    connect_groups = connecting.connect_groups
    with (
        mock.patch.object(dist.Backend, "NCCL", "gloo"),
        mock.patch("bigsgan.engines.build.connect_groups", connect),
    ):
        run = scenarios.build(overrides, ds)
        own = [dist.get_process_group_ranks(group) for group in of_collectives()]
    messages = [group for group in dist.distributed_c10d._world.pg_map if group.group_desc == MESSAGES]
    scenarios.destroy(run)
    return called, own, len(messages)


@pytest.mark.slow
@pytest.mark.parametrize("options, num_messages", [(stages(2, 2), 4), (["engines.generator.ranks=1"], 1), ([], 0)])
def test_each_group_makes_each_collective_before_the_first_update(ranks, options, num_messages):
    first, second = ranks(2).run(connected, options, both(1))
    assert first == second or "engines.generator.ranks=1" in options
    for called, own, messages in (first, second):
        assert own.count([0, 1]) >= 1  # that of all ranks at least
        assert called == [(group, name) for group in own for name in 2 * COLLECTIVES]
        assert messages == num_messages
