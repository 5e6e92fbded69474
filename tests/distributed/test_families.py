"""Every model family agrees with the plain reference under every engine, as BigGAN does."""

import math
import re
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bigsgan.config import NETWORKS, both_engines
from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_equivalence import FEWER, PENALTIES, SAME, SEED, check, expected
from tests.tiny import TINY_GAMES, stages, tiny_recipe, zero

CASES = ["accumulation=2"]
WITH_LAYERS_OF_THEIR_OWN = ["biggan_deep", "r3gan", "stylegan2_path_length", "pix2pix", "gat"]

# Biases of G before a batch or instance norm, which takes the mean away, and of keys, which softmax does not see: their
# gradient is rounding.
UNSEEN = {
    "autoencoder": r"layers\.\d+\.attention\.key\.bias",
    "autoencoder_vq": r"layers\.\d+\.attention\.key\.bias",
    "biggan_deep": r"layers\.(\d\.conv[123]|[45]\.conv4)\.bias",
    "biggan_light": r"layers\.[12]\.(conv1|conv2\.3|shortcut)\.bias",
    "biggan_unshared": r"layers\.[12]\.(conv[12]|shortcut)\.bias",
    "cyclegan": r"layers\.0\.to_[ab]\.layers\.[0-5]\.conv[12]?\.bias",
    "dcgan_light": r"layers\.1\.conv\.1\.bias",
}
UNSEEN_IN_D = {"cyclegan": r"layers\.[12]\.of_[ab]\.conv\.bias"}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if family in ("gat", "stylegan2") else pytest.mark.nightly)
        for family in TINY_GAMES
    ],
)
def test_every_tensor_moves(family):
    """The comparisons below would prove nothing about a tensor that stays where it was."""
    options = [*TINY_GAMES[family], *CASES, *PENALTIES["exact"], f"seed={SEED}"]
    recipe = tiny_recipe(Path(tempfile.mkdtemp()), *options)
    start, end = reference.run_reference(recipe, 0), expected(*options, updates=FEWER)
    parameters = [set(dict(network.named_parameters())) for network in reference.build_networks(recipe)]
    for entry, names in zip(("generator", "discriminator", "average"), (*parameters, parameters[0]), strict=True):
        for name in names:
            distance = reference.distance(end[entry][name], start[entry][name])
            unseen = UNSEEN_IN_D if entry == "discriminator" else UNSEEN
            if re.fullmatch(unseen.get(family, ""), name):
                assert distance < SAME, f"{entry}.{name}"
            else:
                assert distance > 10 * SAME, f"{entry}.{name}"


def cells():
    """Each family at ZeRO 1 and 2 in one cell, or at 3 if it has layers of its own; the rest is nightly."""
    for family, stages_of in product(TINY_GAMES, ((0, 0), (1, 2), (3, 3))):
        at_3 = family in WITH_LAYERS_OF_THEIR_OWN
        slow = stages_of == ((3, 3) if at_3 else (1, 2)) or (family, stages_of) == ("stylegan2", (3, 3))
        marks = pytest.mark.slow if slow else pytest.mark.nightly
        yield pytest.param(family, stages_of, marks=marks)


@pytest.mark.parametrize("family, stages_of", [*cells()])
def test_zero(ranks, family, stages_of):
    options = [*TINY_GAMES[family], *CASES, *PENALTIES["exact"]]
    check(ranks(2), options, {"generator": zero(stages_of[0]), "discriminator": zero(stages_of[1])})


@pytest.mark.slow
@pytest.mark.parametrize("family, size", [("gat", "[16,24]"), ("cat", "[24,16]"), ("stylegan2_path_length", "[16,24]")])
def test_rectangles(ranks, family, size):
    options = [*TINY_GAMES[family], f"data.resolution={size}", *CASES, *PENALTIES["exact"]]
    check(ranks(2), options, {"generator": zero(1), "discriminator": zero(3)})


