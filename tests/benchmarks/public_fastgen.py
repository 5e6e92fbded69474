"""Trains a student of four steps by family dmd2, and compares each update and samples with FastGen's class.

    python -m tests.benchmarks.public_fastgen PATH

PATH is a checkout of github.com/NVlabs/FastGen, whose requirements are installed. The public side calls the methods of
its unedited ``DMD2Model`` and ``RFNoiseSchedule`` on whole batches, with our transformers in place of its networks. Its
discriminator judges the teacher's features, ours the fake score's, so that neither has one here: the head's weights are
0 and stay. One process, ZeRO 0. Theirs begins from our first weights, and gets our images, labels and random numbers;
it makes noisy images and steps itself. Printed for each update and network: the distance of its parameters, and the
largest of one, relative to what the update changed; and how far the samples of both samplers are from ours.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import bigsgan
from bigsgan.config.families.dmd2 import name_in_generator
from bigsgan.draws import Draws
from bigsgan.models import noise
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack
from bigsgan.models.steps import in_steps
from tests.benchmarks.public_dmd2 import ADAM, distances, state
from tests.benchmarks.short_run import short_run

BATCH, SIDE, CHANNELS, CLASSES, STEPS, SEED = 8, 8, 3, 3, 2, 0
SIZE = CHANNELS * SIDE**2
TIMES = [1.0, 0.9375, 5 / 6, 0.625, 0.0]
GUIDANCE = 1.5
FIRST, LAST = 0.02, 0.98
DIT = {"family": "dit", "depth": 2, "width": 32, "heads": 2, "patch": 2}
GENERATOR = {**DIT, "latent_size": SIZE, "times": True}


def recipe(directory: Path, name: str, **sections: Any) -> bigsgan.Recipe:
    """The recipe of a game with a DiT."""
    data = {"kind": "synthetic", "num_images": 64, "resolution": SIDE}
    data |= {"image_channels": CHANNELS, "num_classes": CLASSES}
    (directory / name).mkdir()
    return bigsgan.Recipe.read(short_run(directory / name, BATCH, 7, CLASSES, data=data, seed=SEED, **sections))


def train_teacher(directory: Path) -> str:
    """Train it by seven updates of flow matching, and return its run."""
    optimizer = {"generator": {"lr": 1e-2}}
    objective, none = {"flow": {}}, {"family": "none"}
    given = recipe(
        directory, "teacher", generator=GENERATOR, discriminator=none, objective=objective, optimizer=optimizer
    )
    with bigsgan.Trainer(given) as trainer:
        for _ in trainer:
            pass
    return given.out


def game(directory: Path) -> bigsgan.Recipe:
    """The recipe of distribution matching."""
    frozen = {"groups": [{"parameters": "*head.weight", "frozen_from_nimg": 0}]}
    return recipe(
        directory,
        "student",
        init_from={"run": train_teacher(directory)},
        generator={**GENERATOR, "steps": 4, "time_shift": 5},
        discriminator={**DIT, "family": "dmd2", "guidance": GUIDANCE, "first_time": FIRST, "last_time": LAST},
        objective={
            "loss": "non_saturating",
            "schedule": "generator_first",
            "reuse_fakes": True,
            "d_steps": STEPS,
            "distribution_matching": {"weight": 1, "denoising": 1},
        },
        optimizer={"generator": {"kind": "adamw", **ADAM}, "discriminator": {"kind": "adamw", **ADAM, **frozen}},
    )


def trained(given: bigsgan.Recipe) -> tuple[dict[str, LayerStack], list[Any]]:
    """The networks as they begin; and of each update what entered them, and the parameters after it."""
    with bigsgan.Trainer(given) as trainer:
        run = trainer.build()
        networks = {"G": run.step.generator.network, "D": run.step.discriminator.network}
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # as equal scores would leave the student as it is
            for name, each in networks["D"].named_parameters():
                each += 0.05 * torch.randn(each.shape, generator=generator)
                if name.endswith("head.weight"):
                    each.zero_()
        first = {name: copy.deepcopy(network) for name, network in networks.items()}
        return first, updates_of(trainer, networks)


def updates_of(trainer: bigsgan.Trainer, networks: dict[str, LayerStack]) -> list[Any]:
    """Of each update what entered the networks, and the parameters after it."""
    updates, entered = list[Any](), {name: list[Any]() for name in networks}
    for name, network in networks.items():
        network.layers["0"].register_forward_pre_hook(
            lambda module, inputs, name=name: entered[name].append([each.detach().clone() for each in inputs])
        )
    for _ in trainer:  # a report an update
        kept = {name: state(network, "layers.") for name, network in networks.items()}
        updates.append(({name: list(calls) for name, calls in entered.items()}, kept))
        for calls in entered.values():
            calls.clear()
    return updates


class Network(nn.Module):
    """One of our transformers, with the interface of FastGen's networks."""

    def __init__(self, stack: LayerStack, schedule: nn.Module) -> None:
        super().__init__()
        self.stack, self.noise_scheduler = stack, schedule

    def forward(self, noisy: Tensor, times: Tensor, condition: Tensor, fwd_pred_type: str) -> Tensor:
        """The image, or its velocity."""
        found: Tensor = self.stack(noisy.flatten(1), condition, times.float())
        return found if fwd_pred_type == "x0" else (noisy - found) / times.float().view(-1, 1, 1, 1)


