"""Where stages and replicas lie, against DeepSpeed's own order."""

from itertools import product

import pytest
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from bigsgan.placement import Placement

SIZES = [*product((1, 2, 3, 4), (1, 2, 3))]


@pytest.mark.parametrize("stages, replicas", SIZES)
def test_the_order_is_deepspeeds(stages, replicas):
    placement, topology = Placement(stages, replicas), PipeDataParallelTopology(stages, replicas)
    for stage, replica in product(range(stages), range(replicas)):
        assert placement.rank(stage, replica) == topology.get_rank(pipe=stage, data=replica)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("stages, replicas", SIZES)
def test_every_rank_has_one_place(stages, replicas, is_reversed):
    placement = Placement(stages, replicas, is_reversed)
    places = [(placement.stage(rank), placement.replica(rank)) for rank in range(stages * replicas)]
    assert sorted(places) == [*product(range(stages), range(replicas))]
    assert [placement.rank(*place) for place in places] == list(range(stages * replicas))


@pytest.mark.parametrize("stages, replicas", SIZES)
def test_images_arise_where_a_reversed_network_reads_them(stages, replicas):
    generator, discriminator = Placement(stages, replicas), Placement(stages, replicas, reversed=True)
    assert generator.output_ranks() == discriminator.input_ranks()
    assert discriminator.output_ranks() == generator.input_ranks() == list(range(replicas))
