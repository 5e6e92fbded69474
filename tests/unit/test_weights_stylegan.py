"""Weights of stylegan2-ada-pytorch: outputs that the original computed, and names.

``tests/data/stylegan2`` holds state dictionaries of tiny networks of the original with random weights, inputs, and what
the original made of them (on a CPU, ``noise_mode`` const and none, ``truncation_psi`` 0.6 with cutoff 2, and
``num_fp16_res`` 2). ``vectors.safetensors`` is of the networks of ``generator`` and ``discriminator``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.errors import UserError
from bigsgan.models.network import LayerStack
from bigsgan.models.stylegan2 import discriminator_layers, generator_layers
from bigsgan.weights import studiogan
from bigsgan.weights.empty import sized
from bigsgan.weights.stylegan import (
    data_section,
    discriminator_section,
    discriminator_state,
    generator_section,
    generator_state,
)

DATA = Path(__file__).resolve().parents[1] / "data" / "stylegan2"
# What shapes do not say of the recorded networks.
CLAMP = {"generator": 4.0, "generator_unconditional": None, "discriminator": 16.0, "discriminator_orig": None}


def recorded(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State, and inputs and outputs."""
    tensors = load_file(DATA / f"{name}.safetensors")
    state = {key.removeprefix("state."): tensor for key, tensor in tensors.items() if key.startswith("state.")}
    return state, {key: tensor for key, tensor in tensors.items() if not key.startswith("state.")}


def imported_generator(state: dict[str, Tensor], **section: Any) -> LayerStack:
    config = StyleGAN2Generator(**{**generator_section(state), **section})
    network = LayerStack(generator_layers(config, **sized(data_section(state))))
    network.load_state_dict(generator_state(state))
    return network.eval()


def imported_discriminator(state: dict[str, Tensor], **section: Any) -> LayerStack:
    config = StyleGAN2Discriminator(**{**discriminator_section(state), **section})
    network = LayerStack(discriminator_layers(config, **sized(data_section(state))))
    network.load_state_dict(discriminator_state(state))
    return network


def images_of(network: LayerStack, given: dict[str, Tensor], noise_mode: str) -> Tensor:
    for module in network.modules():
        if hasattr(module, "noise_mode"):
            module.noise_mode = noise_mode
    with torch.no_grad():
        return network(given["latents"], given["labels"], torch.arange(len(given["labels"])))


# --- outputs of the original ---


@pytest.mark.parametrize("name", ["generator", "generator_unconditional"])
def test_the_generator_makes_the_originals_images(name):
    state, given = recorded(name)
    network: Any = imported_generator(state, conv_clamp=CLAMP[name])
    for mode in ("const", "none"):
        assert_close(images_of(network, given, mode), given[mode], rtol=0, atol=2e-5)
    mapping = network.layers["0"]
    ws, _ = mapping(given["latents"], given["labels"], given["labels"])
    assert_close(ws, given["ws"], rtol=0, atol=1e-5)
    mapping.truncation_psi, mapping.truncation_cutoff = 0.6, 2
    assert_close(images_of(network, given, "const"), given["truncated"], rtol=0, atol=2e-5)
    assert (given["truncated"] - given["const"]).abs().max() > 0.1
    assert (given["none"] - given["const"]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["discriminator", "discriminator_orig"])
