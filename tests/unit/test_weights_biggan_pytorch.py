"""Networks with the weights of ajbrock/BigGAN-PyTorch against what that code computed from them.

The files in tests/data hold state dicts of the reference's classes (commit 9845943, evaluation mode) with random
weights and statistics, two latents, G's images of them and D's logits of these images.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from bigsgan.config.data import Data
from bigsgan.config.families.biggan import BigGANDiscriminator, BigGANGenerator
from bigsgan.config.families.biggan_deep import BigGANDeepDiscriminator, BigGANDeepGenerator
from bigsgan.errors import UserError
from bigsgan.models import biggan, biggan_deep
from bigsgan.models.network import LayerStack
from bigsgan.weights.biggan_pytorch import (
    data_section,
    discriminator_section,
    discriminator_state,
    generator_section,
    generator_state,
)

DATA = Path(__file__).parents[1] / "data"
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "biggan": (biggan, BigGANGenerator, BigGANDiscriminator),
    "biggan_deep": (biggan_deep, BigGANDeepGenerator, BigGANDeepDiscriminator),
}


def recorded(family: str) -> dict[str, Tensor]:
    return load_file(DATA / f"biggan_pytorch_{family}.safetensors")


def state_of(family: str, network: str) -> dict[str, Tensor]:
    prefix = f"{network}/"
    return {name[len(prefix) :]: t for name, t in recorded(family).items() if name.startswith(prefix)}


def loaded(family: str, network: str) -> LayerStack:
    state, (module, generator, discriminator) = state_of(family, network), FAMILIES[family]
    data = Data(kind="synthetic", **data_section(state))
    assert (data.resolution.value, data.image_channels, data.num_classes) == (64, 3, 3)
    if network == "generator":
        section, layers, converted = generator(**generator_section(state)), module.generator_layers, generator_state
    else:
        section, layers = discriminator(**discriminator_section(state)), module.discriminator_layers
        converted = discriminator_state
    section.check(data)
    stack = LayerStack(layers(section, data.resolution, data.image_channels, data.num_classes)).eval()
    stack.load_state_dict(converted(state))
    return stack


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_the_references(family):
    pair = recorded(family)
    images = loaded(family, "generator")(pair["latents"], pair["labels"])
    assert pair["images"].std() > 0.05
    assert_close(images, pair["images"], rtol=1e-4, atol=1e-5)
    logits = loaded(family, "discriminator")(pair["images"], pair["labels"])
    assert_close(logits, pair["logits"], rtol=1e-4, atol=1e-5)


def without(name: str) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda state: state.pop(name)


def add_attention(state: dict[str, Tensor]) -> None:
    state["blocks.0.1.theta.weight"] = torch.zeros(4, 32, 1, 1)


def widen(state: dict[str, Tensor]) -> None:
    state["blocks.1.0.conv2.weight"] = torch.zeros(9, 9, 3, 3)


def test_without_a_hierarchical_latent_blocks_see_the_label_alone():
    state = state_of("biggan", "generator")
    for name, tensor in list(state.items()):
        if name.endswith((".gain.weight", ".bias.weight")):
            state[name] = tensor[:, :4]
    section = generator_section(state)
    assert (section["hierarchical"], section["latent_size"]) == (False, 2)
    assert generator_state(state)["layers.1.norm1.gain.weight"].shape == (16, 4)


@pytest.mark.parametrize(
    "change, problem",
    [
        (without("shared.weight"), "weights: must be a generator of BigGAN-PyTorch, which has shared.weight"),
        (without("blocks.2.0.conv1.u0"), "weights: does not fit the network here at layers.4.conv1.u and 1 other"),
        (without("output_layer.0.stored_mean"), "layers.6.norm.statistics.running_mean and 0 other tensors"),
        (without("blocks.1.0.conv2.weight"), "weights: must be a network of BigGAN-PyTorch, which has"),
        (add_attention, "weights: does not fit the network here at layers.2.attention.gamma and 12 other tensors"),
        (widen, r"weights: has blocks of \[16, 9, 4, 2\] channels, which no resolution has; give a state dict of"),
    ],
)
def test_another_networks_state_is_refused(change, problem):
    state = state_of("biggan", "generator")
    change(state)
    with pytest.raises(UserError, match=problem):
        generator_state(state)


def test_the_wrong_networks_state_is_refused():
    with pytest.raises(UserError, match=r"weights: must be a discriminator of BigGAN-PyTorch, which has embed.weight"):
        discriminator_state(state_of("biggan", "generator"))
    with pytest.raises(UserError, match=r"must be a generator .*has output_layer\.2\.weight"):
        generator_state(state_of("biggan_deep", "discriminator"))
