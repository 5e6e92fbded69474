"""Every model family agrees with the plain reference under every engine, as BigGAN does."""

from itertools import product

import pytest

from tests.distributed.test_equivalence import FEWER, PENALTIES, check
from tests.distributed.test_pipeline import stages
from tests.tiny import FAMILIES, zero

CASES = ["accumulation=2"]
WITH_LAYERS_OF_THEIR_OWN = ["biggan_deep", "r3gan", "stylegan2_path_length", "pix2pix"]


def cells():
    """Each family at ZeRO 1 and 2 in one cell; at 3 those with layers of their own; the rest is nightly."""
    for family, stages_of in product(FAMILIES, ((0, 0), (1, 2), (3, 3))):
        slow = stages_of == (1, 2) or (stages_of == (3, 3) and family in WITH_LAYERS_OF_THEIR_OWN)
        marks = pytest.mark.slow if slow else pytest.mark.nightly
        yield pytest.param(family, stages_of, marks=() if (family, stages_of) == ("stylegan2", (3, 3)) else marks)


@pytest.mark.parametrize("family, stages_of", [*cells()])
def test_zero(ranks, family, stages_of):
    options = [*FAMILIES[family], *CASES, *PENALTIES["exact"]]
    check(ranks(2), options, {"generator": zero(stages_of[0]), "discriminator": zero(stages_of[1])}, FEWER)


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(family, marks=pytest.mark.slow) for family in WITH_LAYERS_OF_THEIR_OWN[2:]),
        *(
            pytest.param(family, marks=pytest.mark.nightly)
            for family in FAMILIES
            if family not in WITH_LAYERS_OF_THEIR_OWN[2:]
        ),
    ],
)
def test_checkpointing(ranks, family):
    checkpointing = [f"engines.{n}.activation_checkpointing=true" for n in ("generator", "discriminator")]
    options = [*FAMILIES[family], *CASES, *PENALTIES["exact"], *checkpointing]
    check(ranks(2), options, {"generator": zero(3), "discriminator": zero(3)}, FEWER)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, mode",
    [
        *((family, "keep") for family in FAMILIES if family not in ("stylegan2_path_length", "pix2pix_features")),
        *((family, "recompute") for family in ("dcgan", "stylegan2", "pix2pix")),
    ],
)
def test_pipeline(ranks, family, mode):
    # A patch's bias has no part in the slope but as the rounding of hundreds of terms that cancel: keep them small.
    penalty = [] if family == "pix2pix" else PENALTIES["finite_difference"]
    options = [*without_exact(FAMILIES[family]), *CASES, *penalty, f"pipeline.generator_phase={mode}"]
    check(ranks(2), [*options, *stages(2, 2)], {"generator": zero(1), "discriminator": zero(1)}, FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 2), (2, 1)])
@pytest.mark.parametrize("family", ["pix2pix", "stylegan2"])
def test_where_images_travel(ranks, family, layout):
    options = [*FAMILIES[family], *CASES, *stages(*layout)]
    check(ranks(2), options, {"generator": zero(1), "discriminator": zero(1)}, FEWER)


def without_exact(options):
    """The same without exact penalties, which no pipeline can compute."""
    return [option.replace("r2: {weight: 0.1, every: 2}", "d_steps: 1") for option in options]
