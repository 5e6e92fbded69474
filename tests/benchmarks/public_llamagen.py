"""Trains LlamaGen's unedited tokenizer in bigsgan, and compares each update with that project's own step.

    python -m tests.benchmarks.public_llamagen PATH [dotted.key=value ...]

PATH is a checkout of github.com/FoundationVision/LlamaGen (Sun et al. 2024). Its classes are the autoencoder with its
codebook, the discriminator, and the loss with its adaptive weight; LPIPS, whose weights are a download, is replaced by
distances of random features. One process; ZeRO 0 to 2. Theirs begins from bigsgan's first weights and gets its images.
Printed for each update and network: the distance of its parameters, and the largest of one, relative to what the update
changed. The attentions' biases of keys, whose gradient is only rounding, are left out. Adam's epsilon is 1e-3, so that
small gradients stay small.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bigsgan
from tests.benchmarks.short_run import short_run

BATCH, STARTS_AT = 4, 2
"""Images of an update; the update in which D begins to learn and to count."""
ARGS: dict[str, Any] = {"codebook_size": 32, "codebook_show_usage": False, "z_channels": 32}
ARGS |= {"encoder_ch_mult": [1, 1], "decoder_ch_mult": [1, 1]}
LOSS = {"disc_start": STARTS_AT + 1, "disc_dim": 8, "disc_weight": 0.5, "disc_adaptive_weight": True}
ADAM: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-3}
seen: list[Tensor] = []


def public(module: str) -> Any:
    """A module of the checkout, which is on the path."""
    return importlib.import_module(f"tokenizer.tokenizer_image.{module}")


class Distance(nn.Module):
    """Stands for LPIPS."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(0)) / 5)

    def forward(self, real_images: Tensor, images: Tensor) -> Tensor:
        ours, theirs = (torch.conv2d(x, self.weight, padding=2).tanh() for x in (images, real_images))
        return (ours - theirs).square().mean()


class Autoencoder(nn.Module):
    """An adapter, which also notes the images of training."""

    def __init__(self) -> None:
        super().__init__()
        self.public = public("vq_model").VQModel(public("vq_model").ModelArgs(**ARGS))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            seen.append(images.detach().clone())
        made, (of_codebook, commitment, entropy, _) = self.public(images)
        loss = of_codebook + commitment + entropy if self.training else images.new_zeros(())
        return made, loss.expand(len(images))


class Discriminator(nn.Module):
    """An adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.public = public("discriminator_patchgan").NLayerDiscriminator(ndf=LOSS["disc_dim"])

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.public(images)


class Loss:
    """The public functions; D's side has the weight too."""

    def discriminator(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        return LOSS["disc_weight"] * public("vq_loss").hinge_d_loss(real_logits, fake_logits)

    def generator(self, fake_logits: Tensor) -> Tensor:
        return public("vq_loss").hinge_gen_loss(fake_logits)


def squared(images: Tensor, real_images: Tensor) -> Tensor:
    """The mean squared difference."""
    return (images - real_images).square().mean()


def quantization(codebook_loss: Tensor) -> Tensor:
    """The output itself."""
    return codebook_loss.mean()


def recipe(directory: Path) -> Path:
    """Write the recipe of the project's game, small, and return its file."""
    here = __spec__.name
    adaptive = {"parameter": "decoder.conv_out.weight"}
    begins = STARTS_AT * BATCH
    sections = {
        "generator": {"family": f"{here}:Autoencoder", "reads": "images", "outputs": ["codebook_loss"]},
        "discriminator": {"family": f"{here}:Discriminator"},
        "objective": {
            "loss": f"{here}:Loss",
            "terms": [{"use": f"{here}:{name}"} for name in ("squared", "Distance", "quantization")],
            "adversarial": {"weight": LOSS["disc_weight"], "from_nimg": begins, "adaptive": adaptive},
            "discriminator_from_nimg": begins,
            "reuse_fakes": True,
            "schedule": "generator_first",
        },
        "optimizer": {"generator": ADAM, "discriminator": ADAM},
    }
    return short_run(directory, BATCH, 6, 0, **sections)


def distances(ours: dict[str, Tensor], theirs: nn.Module, before: dict[str, Tensor]) -> str:
    """Those of the whole network and of the farthest parameter, with its name, relative to what the update changed."""
    found, far, moved = list[tuple[float, str]](), list[Tensor](), list[Tensor]()
    for name, parameter in theirs.named_parameters():
        if name.endswith("k.bias"):
            continue
        far.append((ours[name] - parameter.detach()).norm())
        moved.append((parameter.detach() - before[name]).norm())
        found.append((float(far[-1] / moved[-1].clamp(min=1e-30)), name))
    whole = torch.stack(far).norm() / torch.stack(moved).norm().clamp(min=1e-30)
    return "{:.1e}, farthest {:.1e} ({})".format(whole, *max(found))


def trained(game: Any, overrides: list[str]) -> tuple[list[Any], list[Any]]:
    """Both public networks' first states; and of each update those after it, and its images.

    ``game`` is a module with ``recipe``, whose networks hold ``public`` ones, and ``seen``.
    """
    states = []
    with bigsgan.Trainer(bigsgan.Recipe.read(game.recipe(Path(tempfile.mkdtemp())), *overrides)) as trainer:
        run = trainer.build()
        engines = run.step.generator, run.step.discriminator
        networks: list[Any] = [engine.network.layers["0"].module.public for engine in engines]  # type: ignore[union-attr]
        first = [copy.deepcopy(network.state_dict()) for network in networks]
        for _ in trainer:  # a report an update
            states.append(([copy.deepcopy(n.state_dict()) for n in networks], game.seen[-1]))
    return first, states


def main(path: str, overrides: list[str]) -> None:
    """Train six updates, repeat them with the public step, and print the distances."""
    sys.path.insert(0, path)
    first, states = trained(importlib.import_module(__spec__.name), overrides)  # the module that the recipe names
    model = public("vq_model").VQModel(public("vq_model").ModelArgs(**ARGS))
    public("vq_loss").LPIPS = Distance
    loss = public("vq_loss").VQLoss(**LOSS)
    theirs = model, loss.discriminator
    optimizers = [torch.optim.Adam(network.parameters(), **ADAM) for network in theirs]
    for network, state in zip(theirs, first, strict=True):
        network.load_state_dict(state)
    for update, (ours, images) in enumerate(states):
        before = [copy.deepcopy(network.state_dict()) for network in theirs]
        numbers = {"global_step": update + 1, "log_every": 10**9}
        for index, (optimizer, more) in enumerate(
            zip(optimizers, ({"last_layer": model.decoder.last_layer}, {}), strict=True)
        ):
            if index == 0:
                made, of_codebook = model(images)
            optimizer.zero_grad()
            loss(of_codebook, images, made, optimizer_idx=index, **numbers, **more).backward()
            optimizer.step()
        for name, *each in zip(("autoencoder", "D"), ours, theirs, before, strict=True):
            print(f"update {update}, {name}: {distances(*each)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
