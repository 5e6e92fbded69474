"""A loaded network is a plain module: its backward is the derivative of its forward, and no forward moves its state."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

import bigsgan
from bigsgan import cli
from bigsgan.errors import UserError
from bigsgan.inference.loading import ExportedNetwork
from bigsgan.inference.trained import best_device
from bigsgan.models.build import build_network, null_labels
from bigsgan.models.network import initialize
from tests.outside import TOKENS
from tests.runs import make_run
from tests.tiny import TINY_GAMES, awake, tiny_recipe

REGULARIZED = "objective.orthogonal={generator: 0.3, discriminator: 0.3}"


def loaded(tmp_path, family, network):
    """A network of a family, exported from a run with orthogonal regularization, in float64."""
    recipe = tiny_recipe(tmp_path, *TINY_GAMES.get(family, []), REGULARIZED)
    with awake():
        stack = build_network(recipe, network)
        initialize(stack, 3)
    for parameter in stack.parameters():  # orthogonal weights have no gradient of the regularization
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    header = {"network": network, "recipe": json.dumps(recipe.model_dump())}
    save_file(stack.state_dict(), tmp_path / "network.safetensors", metadata=header)
    return bigsgan.load(tmp_path / "network.safetensors").double()


def inputs_of(module):
    data, network = module.recipe.data, module.header["network"]
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(4, data.image_channels, *data.resolution, generator=generator).double()
    labels = null_labels(data, 4)
    if module.recipe.generator.paired:
        return (images, labels) if network == "generator" else (images, labels, images.flip(0))
    if network == "discriminator":
        return images, labels
    return torch.randn(4, module.recipe.generator.latent_size, generator=generator).double(), labels


@pytest.mark.parametrize("network", ["generator", "discriminator"])
@pytest.mark.parametrize("family", ["biggan", "biggan_deep", "biggan_light", "biggan_unshared", "dcgan_spectral"])
def test_backward_is_the_derivative_of_forward(tmp_path, family, network):
    module = loaded(tmp_path, family, network)
    inputs = inputs_of(module)
    weights = torch.randn(module(*inputs).shape, generator=torch.Generator().manual_seed(8)).double()

    def value():
        return (module(*inputs) * weights).sum()

    value().backward()
    directions = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(9)).double() for p in module.parameters()
    ]
    slope = sum((p.grad * d).sum() for p, d in zip(module.parameters(), directions, strict=True)).item()
    ends, step = [], 1e-8
    with torch.no_grad():
        for move in (step, -2 * step):
            for parameter, direction in zip(module.parameters(), directions, strict=True):
                parameter += move * direction
            ends.append(value().item())
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("network", ["generator", "discriminator"])
@pytest.mark.parametrize("family", ["biggan", "dcgan", "r3gan", "stylegan2"])
def test_training_mode_moves_no_state(tmp_path, family, network):
    module = loaded(tmp_path, family, network)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    first = module(*inputs_of(module))
    module.train()(*inputs_of(module)).sum().backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(module.eval()(*inputs_of(module)), first)


def test_a_local_rank_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for text, number in (("", 0), ("3", 1)):
        monkeypatch.setenv("LOCAL_RANK", text)
        assert best_device() == torch.device("cuda", number)
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(UserError, match=r"^LOCAL_RANK: must be a whole number from 0 to 2147483647, got '-1' \(an env"):
        best_device()


REFUSED = {
    "latents must be of shape (2, 12), got (2, 13)": lambda z, y: (z[:, :1].expand(2, 13), y),
    "latents must be of shape (12, 12), got (12,)": lambda z, y: (z[0], y),
    "labels must be of shape (2,), got (2, 1)": lambda z, y: (z, y[:, None]),
    "labels must be of shape (2,), got (1,)": lambda z, y: (z, y[:1]),
    "labels must be 0 to 9, got 0 to 10": lambda z, y: (z, y * 10),
    "labels must be 0 to 9, got -1 to 0": lambda z, y: (z, -y),
    "labels must be 0 to 9, got None": lambda z, y: (z,),
    "labels must be of type int64, got float32": lambda z, y: (z, y.float()),
    "labels must be of type int64, got bool": lambda z, y: (z, y.bool()),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_inputs_that_a_network_cannot_read(tmp_path, problem):
    generator = loaded(tmp_path, "biggan", "generator").float()
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        generator(*REFUSED[problem](torch.randn(2, 12), torch.tensor([0, 1])))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_tokens_may_be_left_out_where_some_were_null(tmp_path, dropout):
    own = 'generator={family: "tests.outside:attending_generator", latent_size: 12}'
    recipe = tiny_recipe(tmp_path, TOKENS[0], f"data.condition_dropout={dropout}", own, *TOKENS[3:])
    network = build_network(recipe, "generator")
    initialize(network, 0)
    generator, latents = ExportedNetwork(recipe, network, {"network": "generator"}), torch.randn(2, 12)
    if dropout:
        assert torch.equal(generator(latents), generator(latents, torch.zeros(2, 5, 4)))
        return
    with pytest.raises(ValueError, match="labels must be given, as they are tokens"):
        generator(latents)


@pytest.mark.parametrize("num_classes", [0, 1])
def test_labels_may_be_left_out_where_there_is_no_choice(tmp_path, num_classes):
    data = f"data={{kind: synthetic, resolution: 16, num_images: 64, num_classes: {num_classes}}}"
    run, _ = make_run(tmp_path, data)
    assert cli.main(["export", "--run", str(run), "--no-standing", "--out", str(tmp_path / "x.safetensors")]) == 0
    generator = bigsgan.load(tmp_path / "x.safetensors")
    latents = torch.randn(2, 12)
    assert torch.equal(generator(latents), generator(latents, torch.zeros(2, dtype=torch.int64)))
