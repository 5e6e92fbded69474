"""How many communicators a rank has; tests/distributed/test_groups.py compares the number with those that are made."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from bigsgan.config.placement import Placement
from bigsgan.engines import connecting
from bigsgan.engines.connecting import num_communicators


def layouts(world_size, per_host=None):
    """Both networks in any number of stages on all ranks, and each on half of them.

    With ``per_host`` each has batch norm with statistics of a host.
    """
    for size, apart in ((world_size, False), (world_size // 2, True)):
        stages = [num for num in range(1, size + 1) if size % num == 0]
        for of_g, of_d in product(stages, stages):
            placements = {
                "generator": Placement(of_g, size // of_g),
                "discriminator": Placement(of_d, size // of_d, reversed=True, first=size if apart else 0),
            }
            yield SimpleNamespace(
                world_size=world_size,
                placement=placements.__getitem__,
                statistics_parts=lambda network, own=placements: (
                    [
                        stage[first : first + per_host]
                        for stage in own[network].local.replicas()
                        for first in range(0, len(stage), per_host)
                    ]
                    if per_host
                    else []
                ),
                is_split=apart,
                images_travel=apart or of_g != of_d,
            )


@pytest.mark.parametrize(
    "world_size, most, per_host", [(2, 7, None), (8, 10, None), (24, 10, None), (1024, 10, None), (1024, 12, 8)]
)
def test_there_are_at_most_ten_in_any_layout_and_two_for_statistics_of_a_host(world_size, most, per_host):
    ranks = (0, 1, world_size // 2, world_size - 1)
    assert max(num_communicators(plan, rank) for plan in layouts(world_size, per_host) for rank in ranks) == most


def test_one_rank_has_none():
    assert num_communicators(SimpleNamespace(world_size=1), 0) == 0


@pytest.mark.parametrize("num", [24, 25])
def test_a_warning_tells_of_so_many_that_two_may_share_a_stream(monkeypatch, caplog, num):
    groups = {object(): (dist.Backend.NCCL if i < num else "gloo", None) for i in range(num + 2)}
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    monkeypatch.setattr(connecting, "_of_collectives", lambda: iter(()))
    connecting.connect_groups()
    said = "25 communicators: two may share one of torch's 32 streams, where their messages wait for each other"
    assert caplog.messages == [said] * (num > 24)