@pytest.mark.slow
def test_a_minibatch_deviation_over_all_images(ranks):
    options = [*TINY_GAMES["stylegan2"], *PENALTIES["exact"], "discriminator.mbstd_group=null"]
    check(ranks(1), options, {"generator": zero(0), "discriminator": zero(0)})


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_positions_are_exact_below_float32(ranks, stage):
    """zero.Init makes torch.arange round to the engine's type, whatever it is asked for."""
    ds = dict.fromkeys(NETWORKS, zero(stage, bf16={"enabled": True}))
    (found,) = ranks(1).run(scenarios.tables_of_positions, TINY_GAMES["gat"], ds)
    assert {name.rpartition(".")[2] for name in found} == {"rotation", "table"}
    for name, table in found.items():
        side = math.isqrt(len(table))
        table = table[len(table) - side**2 :]  # a class token, which is not rotated, comes first
        num = table.shape[1] // (2 if name.endswith("rotation") else 4)
        angles = np.outer(np.arange(side), 1e4 ** (-np.arange(num) / num))
        rows, columns = np.repeat(angles, side, axis=0), np.tile(angles, (side, 1))
        if name.endswith("rotation"):
            both = np.concatenate([rows, columns], axis=1)
            expected = np.stack([np.cos(both), np.sin(both)], axis=-1)
        else:
            expected = np.concatenate([np.sin(columns), np.cos(columns), np.sin(rows), np.cos(rows)], axis=1)
        np.testing.assert_allclose(table.numpy(), expected, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_features_of_reconstructions(ranks):
    options = [*TINY_GAMES["autoencoder_vq"], *CASES, "objective.feature_matching=2"]
    check(ranks(2), options, {"generator": zero(1), "discriminator": zero(3)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, layout",
    [
        ("decoder", ["engines.generator.frozen.sharded=true"]),
        ("encoder", ["engines.generator.frozen.offload=cpu", "objective.codebook=null"]),
        pytest.param("decoder", [*stages(2, 1), "engines.generator.partition=uniform"], marks=pytest.mark.nightly),
        ("encoder", [*stages(2, 1), "engines.generator.partition=uniform", "objective.codebook=null"]),
    ],
    ids=["decoder, shared", "encoder, on the host", "decoder, in stages", "encoder, in stages"],
)
def test_an_autoencoder_of_which_a_part_is_frozen(ranks, part, layout):
    options = [*TINY_GAMES["autoencoder_vq"], *CASES, f"generator.frozen={part}", "init_from.run=unset", *layout]
    options += ["engines.generator.frozen.persistence_threshold=0"]
    check(ranks(2), options, {"generator": zero(1), "discriminator": zero(1)})


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(family, marks=pytest.mark.slow) for family in WITH_LAYERS_OF_THEIR_OWN[2:]),
        *(
            pytest.param(family, marks=pytest.mark.nightly)
            for family in TINY_GAMES
            if family not in WITH_LAYERS_OF_THEIR_OWN[2:]
        ),
    ],
)
def test_checkpointing(ranks, family):
    checkpointing = both_engines("activation_checkpointing=true")
    options = [*TINY_GAMES[family], *CASES, *PENALTIES["exact"], *checkpointing]
    check(ranks(2), options, {"generator": zero(3), "discriminator": zero(3)})


IN_STAGES_IN_CI = {("r3gan", "keep"), ("stylegan2", "keep"), ("biggan_deep", "recompute"), ("pix2pix", "recompute")}
REFUSED_IN_STAGES = {
    *product(("pix2pix_features", "cyclegan"), ("keep", "recompute")),
    ("autoencoder", "keep"),
    ("dit", "keep"),
}


@pytest.mark.parametrize(
    "family, mode",
    [
        pytest.param(*case, marks=pytest.mark.slow if case in IN_STAGES_IN_CI else pytest.mark.nightly)
        for case in product(TINY_GAMES, ("keep", "recompute"))
        if case not in REFUSED_IN_STAGES
    ],
)
def test_pipeline(ranks, family, mode):
    options = [*TINY_GAMES[family], *CASES, *PENALTIES["exact"], f"pipeline.generator_phase={mode}"]
    check(ranks(2), [*options, *stages(2, 2)], {"generator": zero(1), "discriminator": zero(1)})


@pytest.mark.parametrize(
    "family, layout",
    [
        pytest.param("pix2pix", (1, 2), marks=pytest.mark.slow),
        pytest.param("stylegan2", (2, 1), marks=pytest.mark.slow),
        pytest.param("pix2pix", (2, 1), marks=pytest.mark.nightly),
        pytest.param("stylegan2", (1, 2), marks=pytest.mark.nightly),
    ],
)
def test_where_images_travel(ranks, family, layout):
    options = [*TINY_GAMES[family], *CASES, *stages(*layout)]
    check(ranks(2), options, {"generator": zero(1), "discriminator": zero(1)})


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_labels_travel_to_where_images_are_made(ranks, layout):
    game = "objective={loss: relativistic, reuse_fakes: true, fake_labels: data}"
    check(ranks(2), [game, *CASES, *stages(*layout)], {"generator": zero(1), "discriminator": zero(1)})
