"""Networks from outside, of plain torch: every update is the reference's in each layout."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigsgan import plugins
from bigsgan.config import NETWORKS, both_engines
from bigsgan.doctor import agreement
from bigsgan.doctor.reference import Reference
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.outside import LAYERED, TOKENS, WHOLE
from tests.reference import build_networks
from tests.tiny import both, stages, tiny_recipe

PENALTY = ["objective.r1={weight: 0.2, every: 2}"]
BOTH = {1: pytest.mark.nightly, 2: pytest.mark.slow}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [pytest.param(num, marks=mark) for num, mark in BOTH.items()])
def test_modules(ranks, num_ranks, stage):
    check_updates(ranks(num_ranks), [*WHOLE, *PENALTY, "accumulation=2"], both(stage), 4)


@pytest.mark.slow
def test_buffers_begin_the_same_at_zero_3(ranks):
    """Though engines make a pass of their own before the first update."""
    for stage in (0, 3):  # of real images, of G's, and in G's update
        assert ranks(1).run(passes_of_d, both(stage)) == [3]


def passes_of_d(ds):
    family = f"{__name__}:Counting"
    plugins.give([family])
    run = scenarios.build([f'discriminator={{family: "{family}", exact: false}}'], ds)
    scenarios.update(run, 1)
    (calls,) = [int(buffer) for name, buffer in run.step.discriminator.network.named_buffers() if "calls" in name]
    scenarios.destroy(run)
    return calls


class Counting(nn.Module):
    """Counts its passes in training."""

    def __init__(self, image_channels):
        super().__init__()
        self.linear = nn.Linear(image_channels * 16**2, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images, labels):
        self.calls += self.training
        return self.linear(images.flatten(1))


class First(nn.Module):
    """Images, labels and latents -> features of the first and the last, and the labels."""

    def __init__(self, image_channels, latent_size):
        super().__init__()
        self.of_images, self.of_latents = nn.Linear(image_channels * 16**2, 4), nn.Linear(latent_size, 4)

    def forward(self, images, labels, latents):
        return self.of_images(images.flatten(1)).tanh() * (1 + self.of_latents(latents)), labels


class Last(nn.Module):
    """Those -> logits."""

    def __init__(self, num_classes):
        super().__init__()
        self.linear, self.classes = nn.Linear(4, 1), nn.Embedding(num_classes, 4)

    def forward(self, h, labels):
        return self.linear(h + self.classes(labels)).squeeze(1)


def joint(image_channels, latent_size, num_classes):
    return [partial(First, image_channels, latent_size), partial(Last, num_classes)]


JOINT = [
    'generator={family: "tests.outside:OneStep", latent_size: 256}',
    f'discriminator={{family: "{__name__}:joint", latents: true}}',
]
OF_DATA = "objective={reuse_fakes: true, fake_labels: data, d_steps: 2}"
JOINT_LAYOUTS = {
    "one rank": (1, ["accumulation=2", *PENALTY], both(0)),
    "labels of the data": (1, [OF_DATA, "accumulation=2"], both(0)),
    "zero3": (2, ["objective.gradient_penalty={weight: 0.1}"], both(3)),
    "stages": (2, ["engines.discriminator.pipeline_stages=2", "accumulation=2"], both(1)),
    "ranks of their own": (2, ["engines.generator.ranks=1", "accumulation=2", OF_DATA], both(1)),
    "overlapped": (2, ["engines.generator.ranks=1", "objective.schedule=overlapped"], both(1)),
    "augmented": (2, ["augmentation={kind: diffaugment}"], both(2)),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if "rank" in each else pytest.mark.slow) for each in JOINT_LAYOUTS]
)
def test_a_discriminator_that_reads_latents(ranks, layout):
    """As of BiGAN (Donahue et al. 2017, arXiv 1605.09782), which are 0 for real images here."""
    world_size, more, ds = JOINT_LAYOUTS[layout]
    ranks(world_size).run(plugins.give, [f"{__name__}:joint"])
    check_updates(ranks(world_size), [*JOINT, *more], ds, 3)


class MapsReference(Reference):
    """The reference with hinge losses of each map of D's logits, added up: 8 x 8 and 4 x 4 logits, and one."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        parts = slice(0, 64), slice(64, 80), slice(80, 81)
        self.d_loss = lambda r, f: sum(F.relu(1 - r[:, p]).mean() + F.relu(1 + f[:, p]).mean() for p in parts)
        self.g_loss = lambda r, f: -sum(f[:, p].mean() for p in parts)


PUBLIC = [
    'generator={family: "tests.outside:OneStep", latent_size: 256}',
    'discriminator={family: "tests.outside:discriminator_of_maps"}',
    "optimizer.generator.lr=0.05",
    "accumulation=2",
]
PUBLIC_LAYOUTS = {
    "one rank": (1, PENALTY, {}),
    "zero2": (2, PENALTY, both(2)),
    "zero3": (2, PENALTY, both(3)),
    "stages": (2, [*PENALTY, "engines.discriminator.pipeline_stages=2"], both(1)),
    "ranks of their own": (2, [*PENALTY, "engines.generator.ranks=1"], {}),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=pytest.mark.slow if n != "stages" else ()) for n in PUBLIC_LAYOUTS]
)
def test_a_public_generator_and_a_discriminator_of_several_maps(ranks, layout):
    num_ranks, overrides, ds = PUBLIC_LAYOUTS[layout]
    with mock.patch.object(agreement, "Reference", MapsReference):
        check_updates(ranks(num_ranks), [*PUBLIC, *overrides], ds, 4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "stages", "checkpointing"])
def test_layers(ranks, layout):
    """In stages, with and without recomputation, and shared out layer by layer."""
    stepped = ["objective.r1={weight: 0.2, every: 2, form: finite_difference, sigma: 0.5}"]
    more = {
        "zero3": PENALTY,
        "stages": [*stepped, *stages(2, 2)],
        "checkpointing": [*PENALTY, *both_engines("activation_checkpointing=true")],
    }
    overrides = [*LAYERED, "accumulation=2", *more[layout]]
    check_updates(ranks(2), overrides, both(3 if layout == "zero3" else 1), 4)


SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("stages", "ranks of their own")]


@pytest.mark.parametrize("layout", ["zero3", *SLOW])
def test_tokens_and_their_masks(ranks, layout):
    """Some are dropped, the same in any layout."""
    more = {"zero3": PENALTY, "stages": [*stages(2, 2), "accumulation=2"]}
    more["ranks of their own"] = [*PENALTY, "engines.generator.ranks=1"]
    check_updates(ranks(2), [*TOKENS, *more[layout]], both(3 if layout == "zero3" else 1), 2)


LAYOUTS = [*([[], both(stage)] for stage in range(4)), [stages(2, 2), both(1)]]


@pytest.mark.slow
def test_initial_weights_are_those_of_the_seed(ranks, tmp_path):
    """Torch's linear maps, convolutions, norms, embeddings and attention, the same bits in each layout."""
    networks = dict(zip(NETWORKS, build_networks(tiny_recipe(tmp_path, *LAYERED)), strict=True))
    for overrides, ds in LAYOUTS:
        found = scenarios.merge(ranks(2).run(scenarios.train, [*LAYERED, *overrides], ds, 0))
        for network, expected in networks.items():
            state = expected.state_dict()
            assert state.keys() == found[network].keys()
            different = [
                name for name, value in state.items() if not torch.equal(value, found[network][name].view(value.shape))
            ]
            assert not different, (overrides, different)
