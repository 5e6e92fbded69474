"""Process groups: how many a rank makes and is in does not grow with the ranks."""

from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _process_group_color

from bigsgan.config.placement import Placement
from bigsgan.runtime import comm
from tests.distributed.counting import as_one_of_many, first_update, groups
from tests.tiny import stages

MOST_CALLS, MOST_OWN = 20, 10
HOST = ["batch_statistics=host"]
# Name: overrides; the calls that each rank makes, and of its groups all of several ranks and those of messages.
LAYOUTS = {
    "whole": ([], 1, 2, 0),
    "4 + 4": (stages(4, 4), 8, 9, 4),
    "4 + 2": (stages(4, 2), 9, 10, 5),
    "G whole, D in 2": (stages(1, 2), 6, 7, 3),
    "ranks of their own": (["engines.generator.ranks=4"], 3, 4, 1),
    "ranks of their own, in stages": (["engines.generator.ranks=4", *stages(2, 2)], 6, 7, 3),
    "whole, statistics of a host": (HOST, 2, 3, 0),
}
QUICK = [(1024, "4 + 4"), (64, "4 + 2"), (8, "ranks of their own, in stages"), (1024, "whole, statistics of a host")]


@pytest.mark.parametrize(
    "world_size, layout",
    [
        pytest.param(num, name, marks=() if (num, name) in QUICK else pytest.mark.slow)
        for name in LAYOUTS
        for num in (8, 64, 1024)
    ],
)
def test_a_rank_makes_few(world_size, layout, tmp_path):
    overrides, *expected = LAYOUTS[layout]
    options = [f"batch={32 * world_size}", "accumulation=1", *overrides]
    if layout.startswith("ranks of their own"):  # the others' number has to divide the batch
        options[0] = f"batch={4 * (world_size - 4)}"
    found = as_one_of_many(groups, world_size // 2 + 1, world_size, tmp_path, options)
    assert list(found.values()) == expected
    assert found["calls"] <= MOST_CALLS
    assert found["own"] <= MOST_OWN


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["whole", "4 + 4"])
def test_collectives_until_the_first_update_do_not_grow_with_the_ranks(layout, tmp_path):
    found = []
    for num in (8, 64, 1024):
        (out := tmp_path / str(num)).mkdir()
        options = [f"batch={2 * num}", "accumulation=1", *LAYOUTS[layout][0]]
        found.append(as_one_of_many(first_update, num // 2 + 1, num, out, options)["collectives"])
    # Nothing is sent, so that numbers which are not finite may make a rank skip its update, with the message after it.
    assert 0 < max(found) - 1 <= min(found)


def gathered(size):
    """What each rank gets of objects of growing sizes, and whether rank 0 was connected with each rank."""
    value = {"rank": comm.rank(), "text": "x" * (size * (1 + comm.rank()))}
    with mock.patch.object(dist, "gather_object", wraps=dist.gather_object) as gather:
        return comm.gather_objects(value), gather.called


@pytest.mark.parametrize("size, connects", [(0, False), (100, False), (1 << 15, True)])
def test_small_objects_of_all_ranks_do_not_come_from_each_to_rank_0(ranks, size, connects):
    (found, first), (nothing, second) = ranks(2).run(gathered, size)
    assert found == [{"rank": 0, "text": "x" * size}, {"rank": 1, "text": "x" * 2 * size}]
    assert (nothing, first, second) == (None, connects, connects)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8, 16])
def test_parts_of_one_call_have_colours_of_their_own(num_stages):
    """Over NCCL those of one colour come together; torch makes it of the ranks, in fewer bits than these have."""
    for num_replicas in range(1, 1024 // num_stages + 1):
        placement = Placement(num_stages, num_replicas)
        for parts in (placement.pipelines(), placement.replicas()):
            assert len({_process_group_color(list(part)) for part in parts}) == len(parts)
