"""Trains DMD2's public guidance network from outside the package, and compares each update with its own losses.

    python -m tests.benchmarks.public_dmd2 PATH [dotted.key=value ...]

PATH is a checkout of github.com/tianweiy/DMD2 (Yin et al. 2024, arXiv 2405.14867). Its unedited ``EDMGuidance`` is D,
with a small network in place of EDM's. The public side calls the same class on whole batches, in the order of its
``train_edm.py``: G learns at every second step, D at each. One process, at ZeRO 0 to 2. Theirs begins from our first
weights, and gets our images, latents, labels, and random numbers. Printed for each update and network: the distance of
its parameters, and the largest of one, relative to what the update changed.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import bigsgan
from bigsgan import plugins
from bigsgan.models import noise
from tests.benchmarks.short_run import short_run

BATCH, SIDE, CHANNELS, CLASSES, SIGMA, STEPS = 4, 8, 3, 3, 80.0, 2
GAN_WEIGHT = 0.1
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-3, "weight_decay": 0.01}
ARGUMENTS = SimpleNamespace(
    sigma_data=0.5,
    sigma_max=SIGMA,
    sigma_min=0.002,
    rho=7.0,
    gan_classifier=True,
    diffusion_gan=True,
    diffusion_gan_max_timestep=1000,
    num_train_timesteps=1000,
    min_step_percent=0.02,
    max_step_percent=0.98,
    model_id="",
)


STREAMS = ("compute_cls_logits", "compute_loss_fake", "compute_distribution_matching_loss")
"""The public functions that draw."""


class Denoiser(nn.Module):
    """A small network with the interface of EDM's: images, sigmas, one-hot labels -> denoised images."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.map_augment = nn.Linear(1, 1)
        self.first, self.last = nn.Conv2d(CHANNELS, 768, 3, padding=1), nn.Conv2d(768, CHANNELS, 3, padding=1)
        self.labels = nn.Linear(CLASSES, 768)

    def forward(self, images: Tensor, sigma: Tensor, labels: Tensor, return_bottleneck: bool = False) -> Tensor:
        """The features at 8 x 8, or the images."""
        sigma = sigma.view(-1, 1, 1, 1)
        condition = self.labels(labels)[:, :, None, None] + sigma.log() / 4
        h = nn.functional.silu(self.first(images / (1 + sigma**2).sqrt()) + condition)
        return h if return_bottleneck else self.last(h)


@contextmanager
def drawing(seeds: dict[str, list[Tensor]]) -> Iterator[None]:
    """Let public functions draw, twice in each call, from the seeds (n,) of their samples, which are listed by call."""
    num_drawn = dict.fromkeys(seeds, 0)

    def draw(kind: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        function = sys._getframe(2).f_code.co_name
        call, num_drawn[function] = num_drawn[function] // 2, num_drawn[function] + 1
        stream = 2 * list(STREAMS).index(function) + (kind is noise.normal)
        return kind(seeds[function][call], stream, shape)

    def randint(low: int, high: int, size: list[int], **options: Any) -> Tensor:
        return (low + draw(noise.uniform, (1,)) * (high - low)).long().view(size)

    def randn_like(images: Tensor) -> Tensor:
        return draw(noise.normal, tuple(images.shape[1:]))

    with mock.patch("torch.randint", randint), mock.patch("torch.randn_like", randn_like):
        yield


def make_guidance() -> Any:
    """The public class, which reads its teacher from a file, with our network's."""
    found = ModuleType("main.edm.edm_network")
    found.get_edm_network = lambda arguments: Denoiser()  # type: ignore[attr-defined]
    stubs = {
        found.__name__: found,
        "dnnlib": SimpleNamespace(util=SimpleNamespace(open_url=functools.partial(Path.open, mode="rb"))),
    }
    with mock.patch.dict(sys.modules, stubs), torch.device("cpu"), tempfile.NamedTemporaryFile() as file:
        pickle.dump({"ema": Denoiser()}, file)
        file.flush()
        ARGUMENTS.model_id = Path(file.name)
        return importlib.import_module("main.edm.edm_guidance").EDMGuidance(ARGUMENTS, None)


class Student(nn.Module):
    """One step of a network that denoises."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Denoiser()
        self.network.model.map_augment = None

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Latents (n, Z), labels (n,) -> images."""
        sigma = torch.full_like(latents[:, 0], SIGMA)
        return self.network(SIGMA * latents.unflatten(1, (CHANNELS, SIDE, SIDE)), sigma, torch.eye(CLASSES)[labels])


class Guidance(nn.Module):
    """The public class, which returns means over a batch, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.public = make_guidance()

    def forward(self, images: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        """Logits, errors of the fake score, and losses that match distributions, each (n,)."""
        if images.is_meta:
            return tuple(images.mean((1, 2, 3)) for _ in range(3))
        rows = []
        for image, label, seed in zip(
            images.split(1), torch.eye(CLASSES)[labels].split(1), seeds.split(1), strict=True
        ):
            with drawing({name: [seed] for name in STREAMS}):
                logit = self.public.compute_cls_logits(image, label)
                error = self.public.compute_loss_fake(image, label)[0]["loss_fake_mean"]
                matching = image.new_zeros(())
                if images.requires_grad:
                    matching = self.public.compute_distribution_matching_loss(image, label)[0]["loss_dm"]
            rows.append(torch.stack([logit.squeeze(), error, matching]))
        return torch.stack(rows).unbind(1)


def denoising(fake_denoising: Tensor) -> Tensor:
    """The fake score's loss."""
    return fake_denoising.mean()


def matching(fake_matching: Tensor) -> Tensor:
    """The loss whose gradient matches distributions."""
    return fake_matching.mean()


def recipe(directory: Path) -> Path:
    """Write the recipe of the game, and return its file."""
    here, data = "tests.benchmarks.public_dmd2", {"kind": "synthetic", "num_images": 64}
    data |= {"resolution": SIDE, "image_channels": CHANNELS, "num_classes": CLASSES}
    terms = [
        {"use": f"{here}:denoising", "network": "discriminator", "weight": 1},
        {"use": f"{here}:matching", "weight": 1},
    ]
    sections = {
        "data": data,
        "generator": {"family": f"{here}:Student", "latent_size": CHANNELS * SIDE**2},
        "discriminator": {"family": f"{here}:Guidance", "seeds": True, "outputs": ["denoising", "matching"]},
        "objective": {
            "loss": "non_saturating",
            "schedule": "generator_first",
            "reuse_fakes": True,
            "d_steps": STEPS,
            "adversarial": {"weight": GAN_WEIGHT},
            "terms": terms,
        },
        "optimizer": {name: {"kind": "adamw", **ADAM} for name in ("generator", "discriminator")},
    }
    return short_run(directory, BATCH, 7, CLASSES, **sections)


def state(network: nn.Module, prefix: str) -> dict[str, Tensor]:
    """A copy of a network's parameters and buffers, by their names below a prefix."""
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name.partition(prefix)[2]: each.detach().clone() for name, each in named if prefix in name}


