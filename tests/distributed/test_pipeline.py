"""A network in stages is the same network: pipelines against the plain PyTorch reference."""

from itertools import product

import pytest

from tests.distributed.test_equivalence import PENALTIES, check
from tests.tiny import zero


def both(stages: int) -> list[str]:
    return [f"engines.{network}.pipeline_stages={stages}" for network in ("generator", "discriminator")]


def cells():
    for stages, replicas, stage, accumulation, penalty, mode in product(
        (2, 4), (1, 2), (0, 1), (2, 4), ("none", "finite_difference"), ("keep", "recompute")
    ):
        quick = stages * replicas == 2 and accumulation == 4 and penalty != "none" and (stage == 1 or mode == "keep")
        name = f"{stages}stages-{replicas}replicas-zero{stage}-acc{accumulation}-{penalty}-{mode}"
        marks = () if quick else pytest.mark.slow
        yield pytest.param(stages, replicas, stage, accumulation, penalty, mode, marks=marks, id=name)


@pytest.mark.parametrize("stages, replicas, stage, accumulation, penalty, mode", [*cells()])
def test_matrix(ranks, stages, replicas, stage, accumulation, penalty, mode):
    overrides = [f"accumulation={accumulation}", f"pipeline.generator_phase={mode}", *PENALTIES[penalty], *both(stages)]
    check(ranks(stages * replicas), overrides, {"generator": zero(stage), "discriminator": zero(stage)})