def test_the_discriminator_gives_the_originals_logits_and_gradients(name):
    state, given = recorded(name)
    network = imported_discriminator(state, conv_clamp=CLAMP[name])
    images = given["images"].requires_grad_()
    logits = network(images, given["labels"])
    assert_close(logits, given["logits"], rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(logits.sum(), images)
    assert given["gradient"].abs().max() > 0.01
    assert_close(gradient, given["gradient"], rtol=1e-4, atol=1e-6)


def test_vectors_are_to_the_original_what_they_are_here():
    """The same weights, whose ``c_dim`` numbers are no one-hot vectors."""
    _, given = recorded("vectors")
    (state, inputs), (judge_state, judged) = recorded("generator"), recorded("discriminator")
    network = imported_generator(state, conv_clamp=CLAMP["generator"])
    images = images_of(network, {**inputs, "labels": given["labels"]}, "const")
    assert_close(images, given["made"], rtol=0, atol=2e-5)
    assert (given["made"] - inputs["const"]).abs().max() > 0.1
    judge = imported_discriminator(judge_state, conv_clamp=CLAMP["discriminator"])
    assert_close(judge(judged["images"], given["judged_labels"]), given["logits"], rtol=0, atol=1e-5)
    assert (given["logits"] - judged["logits"]).abs().max() > 0.1


def test_half_precision_is_the_originals():
    """Rounding differs with the order of operations: both are as far from float32 as from each other."""
    state, given = recorded("generator")
    network = imported_generator(state, conv_clamp=4.0, half_resolutions=2, half_type="fp16")
    error = (images_of(network, given, "const") - given["half"]).norm() / given["half"].norm()
    assert 1e-5 < error < 0.003
    state, given = recorded("discriminator")
    judge = imported_discriminator(state, conv_clamp=16.0, half_resolutions=2, half_type="fp16")
    assert_close(judge(given["images"], given["labels"]), given["half"], rtol=0.001, atol=0)


# --- names and sections ---


def theirs(network: LayerStack, kind: str) -> dict[str, Tensor]:
    """Our state under the original's names, with the filters that only the original has."""
    last = len(network.layers) - 1
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        _, index, rest = name.split(".", 2)
        i = int(index)
        if rest.startswith(("network.", "mapping.")):
            name = rest.replace("network.", "mapping.").replace(".fc.", ".fc")
        elif kind == "generator":
            name = f"synthesis.b{2 ** (i + 1)}.{rest}" if i else f"mapping.{rest}"
        else:
            name = f"b{4 * 2 ** (last - i)}.{rest}"
        state[name] = tensor[0] if name.endswith("noise_strength") else tensor
    prefix = "synthesis.b" if kind == "generator" else "b"
    for owner in (f"{prefix}4", f"{prefix}8", f"{prefix}8.conv1", f"{prefix}8.conv0"):
        state.setdefault(f"{owner}.resample_filter", torch.ones(4, 4, device=tensor.device))
    # The values of a network on the meta device are those that every network has.
    own = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    return {name: (torch.outer(own, own) if t.is_meta and "filter" in name else t) for name, t in state.items()}


@pytest.mark.parametrize("num_classes, colours", [(0, 3), (5, 1)])
@pytest.mark.parametrize(
    "resolution, channel_base, channel_max, inferred",
    [
        (256, 16_384, 512, {}),
        (512, 32_768, 512, {}),
        (1024, 32_768, 512, {}),
        (32, 32_768, 512, {"channel_base": 512 * 32}),  # no map is narrower, and all larger bases are the same
        (16, 64, 100, {"channel_max": 16}),  # none is cut off
        (16, 100, 12, {"channel_base": 96}),  # 100 // 8 = 12 and 100 // 16 = 6
    ],
)
def test_sections_follow_from_shapes(resolution, channel_base, channel_max, inferred, num_classes, colours):
    keys: dict[str, Any] = {"channel_base": channel_base, "channel_max": channel_max, "mapping_layers": 3}
    data = {"resolution": resolution, "image_channels": colours, "num_classes": num_classes}
    with torch.device("meta"):
        g = LayerStack(generator_layers(StyleGAN2Generator(**keys, latent_size=7, w_size=9), **sized(data)))
        d = LayerStack(discriminator_layers(StyleGAN2Discriminator(**keys, mbstd_channels=2), **sized(data)))
    keys.update(inferred)
    keys["family"] = "stylegan2"
    state = theirs(g, "generator")
    assert generator_section(state) == {**keys, "architecture": "skip", "latent_size": 7, "w_size": 9}
    assert data_section(state) == data
    assert {n: t.shape for n, t in generator_state(state).items()} == {n: t.shape for n, t in g.state_dict().items()}
    state = theirs(d, "discriminator")
    if not num_classes:
        del keys["mapping_layers"]
    assert discriminator_section(state) == {**keys, "architecture": "resnet", "mbstd_channels": 2}
    assert data_section(state) == data
    assert {n: t.shape for n, t in discriminator_state(state).items()} == {
        n: t.shape for n, t in d.state_dict().items()
    }


def test_a_discriminator_without_residual_connections_is_recognized():
    assert discriminator_section(recorded("discriminator_orig")[0]) == {
        "family": "stylegan2", "architecture": "orig", "mbstd_channels": 2, "channel_base": 64, "channel_max": 8,
    }  # fmt: skip


def change(state: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    changed = dict(state)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del changed[name]
        else:
            changed[name] = value
    return changed


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("generator", {"mapping__w_avg": None}, "'mapping.w_avg' is missing"),
        ("generator", {"mapping__fc1__bias": None}, r"'layers\.0\.network\.fc\.1\.bias' has no counterpart"),
        ("generator", {"mapping__fc1__bias": torch.zeros(3)}, r"weights: 'mapping.fc1.bias' has the shape \(3,\), not"),
        ("generator", {"extra": torch.zeros(3)}, "weights: 'extra' is not an entry of StyleGAN2"),
        ("generator", {"synthesis__b8__skip__weight": torch.zeros(3)}, "weights: 'synthesis.b8.skip.weight' is not an"),
        ("generator", {"synthesis__b4__torgb__weight": None}, "'synthesis.b4.torgb.*' is not an entry"),
        ("generator", {"synthesis__b8__conv1__weight": torch.zeros(3, 3, 3, 3)}, "that no channel_base gives"),
        ("generator", {"synthesis__b32__const": torch.zeros(3)}, "is missing, or is not a weight"),
        ("generator", {"synthesis__b64__const": torch.zeros(3)}, "are not complete"),
        ("discriminator", {"b4__fromrgb__weight": torch.zeros(3)}, r"'b\d+\.skip.*' is not an entry"),
        ("discriminator", {"b16__fromrgb__weight": None}, "'b16.fromrgb.weight' is missing"),
        ("discriminator", {"b4__out__bias": torch.zeros(1)}, r"has the shape \(1,\)"),
        ("discriminator", {"mapping__w_avg": torch.zeros(1)}, "weights: 'mapping.w_avg' is not an entry of StyleGAN2"),
    ],
)
def test_other_states_are_refused(kind, changes, message):
    state = change(recorded(kind)[0], **changes)
    with pytest.raises(UserError, match=message):
        (generator_state if kind == "generator" else discriminator_state)(state)


def test_one_network_is_not_taken_for_the_other():
    g, d = recorded("generator")[0], recorded("discriminator")[0]
    for function, state in ((generator_state, d), (discriminator_state, g), (generator_state, {}), (data_section, {})):
        with pytest.raises(UserError, match="are not complete"):
            function(state)


def test_studiogans_networks_have_no_clamp():
    """As its float32; its clamped ones have half precision, which no shape tells."""
    state, _ = recorded("generator_unconditional")
    assert studiogan.generator_section(state) == {**generator_section(state), "conv_clamp": None}
    state, _ = recorded("discriminator_orig")
    assert studiogan.discriminator_section(state) == {**discriminator_section(state), "conv_clamp": None}
