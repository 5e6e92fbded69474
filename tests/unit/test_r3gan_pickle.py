"""R3GAN's snapshots: pickles of ordinary modules, whose classes are written down here as the public modules lay out."""

import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bigsgan.cli import main
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.inference.trained import open_trained

RECORDS = Path(__file__).resolve().parents[1] / "data"
CPU = torch.device("cpu")
HOMES = {
    "Resampler": "R3GAN.Resamplers",
    "Convolution": "R3GAN.Networks",
    "BiasedActivation": "R3GAN.FusedOperators",
    "GeneratorStage": "R3GAN.Networks",
    "Network": "R3GAN.Networks",
    "Generator": "training.networks",
}


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[nn.Module]]:
    """Classes at the paths of the public ones, there while the pickle is written."""
    found = {}
    for name, home in HOMES.items():
        for path in ("R3GAN", "training", home):
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path, ModuleType(path)))
        found[name] = type(name, (nn.Module,), {"__module__": home, "__qualname__": name})
        setattr(sys.modules[home], name, found[name])
    return found


def built(classes: dict[str, type[nn.Module]], state: dict[str, torch.Tensor], bf16: list[int]) -> nn.Module:
    """Modules that have this state dict, with the attributes that the published ones have."""
    root = classes["Generator"]()
    root.z_dim, root.c_dim, root.img_resolution = 6, 0, 32
    for name, tensor in state.items():
        *path, last = name.split(".")
        module: Any = root
        for i, part in enumerate(path):
            if part not in module._modules:
                kind = {"Model": "Network", "Resampler": "Resampler", "NonLinearity1": "BiasedActivation"}.get(part)
                kind = kind or ("GeneratorStage" if i == 2 and path[1] == "MainLayers" else "Convolution")
                lists = part in ("MainLayers", "Layers")
                module.add_module(part, nn.ModuleList() if lists else classes[kind]())
                if kind == "GeneratorStage":
                    module._modules[part].DataType = torch.bfloat16 if int(part) in bf16 else torch.float32
            module = module._modules[part]
        if last == "Kernel":
            module.register_buffer(last, tensor)
        else:
            module.register_parameter(last, nn.Parameter(tensor.clone()))
    return root.eval().requires_grad_(False)


def trained(network: nn.Module, updates: int) -> dict[str, Any]:
    """The state dict of an optimizer after random gradients."""
    adam = torch.optim.Adam(network.parameters(), lr=float(np.float64(2e-4)), betas=(0.0, 0.9))
    before = [parameter.clone() for parameter in network.parameters()]
    for seed in range(updates):
        generator = torch.Generator().manual_seed(seed)
        for parameter in network.parameters():
            parameter.grad = 0.01 * torch.randn(parameter.shape, generator=generator)
        adam.step()
    with torch.no_grad():
        for parameter, old in zip(network.parameters(), before, strict=True):
            parameter.copy_(old)
            parameter.grad = None
    return adam.state_dict()


def snapshot(
    classes: dict[str, type[nn.Module]],
    record: dict[str, torch.Tensor],
    g16: list[int],
    d16: list[int],
    nimg: int = 3_200_000,
) -> dict:
    def part(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}

    g, d = part("generator."), part("discriminator.")
    live = {name: value * 1.25 for name, value in g.items()}
    networks = built(classes, live, g16), built(classes, d, d16)
    return {
        "G": networks[0],
        "D": networks[1],
        "G_ema": built(classes, g, g16),
        "training_set_kwargs": {"class_name": "training.dataset.ImageFolderDataset", "use_labels": True},
        "cur_nimg": nimg,
        "G_opt_state": trained(networks[0], 3),
        "D_opt_state": {**trained(networks[1], 4), "lr": np.float64(1e-4)},
    }


def imported(tmp_path: Path, content: Any) -> Path:
    (tmp_path / "network-snapshot.pkl").write_bytes(pickle.dumps(content))
    run = tmp_path / "run"
    weights = str(tmp_path / "network-snapshot.pkl")
    assert main(["import", "--from", "r3gan", "--weights", weights, "--out", str(run)]) == 0
    return run


@pytest.mark.parametrize("name", ["unconditional", "conditional"])
def test_a_snapshot_gives_the_published_outputs(classes, tmp_path, name):
    record = load_file(RECORDS / f"r3gan_{name}.safetensors")
    finest = record["io.images"].shape[-1].bit_length() - 3  # the number of its stage: 0 is 4x4's
    run = imported(tmp_path, snapshot(classes, record, [finest - 1, finest], [0]))
    recipe = read_saved_recipe(run)
    assert (recipe.generator.bf16_stages, recipe.discriminator.bf16_stages) == (2, 1)
    with torch.no_grad():
        g = open_trained(run, "generator", False, None, CPU).network
        images = g(record["io.latents"], record["io.labels"])
        torch.testing.assert_close(images, record["io.images"], atol=1e-5, rtol=1e-4)
        d = open_trained(run, "discriminator", False, None, CPU).network
        logits = d.part(1, len(d.layers))(record["io.images"], record["io.labels"])  # without augmentation
        torch.testing.assert_close(logits, record["io.logits"], atol=1e-5, rtol=1e-4)


def test_stages_that_cannot_be_kept_are_refused(classes, tmp_path, capsys):
    record = load_file(RECORDS / "r3gan_unconditional.safetensors")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(snapshot(classes, record, [0], [])))
    arguments = ["--weights", str(tmp_path / "x.pkl"), "--out", str(tmp_path / "run")]
    assert main(["import", "--from", "r3gan", *arguments]) == 2
    assert "whose stages compute in bfloat16, float32, float32 from coarse to fine" in capsys.readouterr().err


class Twice:
    """A module that is filled a second time."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __reduce__(self) -> Any:
        return type(self.module).__new__, (type(self.module),), {"_modules": {}}


class Called:
    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return self.kind, (1,)


def test_modules_run_no_code(classes, tmp_path, capsys):
    for content in (Twice(classes["Network"]()), Called(classes["Network"]), Called(print)):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps({"G_ema": content}))
        arguments = ["--weights", str(tmp_path / "x.pkl"), "--out", str(tmp_path / "run")]
        assert main(["import", "--from", "r3gan", *arguments]) == 2
        assert "must be a pickle of StyleGAN or R3GAN that can be read safely: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