PREFIXES = {"G": "module.network.", "D": "module.public."}


def trained(overrides: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """The networks' first parameters; and of each update what entered them, and the parameters after it."""
    updates, entered = list[Any](), {"G": list[Any](), "D": list[Any]()}
    with bigsgan.Trainer(bigsgan.Recipe.read(recipe(Path(tempfile.mkdtemp())), *overrides)) as trainer:
        run = trainer.build()
        networks = {"G": run.step.generator.network, "D": run.step.discriminator.network}

        def kept() -> dict[str, dict[str, Tensor]]:
            return {name: state(network, PREFIXES[name]) for name, network in networks.items()}

        def noting(name: str) -> Callable[..., None]:
            return lambda module, given: entered[name].append([each.detach().clone() for each in given])

        first = kept()
        for name, network in networks.items():
            network.layers["0"].register_forward_pre_hook(noting(name))
        for _ in trainer:  # a report an update
            updates.append(({name: list(calls) for name, calls in entered.items()}, kept()))
            for calls in entered.values():
                calls.clear()
    return first, updates


def distances(ours: dict[str, Tensor], theirs: nn.Module, before: dict[str, Tensor]) -> str:
    """Those of the whole network and of the farthest parameter, with its name, relative to what the update changed."""
    names = [name for name, each in theirs.named_parameters() if each.requires_grad]
    now = dict(theirs.named_parameters())
    far = {name: (ours[name] - now[name].detach()).norm() for name in names}
    moved = {name: (now[name].detach() - before[name]).norm() for name in names}
    farthest = max(names, key=lambda name: float(far[name] / moved[name].clamp(min=1e-30)))
    whole = torch.stack([*far.values()]).norm() / torch.stack([*moved.values()]).norm()
    return f"{whole:.1e}, farthest {far[farthest] / moved[farthest]:.1e} ({farthest})"


def main(path: str, overrides: list[str]) -> None:
    """Train seven updates, repeat the first six with the public losses, and print the distances."""
    sys.path.insert(0, path)
    names = ("Student", "Guidance", "denoising", "matching")
    plugins.give([f"tests.benchmarks.public_dmd2:{name}" for name in names])
    first, updates = trained(overrides)
    guidance, student = make_guidance(), Denoiser()
    student.model.map_augment = None
    networks: dict[str, nn.Module] = {"G": student, "D": guidance}
    for name, network in networks.items():
        network.load_state_dict(first[name])
    optimizers = {
        name: torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], **ADAM)
        for name, each in networks.items()
    }
    for update, (entered, ours) in enumerate(updates[:-1]):  # samples follow the last
        before = {name: {n: p.detach().clone() for n, p in each.named_parameters()} for name, each in networks.items()}
        judged, *learnt = entered["D"]
        for step, (images, labels, seeds) in enumerate(learnt):
            real, fake = (
                dict(zip("xys", each, strict=True))
                for each in zip(*(t.chunk(2) for t in (images, torch.eye(CLASSES)[labels], seeds)), strict=True)
            )
            latents, classes = entered["G"][step - STEPS]  # the first samples come before
            sigma = torch.full((BATCH,), SIGMA)
            made = student(SIGMA * latents.view_as(real["x"]), sigma, torch.eye(CLASSES)[classes])
            if step == 0:
                seeds_of_g = {
                    name: [judged[2]] for name in ("compute_cls_logits", "compute_distribution_matching_loss")
                }
                guidance.requires_grad_(False)
                with drawing(seeds_of_g):
                    losses, _ = guidance(generator_turn=True, generator_data_dict={"image": made, "label": fake["y"]})
                guidance.requires_grad_(True)
                guidance.real_unet.requires_grad_(False)
                (losses["loss_dm"] + GAN_WEIGHT * losses["gen_cls_loss"]).backward()
                optimizers["G"].step()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            data = {"image": made.detach(), "label": fake["y"]}
            data["real_train_dict"] = {"real_image": real["x"], "real_label": real["y"]}
            with drawing({"compute_loss_fake": [fake["s"]], "compute_cls_logits": [real["s"], fake["s"]]}):
                losses, _ = guidance(guidance_turn=True, guidance_data_dict=data)
            (losses["loss_fake_mean"] + losses["guidance_cls_loss"]).backward()
            optimizers["D"].step()
        for name, network in networks.items():
            print(f"update {update}, {name}: {distances(ours[name], network, before[name])}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
