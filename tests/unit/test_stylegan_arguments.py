"""Every argument of stylegan2-ada-pytorch's and stylegan3's StyleGAN2 is taken over, or refused by its name.

The files in ``tests/data/stylegan2`` hold tiny networks of stylegan2-ada-pytorch with random weights, the arguments
that they were made with (``init_kwargs`` in the file's metadata), inputs, and outputs and gradients of the original.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.testing import assert_close

from bigsgan import importing
from bigsgan.config import plan_run
from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.errors import UserError
from bigsgan.models.network import LayerStack
from bigsgan.models.stylegan2 import discriminator_layers, generator_layers
from bigsgan.models.stylegan2_layers import SynthesisLayer
from bigsgan.weights.empty import sized
from bigsgan.weights.settings import Settings
from bigsgan.weights.sources import Found
from bigsgan.weights.stylegan import (
    data_section,
    discriminator_section,
    discriminator_state,
    generator_section,
    generator_state,
)
from tests.unit.test_weights_stylegan import DATA, recorded

State = dict[str, Tensor]


def arguments_of(name: str) -> dict[str, Any]:
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["init_kwargs"])


def imported(name: str) -> tuple[LayerStack, dict[str, Any], State]:
    (state, given), kwargs = recorded(name), arguments_of(name)
    if name.startswith("generator"):
        section = generator_section(state, kwargs)
        network = LayerStack(generator_layers(StyleGAN2Generator(**section), **sized(data_section(state))))
        network.load_state_dict(generator_state(state))
    else:
        section = discriminator_section(state, kwargs)
        network = LayerStack(discriminator_layers(StyleGAN2Discriminator(**section), **sized(data_section(state))))
        network.load_state_dict(discriminator_state(state))
    return network.eval(), section, given


GENERATORS = {
    "generator_orig": {"architecture": "orig", "mapping_lr_multiplier": 0.1, "conv_clamp": 1.5, "w_avg_beta": 1},
    "generator_resnet": {"architecture": "resnet", "mapping_lr_multiplier": 0.01, "conv_clamp": 1.5},
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_is_the_original(name):
    network, section, given = imported(name)
    assert section.items() >= GENERATORS[name].items()
    layers: Any = network.layers
    assert_close(layers["0"](given["latents"], given["labels"], given["labels"])[0], given["ws"], rtol=0, atol=1e-5)
    latents = given["latents"].requires_grad_()
    for mode in ("none", "const"):
        for layer in network.modules():
            if isinstance(layer, SynthesisLayer):
                layer.noise_mode = mode
        images = network(latents, given["labels"], given["labels"])
        assert_close(images, given[mode], rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad((images * given["weights"]).sum(), latents)
    assert_close(gradient, given["gradient"], rtol=1e-5, atol=1e-4)  # of numbers up to 20
    assert layers["0"].beta == section.get("w_avg_beta", 0.995)


DISCRIMINATORS = {
    "discriminator_skip": {"architecture": "skip", "conv_clamp": 1.5, "mbstd_group": None},
    "discriminator_converted": {"mapping_layers": 0, "mapping_lr_multiplier": 0.1, "mbstd_group": None},
    "discriminator_few": {"mapping_layers": 2, "mapping_lr_multiplier": 0.1, "mbstd_group": 8, "mbstd_channels": 2},
}


@pytest.mark.parametrize("name", DISCRIMINATORS)
def test_a_discriminator_is_the_original(name):
    """Of five images, where the group is of eight or of all."""
    network, section, given = imported(name)
    assert section.items() >= DISCRIMINATORS[name].items()
    images = given["images"].requires_grad_()
    logits = network(images, given["labels"])
    assert_close(logits, given["logits"], rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(logits.sum(), images)
    assert_close(gradient, given["gradient"], rtol=0, atol=1e-7)


def test_a_converted_discriminator_becomes_a_run(tmp_path):
    """0 layers of mapping and groups of all images: what converted networks have."""
    g_state, (d_state, _) = recorded("generator")[0], recorded("discriminator_converted")
    d_section = discriminator_section(d_state, arguments_of("discriminator_converted"))
    data = {**data_section(g_state), **data_section(d_state)}
    found = Found(data, {"generator": generator_section(g_state), "discriminator": d_section}, {})
    recipe, _ = importing.make_recipe(found, tmp_path / "run")
    assert (recipe.discriminator.mapping_layers, recipe.discriminator.mbstd_group) == (0, None)
    plan_run(recipe, 1)
    with pytest.raises(UserError, match=r"discriminator.mbstd_group: must be given, got null"):
        plan_run(recipe, 2)


@pytest.mark.parametrize(
    "group, settings, expected, said",
    [
        (32, {}, (64, 32), ""),
        (6, {}, (48, 6), "batch=48, a multiple of discriminator.mbstd_group=6, instead of 64"),
        (
            96, {}, (64, 64),
            "discriminator.mbstd_group=64, the images of a micro-batch, instead of 96",
        ),
        (32, {"batch": 24}, (24, 24), "discriminator.mbstd_group=24, the images of a micro-batch, instead of 32"),
    ],
)  # fmt: skip
def test_a_group_that_does_not_fit_the_batch(tmp_path, group, settings, expected, said):
    """As min(N, group) of the public layer, or by another batch, which only the shipped recipe chose."""
    (g_state, _), (d_state, _) = recorded("generator"), recorded("discriminator")
    d_section = discriminator_section(d_state, {"epilogue_kwargs": {"mbstd_group_size": group}})
    sections = {"generator": generator_section(g_state), "discriminator": d_section}
    found = Found(data_section(g_state), sections, {}, (Settings("x.json", settings),) if settings else ())
    recipe, text = importing.make_recipe(found, tmp_path / "run")
    for num_ranks in (1, 2, 4, 8) if said.startswith("batch=") and group < 8 else (1,):
        plan_run(recipe, num_ranks)
    assert (recipe.batch, recipe.discriminator.mbstd_group) == expected
    changed = [line.strip() for line in text.splitlines() if "changed" in line]
    assert changed == ([f"changed, as the two do not fit: {said}"] if said else [])
    assert ("batch=" not in text.replace(f"{said}", "")) == said.startswith("batch")


def test_a_batch_fits_the_path_lengths_too(tmp_path):
    """Half of its images go into a path length, so that the number has to be even."""
    g_state, (d_state, _) = recorded("generator_unconditional")[0], recorded("discriminator")
    sections = {"generator": generator_section(g_state)}
    sections["discriminator"] = discriminator_section(d_state, {"epilogue_kwargs": {"mbstd_group_size": 5}})
    found = Found({"resolution": 256, "num_classes": 0, "image_channels": 3}, sections, {})
    sections["generator"]["channel_base"] = sections["discriminator"]["channel_base"] = 1024
    recipe, _ = importing.make_recipe(found, tmp_path / "run")
    plan_run(recipe, 4)
    assert (recipe.batch, recipe.objective.path_length.batch_shrink) == (80, 2)


# --- refusals ---


def nested(depth: int) -> list[Any]:
    """A list of two, each the same list of two, and so on: to write it takes 2**depth letters."""
    found: list[Any] = [1, 1]
    for _ in range(depth):
        found = [found, found]
    return found


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mapping activation": ("generator", {"mapping_kwargs": {"activation": "tanh"}}, "mapping_kwargs.activation' is"),
    "no clamp by 0": ("generator", {"synthesis_kwargs": {"conv_clamp": 0}}, "conv_clamp' is 0"),
    "no average": ("generator", {"mapping_kwargs": {"w_avg_beta": None}}, "w_avg_beta' is None"),
    "a nested learning rate": ("generator", {"mapping_kwargs": {"lr_multiplier": nested(60)}}, "lr_multiplier' is a"),
    "digits": ("generator", {"mapping_kwargs": {"lr_multiplier": 10**5000}}, "lr_multiplier' is of many digits"),
    "no number": ("generator", {"mapping_kwargs": {"lr_multiplier": float("nan")}}, "lr_multiplier' is nan"),
    "a name that is a number": ("generator", {3: 1}, "has a name that is not text"),
    "unknown": ("generator", {"mapping_kwargs": {"dropout": 0.5}}, "mapping_kwargs.dropout' is an unknown argument"),
    "frozen layers": ("discriminator", {"block_kwargs": {"freeze_layers": -1}}, "block_kwargs.freeze_layers' is -1"),
    "a group of 0": ("discriminator", {"epilogue_kwargs": {"mbstd_group_size": 0}}, "mbstd_group_size' is 0"),
    "D's precision": ("discriminator", {"num_fp16_res": None}, "'num_fp16_res' is None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_no_layer_has_is_refused_by_name(name):
    kind, kwargs, message = REFUSED[name]
    state, _ = recorded(kind)
    with pytest.raises(UserError, match=message) as caught:
        (generator_section if kind == "generator" else discriminator_section)(state, kwargs)
    assert "\n" not in str(caught.value)


SHAPES: dict[str, tuple[str, dict[str, tuple[int, ...]], str]] = {
    "embed_features": ("generator", {"mapping.embed.weight": (5, 3)}, r"mapping_kwargs\.embed_features' is 5"),
    "layer_features": ("generator", {"mapping.fc0.weight": (5, 9)}, r"mapping_kwargs\.layer_features' is 5"),
    "cmap_dim": ("discriminator", {"b4.out.weight": (5, 8)}, r"weights: 'mapping_kwargs.layer_features' is 12; only"),
    "no cmap_dim": ("discriminator", {"mapping.embed.weight": (0, 3)}, r"weights: 'cmap_dim' is 0, a discriminator"),
    "RGBA": ("generator", {"synthesis.b{}.torgb.weight": (4, 8, 1, 1)}, r"img_channels' is 4 \(RGBA\)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_no_layer_has_is_refused_by_name(name):
    kind, shapes, message = SHAPES[name]
    state, _ = recorded(kind)
    largest = data_section(state)["resolution"]
    changed = {**state, **{key.format(largest): torch.zeros(shape) for key, shape in shapes.items()}}
    read = data_section if "RGBA" in name else generator_section if kind == "generator" else discriminator_section
    with pytest.raises(UserError, match=message):
        read(changed)


def test_a_generator_without_a_mapping_network_is_refused_by_name():
    state = {name: tensor for name, tensor in recorded("generator")[0].items() if "mapping.fc" not in name}
    with pytest.raises(UserError, match=r"'mapping_kwargs\.num_layers' is 0"):
        generator_section(state)


def test_a_size_that_no_recipe_may_have_is_refused():
    state = dict(recorded("generator_unconditional")[0])
    state["mapping.fc0.weight"] = state["mapping.fc0.weight"][:, :0]
    with pytest.raises(UserError, match="'latent_size' is 0, which is not supported"):
        generator_section(state)


FOREIGN = {
    "StyleGAN3's own generator": ["synthesis.input.affine.weight", "synthesis.L0_36_512.weight", "mapping.w_avg"],
    "rosinality": ["style.1.weight", "input.input", "convs.0.conv.weight", "to_rgbs.0.bias"],
    "lucidrains": ["GAN.S.net.0.weight", "GAN.G.initial_block"],
}


@pytest.mark.parametrize("project", FOREIGN)
def test_another_projects_networks_are_refused_by_name(project):
    state = {name: torch.zeros(1) for name in FOREIGN[project]}
    with pytest.raises(UserError, match=f"weights: .*{project}.*, which is not supported") as caught:
        generator_section(state, {"magnitude_ema_beta": 0.999})
    assert "\n" not in str(caught.value)


# --- training ---


def test_groups_of_all_images_keep_real_and_fake_images_apart():
    network, _, given = imported("discriminator_converted")
    images, labels = given["images"][:4], given["labels"][:4]
    apart = [network(part, which) for part, which in zip(images.split(2), labels.split(2), strict=True)]
    together = network(images, labels, segments=2)
    assert_close(together, torch.cat(apart))
    assert (network(images, labels) - together).abs().max() > 1e-4
