"""Where stages and replicas lie, against counting and DeepSpeed's own topology."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from bigsgan.config import NETWORKS
from bigsgan.config.placement import Placement
from tests.tiny import TINY_GAMES, stages, tiny_plan

SIZES = [*product((1, 2, 3, 4), (1, 2, 3))]


@pytest.mark.parametrize("num_stages, num_replicas", SIZES)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_stage_and_replica_are_the_inverse_of_the_rank(num_stages, num_replicas, is_reversed):
    placement = Placement(num_stages, num_replicas, is_reversed)
    places = [*product(range(num_stages), range(num_replicas))]
    ranks = [placement.rank(stage, replica) for stage, replica in places]
    assert sorted(ranks) == list(range(num_stages * num_replicas))
    assert [(placement.stage(rank), placement.replica(rank)) for rank in ranks] == places
    assert ranks[:num_replicas] == placement.input_ranks()
    assert ranks[-num_replicas:] == placement.output_ranks()


@pytest.mark.parametrize("num_stages, num_replicas", SIZES)
def test_ranks_are_deepspeeds(num_stages, num_replicas):
    placement = Placement(num_stages, num_replicas)
    topology = PipeDataParallelTopology(num_pp=num_stages, num_dp=num_replicas)
    for stage, replica in product(range(num_stages), range(num_replicas)):
        assert placement.rank(stage, replica) == topology.get_rank(pipe=stage, data=replica)


@pytest.mark.parametrize("num_stages, num_replicas", SIZES)
def test_images_arise_where_they_are_read_if_the_stages_are_as_many(num_stages, num_replicas):
    generator = Placement(num_stages, num_replicas)
    meets = {
        stages: generator.output_ranks() == Placement(stages, ranks, reversed=True).input_ranks()
        for stages, ranks in SIZES
        if stages * ranks == num_stages * num_replicas
    }
    assert meets == {stages: stages == num_stages for stages in meets}
    discriminator = Placement(num_stages, num_replicas, reversed=True)
    assert discriminator.output_ranks() == generator.input_ranks() == list(range(num_replicas))
    if num_stages > 1:
        assert generator.output_ranks() != Placement(num_stages, num_replicas).input_ranks()


def test_a_plan_reverses_the_discriminator(tmp_path):
    options = ["engines.generator.pipeline_stages=2", "engines.discriminator.pipeline_stages=4"]
    plan = tiny_plan(tmp_path, 8, options, {})
    assert plan.placement("generator") == Placement(2, 4, reversed=False)
    assert plan.placement("discriminator") == Placement(4, 2, reversed=True)


@pytest.mark.parametrize(
    "num, per_host, options, generator, discriminator",
    [
        (8, 8, [], [], []),
        (8, 0, [], [], []),  # not known, so one
        (8, 4, [], [range(4), range(4, 8)], [range(4), range(4, 8)]),
        (8, 4, ["engines.generator.ranks=4"], [], []),
        (8, 4, ["engines.generator.ranks=2"], [], [range(2), range(2, 6)]),
        (8, 2, stages(2, 4), [range(2), range(2, 4), range(4, 6), range(6, 8)], []),
    ],
)
def test_statistics_of_hosts_are_over_those_replicas_of_a_stage(
    tmp_path, num, per_host, options, generator, discriminator
):
    """Ranks count from the network's first; D's stages of two replicas lie on one host each."""
    options = ["batch=24", "accumulation=1", "batch_statistics=host", *TINY_GAMES["dcgan"], *options]
    plan = replace(tiny_plan(tmp_path, num, options, {}), ranks_per_host=per_host)
    assert [plan.statistics_parts(network) for network in NETWORKS] == [generator, discriminator]