def public_model(given: bigsgan.Recipe, first: dict[str, LayerStack]) -> Any:
    """FastGen's, with our networks."""
    model = importlib.import_module("fastgen.methods.distribution_matching.dmd2").DMD2Model
    schedule = importlib.import_module("fastgen.networks.noise_schedule").RFNoiseSchedule()
    schedule._max_t = 1.0  # theirs begins at 0.999
    found = model.__new__(model)
    nn.Module.__init__(found)
    found.config = SimpleNamespace(
        gan_loss_weight_gen=0,
        gan_r1_reg_weight=0,
        guidance_scale=GUIDANCE,
        skip_layers=None,
        fake_score_pred_type="flow",
    )
    found.device = torch.device("cpu")
    found.net = Network(first["G"], schedule)
    for name, of_teacher in (("fake_score", False), ("teacher", True)):
        stack, section = build_network(given, "generator"), given.discriminator
        own = {key: each for key, each in first["D"].state_dict().items() if (".real." in key) == of_teacher}
        stack.load_state_dict({name_in_generator(section, k): each for k, each in own.items() if ".head." not in k})
        setattr(found, name, Network(stack.requires_grad_(not of_teacher), schedule))
    return found


def noises(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Times and noise of D's images."""
    times = FIRST + (LAST - FIRST) * noise.uniform(seeds, 0, (1,)).squeeze(1)
    return times.double(), noise.normal(seeds, 1, (CHANNELS, SIDE, SIDE))


def main(path: str) -> None:
    """Train seven updates, repeat the first six with the public methods, and print the distances."""
    sys.path.insert(0, path)
    with tempfile.TemporaryDirectory() as directory:
        given = game(Path(directory))
        first, updates = trained(given)
    public, null = public_model(given, first), torch.zeros(BATCH, CLASSES)
    networks = {"G": public.net.stack, "D": public.fake_score.stack}
    optimizers = {name: torch.optim.AdamW(each.parameters(), **ADAM) for name, each in networks.items()}
    public._get_outputs = lambda *arguments, **keywords: {}  # which callbacks show
    for update, (entered, ours) in enumerate(updates[:-1]):  # samples follow the last
        before = {name: {n: p.detach().clone() for n, p in each.named_parameters()} for name, each in networks.items()}
        (_, _, seeds_of_g), *learnt = entered["D"]
        for step, (images, labels, seeds) in enumerate(learnt):
            real, y, (_, seeds_of_fakes) = images[:BATCH], labels[:BATCH], seeds.chunk(2)
            times = entered["G"][step - STEPS][2].double()  # samples come before
            assert set(times.tolist()) <= {float(torch.tensor(each)) for each in TIMES}, times
            seeds_of_reals = torch.from_numpy(Draws(SEED).seeds("discriminator/latent", (update, step), 0, BATCH))
            drawn = noise.normal(seeds_of_reals, 0, real.shape[1:])
            noisy = public.net.noise_scheduler.forward_process(real, drawn, times)
            if step == 0:
                data = {"real": real}
                losses, _ = public._student_update_step(noisy, times, *noises(seeds_of_g), data, y, null)
                losses["total_loss"].backward()
            optimizers["D"].zero_grad()
            given_to_fake = noisy, times, *noises(seeds_of_fakes), real, y
            losses, _ = public._fake_score_discriminator_update_step(*given_to_fake)
            losses["total_loss"].backward()
            if step == 0:  # D's first step learns from the images of G's update
                optimizers["G"].step()
                optimizers["G"].zero_grad()
            optimizers["D"].step()
        for name, network in networks.items():
            own = {f"layers.{key}": each for key, each in ours[name].items()}
            print(f"update {update}, {name}: {distances(own, network, before[name])}")
    compare_samples(public, given)


@torch.no_grad()
def compare_samples(public: Any, given: bigsgan.Recipe) -> None:
    """Print how far samples are from ours, relative to their size, by both samplers."""
    section: Any = given.generator
    labels, seeds = torch.arange(BATCH) % CLASSES, torch.arange(BATCH)
    z = torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(2))
    for sampler in ("sde", "ode"):
        ours = in_steps(public.net.stack, section.model_copy(update={"sampler": sampler}))(z, labels, seeds)
        drawn = [noise.normal(seeds, 2**33 + step, (CHANNELS, SIDE, SIDE)) for step in range(3)]
        with mock.patch("torch.randn_like", lambda images, drawn=drawn: drawn.pop(0)):
            times, start = torch.tensor(TIMES), z.view_as(ours)
            theirs = public._student_sample_loop(public.net, start, times, labels, student_sample_type=sampler)
        print(f"samples by {sampler}: {(ours - theirs).norm() / ours.norm():.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
