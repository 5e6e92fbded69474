"""Trains VQGAN's unedited autoencoder in bigsgan, and compares each update with that project's own loss class.

    python -m tests.benchmarks.public_taming PATH [dotted.key=value ...]

PATH is a checkout of github.com/CompVis/taming-transformers (Esser et al. 2021). Its classes are the autoencoder with
its codebook, the discriminator with batch norm, and the loss with its adaptive weight; LPIPS, whose weights are a
download, is replaced as in ``public_llamagen``, which says what is printed. One process; ZeRO 0 to 2.
"""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.benchmarks.public_llamagen import Distance, distances, trained
from tests.benchmarks.short_run import short_run

BATCH, STARTS_AT = 4, 2
"""Images of an update; the update in which D begins to learn and to count."""
NETWORK: dict[str, Any] = {"ch": 64, "out_ch": 3, "ch_mult": (1, 1), "num_res_blocks": 1, "attn_resolutions": [16]}
NETWORK |= {"in_channels": 3, "resolution": 32, "z_channels": 32, "double_z": False}
LOSS = {"disc_start": STARTS_AT, "disc_ndf": 8, "disc_weight": 0.8, "codebook_weight": 1.0}
ADAM: dict[str, Any] = {"lr": 1e-4, "betas": [0.5, 0.9], "eps": 1e-3}
seen: list[Tensor] = []


def public(name: str) -> Any:
    """A module of the checkout, which is on the path, without its trainer's package."""
    stubs: dict[str, Any] = {"pytorch_lightning": ModuleType("pytorch_lightning"), "main": ModuleType("main")}
    stubs["pytorch_lightning"].LightningModule = nn.Module
    stubs["main"].instantiate_from_config = lambda given: given
    with mock.patch.dict(sys.modules, stubs):
        return importlib.import_module(f"taming.{name}")


def autoencoder() -> Any:
    """The public class."""
    return public("models.vqgan").VQModel(NETWORK, None, n_embed=32, embed_dim=16)


def loss() -> Any:
    """The public class, which holds the discriminator."""
    module = public("modules.losses.vqperceptual")
    with mock.patch.object(module, "LPIPS", Distance):
        return module.VQLPIPSWithDiscriminator(**LOSS)


class Autoencoder(nn.Module):
    """An adapter, which also notes the images of training."""

    def __init__(self) -> None:
        super().__init__()
        self.public = autoencoder()

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            seen.append(images.detach().clone())
        made, of_codebook = self.public(images)
        return made, of_codebook.expand(len(images))


class Discriminator(nn.Module):
    """An adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.public = loss().discriminator

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.public(images)


class Loss:
    """The public functions."""

    def discriminator(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        return public("modules.losses.vqperceptual").hinge_d_loss(real_logits, fake_logits)

    def generator(self, fake_logits: Tensor) -> Tensor:
        return -fake_logits.mean()


def absolute(images: Tensor, real_images: Tensor) -> Tensor:
    """The mean absolute difference."""
    return (images - real_images).abs().mean()


def quantization(codebook_loss: Tensor) -> Tensor:
    """The output itself."""
    return codebook_loss.mean()


def recipe(directory: Path) -> Path:
    """Write the recipe of the project's game, small, and return its file."""
    here, begins = __spec__.name, STARTS_AT * BATCH
    adaptive = {"parameter": "decoder.conv_out.weight"}
    terms = [f"{here}:absolute", "tests.benchmarks.public_llamagen:Distance", f"{here}:quantization"]
    sections = {
        "generator": {"family": f"{here}:Autoencoder", "reads": "images", "outputs": ["codebook_loss"]},
        "discriminator": {"family": f"{here}:Discriminator"},
        "objective": {
            "loss": f"{here}:Loss",
            "terms": [{"use": term} for term in terms],
            "adversarial": {"weight": LOSS["disc_weight"], "from_nimg": begins, "adaptive": adaptive},
            "discriminator_from_nimg": begins,
            "reuse_fakes": True,
            "schedule": "generator_first",
        },
        "optimizer": {"generator": ADAM, "discriminator": ADAM},
    }
    return short_run(directory, BATCH, 6, 0, **sections)


def main(path: str, overrides: list[str]) -> None:
    """Train six updates, repeat them with the public losses, and print the distances."""
    sys.path.insert(0, path)
    first, states = trained(importlib.import_module(__spec__.name), overrides)  # the module that the recipe names
    model, judge = autoencoder(), loss()
    theirs = SimpleNamespace(autoencoder=model, D=judge.discriminator)
    optimizers = [torch.optim.Adam(network.parameters(), **ADAM) for network in vars(theirs).values()]
    for network, state in zip(vars(theirs).values(), first, strict=True):
        network.load_state_dict(state)
    for update, (ours, images) in enumerate(states):
        before = [copy.deepcopy(network.state_dict()) for network in vars(theirs).values()]
        made, of_codebook = model(images)
        for index, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            total, _ = judge(of_codebook, images, made, index, update, last_layer=model.get_last_layer())
            total.backward()
            optimizer.step()
        for (name, network), *each in zip(vars(theirs).items(), ours, before, strict=True):
            print(f"update {update}, {name}: {distances(each[0], network, each[1])}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
