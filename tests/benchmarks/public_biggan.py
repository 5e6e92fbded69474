"""Trains BigGAN-PyTorch's unedited classes in bigsgan, and compares each update with that project's own step.

    python -m tests.benchmarks.public_biggan PATH [dotted.key=value ...]

PATH is a checkout of github.com/ajbrock/BigGAN-PyTorch (Brock et al. 2019). One process; ZeRO 0 to 2. Theirs begins
from bigsgan's first weights, and gets its latents, classes and images. Printed for each
update and network: the largest distance of a parameter, relative to what the update changed in it, and of a buffer,
relative to itself. G's biases before batch norm, whose gradient is only rounding, are left out. Adam's epsilon is 1e-3,
so that small gradients stay small.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

import bigsgan
from tests.benchmarks.short_run import short_run

BATCH = 8
SIZES: dict[str, Any] = {"resolution": 32, "n_classes": 10, "adam_eps": 1e-3}
OF_G = {"G_ch": 8, "dim_z": 20, "G_attn": "16", "shared_dim": 16, "hier": True, "G_lr": 1e-3, **SIZES}
OF_D = {"D_ch": 8, "D_attn": "16", "D_lr": 4e-3, **SIZES}
seen: dict[str, list[tuple[Tensor, Tensor]]] = {"generator": [], "discriminator": []}


def public(module: str) -> Any:
    """A module of the checkout, which is on the path."""
    return importlib.import_module(module)


class Generator(nn.Module):
    """An adapter, which also notes its inputs in training."""

    def __init__(self, latent_size: int):
        super().__init__()
        self.public = public("BigGAN").Generator(no_optim=True, **OF_G)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        if self.training:  # and not for a grid of samples
            seen["generator"].append((latents.detach().clone(), labels.clone()))
        return self.public(latents, self.public.shared(labels))


class Discriminator(nn.Module):
    """The same for D."""

    def __init__(self) -> None:
        super().__init__()
        self.public = public("BigGAN").Discriminator(**OF_D)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        seen["discriminator"].append((images.detach().clone(), labels.clone()))
        return self.public(images, labels)


class Given:
    """Stands for the project's distributions: each ``sample_`` takes the next of the given values."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def sample_(self) -> None:
        self.now = self.values.pop(0)

    def __getitem__(self, part: slice) -> Tensor:
        return self.now[part]


def farthest(ours: dict[str, Tensor], theirs: nn.Module, before: dict[str, Tensor]) -> str:
    """The largest relative distances of a parameter and of a buffer, with their names."""
    parameters, buffers = list[tuple[float, str]](), list[tuple[float, str]]()
    is_g, trained = isinstance(theirs, public("BigGAN").Generator), dict(theirs.named_parameters())
    for name, value in theirs.state_dict().items():
        far = float((ours[name] - value).norm())
        if name not in trained:
            buffers.append((far / max(float(value.norm()), 1e-12), name))
        elif not (is_g and name.endswith(("conv1.bias", "conv2.bias", "conv_sc.bias"))):
            moved = float((value - before[name]).norm())
            parameters.append((far / moved if moved else 1e9 * far, name))  # classes that no sample has
    return "  ".join(f"{distance:.1e} ({name})" for distance, name in map(max, (parameters, buffers)))


def recipe(directory: Path) -> Path:
    """Write the recipe of the project's game, small, and return its file."""
    adam = {"betas": [0.0, 0.999], "eps": 1e-3}
    sections = {
        "generator": {"family": f"{__spec__.name}:Generator", "latent_size": 20},
        "discriminator": {"family": f"{__spec__.name}:Discriminator"},
        "optimizer": {"generator": {"lr": 1e-3, **adam}, "discriminator": {"lr": 4e-3, **adam}},
    }
    return short_run(directory, BATCH, 3, 10, **sections)


def main(path: str, overrides: list[str]) -> None:
    """Train three updates, repeat them with the public step, and print the distances."""
    sys.path.insert(0, path)
    sys.modules.setdefault("h5py", ModuleType("h5py"))  # which its data sets import
    states = []
    own = importlib.import_module(__spec__.name)  # the module that the recipe names
    with bigsgan.Trainer(bigsgan.Recipe.read(recipe(Path(tempfile.mkdtemp())), *overrides)) as trainer:
        run = trainer.build()
        engines = run.step.generator, run.step.discriminator
        networks: list[Any] = [engine.network.layers["0"].module.public for engine in engines]  # type: ignore[union-attr]
        first = [copy.deepcopy(network.state_dict()) for network in networks]
        for noted in own.seen.values():
            noted.clear()
        for _ in trainer:  # a report an update
            states.append(([copy.deepcopy(n.state_dict()) for n in networks], copy.deepcopy(own.seen)))
    theirs = public("BigGAN").Generator(**OF_G), public("BigGAN").Discriminator(**OF_D)
    for network, state in zip(theirs, first, strict=True):
        network.load_state_dict(state)
    both, latents, labels = public("BigGAN").G_D(*theirs), Given(), Given()
    forward = both.forward
    both.forward = lambda *inputs, **more: forward(*(x.now if isinstance(x, Given) else x for x in inputs), **more)
    numbers = {"num_D_steps": 1, "num_D_accumulations": 1, "num_G_accumulations": 1, "D_ortho": 0.0, "G_ortho": 0.0}
    config = {"batch_size": BATCH, "toggle_grads": True, "split_D": False, "ema": False, **numbers}
    train = public("train_fns").GAN_training_function(*theirs, both, latents, labels, None, {"itr": 0}, config)
    for update, (ours, noted) in enumerate(states):
        before = [copy.deepcopy(network.state_dict()) for network in theirs]
        of_g, of_d = noted["generator"][2 * update :], noted["discriminator"][2 * update :]
        latents.values, labels.values = ([each[i] for each in of_g[:2]] for i in range(2))
        images, classes = of_d[0]
        train(images[:BATCH], classes[:BATCH])
        for name, *states in zip("GD", ours, theirs, before, strict=True):
            print(f"update {update}, {name}: {farthest(*states)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
