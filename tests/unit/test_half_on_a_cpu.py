"""Layers in half precision compute in float32 on a CPU where nothing is trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bigsgan
from bigsgan.cli import main
from bigsgan.config.run_directory import write_recipe
from bigsgan.importing import _Entry
from bigsgan.inference.trained import open_trained
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.models.precision import avoid_fp16_on_a_cpu
from tests.single_process import save
from tests.tiny import TINY_GAMES, tiny_recipe

CPU, META = torch.device("cpu"), torch.device("meta")
HALF = {
    "stylegan2": [
        f"{network}.half_{key}" for network in ("generator", "discriminator") for key in ("resolutions=2", "type=fp16")
    ],
    "r3gan": [f"{network}.bf16_stages=2" for network in ("generator", "discriminator")],
}


def make_run(tmp_path: Path, family: str) -> tuple[Path, dict[str, torch.nn.Module]]:
    """A run with half-precision layers, and the same networks in float32."""
    recipe = tiny_recipe(tmp_path, *TINY_GAMES[family], *HALF[family])
    plain = tiny_recipe(tmp_path, *TINY_GAMES[family])
    run, entries, networks = tmp_path / "run", {}, {}
    for network in ("generator", "discriminator"):
        networks[network] = build_network(plain, network)
        initialize(networks[network], 3)
        entries[network] = _Entry(recipe, network, networks[network].state_dict())
    entries["average"] = entries["generator"]
    write_recipe(recipe, run, {})
    assert save(run / "checkpoints", 8, entries)
    return run, networks


@pytest.mark.parametrize("network", ["generator", "discriminator"])
@pytest.mark.parametrize("family", ["stylegan2", "r3gan"])
def test_what_is_opened_on_a_cpu_computes_in_float32(tmp_path, family, network):
    run, plain = make_run(tmp_path, family)
    opened = open_trained(run, network, False, None, CPU)
    images = torch.randn(4, 1, *opened.recipe.data.resolution, generator=torch.Generator().manual_seed(1))
    labels, seeds = torch.arange(4), torch.arange(4)
    if network == "generator":
        inputs = [torch.randn(4, opened.recipe.latent_size, generator=torch.Generator().manual_seed(1)), labels]
        inputs += [seeds] if opened.recipe.generator.draws else []
    else:
        inputs = [images, labels]
    with torch.no_grad():
        expected = plain[network].eval()(*inputs)
        opened.network.eval()
        assert torch.equal(opened.infer(tuple(inputs)), expected)
        trained = build_network(opened.recipe, network)  # as training builds it: in half precision
        trained.load_state_dict(opened.network.state_dict())
        assert not torch.equal(trained.eval()(*inputs), expected)
        file = tmp_path / "x.safetensors"
        arguments = ["--run", str(run), "--network", network, "--out", str(file)]
        assert main(["export", *arguments]) == 0
        weights = load_file(file)
        assert all(value.dtype == torch.float32 for value in weights.values())
        assert torch.equal(bigsgan.load(file)(*inputs), expected)


def test_fp16_is_float32_where_a_cpu_trains(tmp_path):
    """As it was published for GPUs; bf16 is what a recipe asks for."""
    for half_type, on_gpu, expected in (("fp16", False, 0), ("fp16", True, 3), ("bf16", False, 3)):
        halves = ["generator.half_resolutions=1", f"generator.half_type={half_type}"]
        with META:
            stack = build_network(tiny_recipe(tmp_path, *TINY_GAMES["stylegan2"], *halves), "generator")
        avoid_fp16_on_a_cpu(stack, on_gpu)
        found = [module for module in stack.modules() if getattr(module, "half_type", None) is not None]
        assert len(found) == expected


@pytest.mark.parametrize("family", ["stylegan2", "r3gan"])
def test_elsewhere_it_computes_as_it_was_trained(tmp_path, family):
    run, _ = make_run(tmp_path, family)
    for device, halves in ((META, True), (CPU, False)):
        network = open_trained(run, "generator", False, None, device).network
        found = [getattr(module, "half_type", None) or getattr(module, "bf16", False) for module in network.modules()]
        assert any(found) == halves
