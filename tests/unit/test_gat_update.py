"""One update of D and one of G, as the public code makes them of the same weights, latents, images and draws.

The record has what github.com/hse1032/GAT computed in float64 with its finite differences (its exact penalties raise),
at a step of 0.01 and without a teacher, from the weights in gat_patch2.safetensors. Random numbers of its augmentations
and noise were those that our layers draw from the recorded seeds. Colours changed in G's update alone: there a copy for
a finite difference is changed by the means of the image that it is a copy of, and here by its own.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
from bigsgan.adversarial.terms import stateless_terms
from bigsgan.config.families.gat import GATDiscriminator, GATGenerator
from bigsgan.config.objective import Objective
from bigsgan.images.size import Size
from bigsgan.models import gat
from bigsgan.models.diff_augment import DiffAugment
from bigsgan.models.network import LayerStack, initialize
from bigsgan.monitor import Statistics
from bigsgan.weights import gat as weights
from tests.networks import part

DATA = Path(__file__).resolve().parents[1] / "data"
POLICY = ["translation", "cutout", "flip"]
SLOPE = {"form": "finite_difference", "sigma": 0.01, "check_every": 0}
CHANNELS, LEVELS = 3, 4

GRADIENTS = {torch.float64: {"D": 1e-6, "G": 1e-6}, torch.float32: {"D": 3e-4, "G": 1e-5}}
"""How near losses are, and gradients relative to the norm of each. A finite difference divides rounding by its step."""
CHANGES = 1e-5
"""How near what an update adds to each parameter is, relative to its norm."""


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    """What networks and losses compute in."""
    return request.param


@pytest.fixture
def record(dtype):
    found = load_file(DATA / "gat_update.safetensors")
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


@pytest.fixture
def networks(dtype):
    """G, and D without augmentation."""
    state = load_file(DATA / "gat_patch2.safetensors")
    g_state, d_state = part(state, "G."), part(state, "D.")
    g = GATGenerator.model_validate(weights.generator_section(g_state))
    d = GATDiscriminator.model_validate(weights.discriminator_section(d_state))
    stacks = [
        LayerStack(gat.generator_layers(g, Size.of(8), CHANNELS, 3)),
        LayerStack(gat.discriminator_layers(d, Size.of(8), CHANNELS, 3)),
    ]
    for stack, own in zip(
        stacks, (weights.generator_state(g_state), weights.discriminator_state(d_state)), strict=True
    ):
        initialize(stack, 0)
        assert not stack.load_state_dict(own, strict=False).unexpected_keys
    return [stack.to(dtype) for stack in stacks]


def objective():
    section = Objective(loss="relativistic", r1={"weight": 0.4, **SLOPE}, r2={"weight": 0.2, **SLOPE})
    statistics = Statistics(torch.device("cpu"))
    statistics.declare(*(name for term in stateless_terms(section) for name in term.statistics))
    return section, statistics


def augmented(discriminator, policy):
    layer = DiffAugment(policy, CHANNELS, keeps_seeds=True)
    return LayerStack([layer, *discriminator.layers.values()], first=-1)


def check(network, record, name, convert, rate):
    """Gradients, their norm, and what AdamW's step of the clipped ones adds.

    A float32 weight rounds what is added to it. And of a gradient that is nearly 0 rounding decides the sign, which is
    all that the first step of this Adam takes of it: in float32 a few numbers are left out, those below 50 times the
    gradient's error.
    """
    grads, steps = (convert(part(record, f"{name}_{kind}.")) for kind in ("grad", "step"))
    parameters, norm = dict(network.named_parameters()), record[f"{name}_norm"]
    dtype = norm.dtype
    nearest, rounding = GRADIENTS[dtype][name], torch.finfo(dtype).eps / 2
    assert grads.keys() == steps.keys() == parameters.keys()
    # A relativistic loss does not see the last bias, so that its gradient is rounding.
    unseen = {key for key, grad in grads.items() if grad.norm() < 1e-9 * norm}
    assert unseen == ({"layers.6.linear.bias"} if name == "D" else set())
    for key in grads.keys() - unseen:
        assert (parameters[key].grad - grads[key]).norm() <= nearest * grads[key].norm(), key
    assert_close(torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0), norm, rtol=nearest, atol=0)
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    torch.optim.AdamW(network.parameters(), lr=rate, betas=(0.0, 0.99), weight_decay=0.0).step()
    num_kept = 0
    for key in grads.keys() - unseen:
        size = grads[key].abs()
        kept = size > (50 * nearest if dtype == torch.float32 else 0) * size.square().mean().sqrt()
        found, step = (parameters[key].detach() - before[key])[kept], steps[key][kept]
        assert (found - step).norm() <= CHANGES * step.norm() + rounding * before[key][kept].norm(), key
        num_kept += kept.sum().item()
    assert num_kept > 0.95 * sum(parameter.numel() for parameter in parameters.values())


def test_an_update_of_the_discriminator(record, networks):
    g, d = networks
    section, statistics = objective()
    game = DiscriminatorObjective(stateless_terms(section), statistics, 0, LEVELS)
    with torch.no_grad():
        made = g(record["z"], record["y"])
    real = record["images"], record["y"], record["seeds.real"]
    fake = made, record["y"], record["seeds.fake"]
    batch = game.batch(real, fake, {"r1": record["r1_noise"], "r2": record["r2_noise"]})
    loss = game(augmented(d, POLICY)(*batch), batch)
    assert_close(loss, record["D_loss"], rtol=GRADIENTS[loss.dtype]["D"], atol=0)
    loss.backward()
    check(d, record, "D", weights.discriminator_state, 2e-3)


def test_an_update_of_the_generator(record, networks):
    """Behind D's update, with the same latents and reals."""
    g, d = networks
    for key, value in weights.discriminator_state(part(record, "D_step.")).items():
        d.state_dict()[key].add_(value)
    section, statistics = objective()
    game = GeneratorObjective(stateless_terms(section), statistics, pairs=section.pairs)
    real = record["images"], record["y"], record["seeds.judged_real"]
    fake = g(record["z"], record["y"]), record["y"], record["seeds.judged_fake"]
    batch = game.batch(real, fake)
    loss = game(augmented(d, ["latent_color", *POLICY])(*batch), batch)
    assert_close(loss, record["G_loss"], rtol=GRADIENTS[loss.dtype]["G"], atol=0)
    loss.backward()
    check(g, record, "G", weights.generator_state, 3e-3)
