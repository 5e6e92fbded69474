"""Trains a student of one step by family ladd, and compares each update with FastGen's class.

    python -m tests.benchmarks.public_ladd PATH

PATH is a checkout of github.com/NVlabs/FastGen, whose requirements are installed. The public side calls the methods of
its unedited ``LADDModel``, ``Discriminator_ImageDiT`` and ``RFNoiseSchedule`` on whole batches, with our transformers
as its networks. One process, ZeRO 0. Theirs begins from our first weights, and gets our images, labels and random
numbers; it makes noisy images itself. Printed for each update and network: the distance of its parameters, and the
largest of one, relative to what the update changed.
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
from bigsgan.models import noise
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack
from tests.benchmarks import public_fastgen
from tests.benchmarks.public_dmd2 import ADAM, distances
from tests.benchmarks.public_fastgen import BATCH, CHANNELS, DIT, FIRST, LAST, SIDE, updates_of

STEPS, JUDGED = 2, [0, 1]
MEAN, DEVIATION = 0.5, 1.5
PLACES = {"first": 0, "norm": 1, "last": 3}
"""Of our heads' layers in theirs."""


def game(directory: Path) -> bigsgan.Recipe:
    """The recipe of heads on a teacher's features."""
    times = {"first_time": FIRST, "last_time": LAST, "time_mean": MEAN, "time_deviation": DEVIATION}
    return public_fastgen.recipe(
        directory,
        "student",
        init_from={"run": public_fastgen.train_teacher(directory)},
        generator=public_fastgen.GENERATOR,
        discriminator={**DIT, "family": "ladd", "judged": JUDGED, **times},
        objective={"loss": "non_saturating", "d_steps": STEPS, "reuse_fakes": True, "fake_labels": "data"},
        optimizer={network: {"kind": "adamw", **ADAM} for network in ("generator", "discriminator")},
    )


def trained(given: bigsgan.Recipe) -> tuple[dict[str, LayerStack], list[Any]]:
    """The networks as they begin; and of each update what entered them, and the parameters after it."""
    with bigsgan.Trainer(given) as trainer:
        run = trainer.build()
        networks = {"G": run.step.generator.network, "D": run.step.discriminator.network}
        first = {name: copy.deepcopy(network) for name, network in networks.items()}
        return first, updates_of(trainer, networks)


class Teacher(nn.Module):
    """One of our transformers, with the interface of FastGen's teachers."""

    def __init__(self, stack: LayerStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(
        self, noisy: Tensor, times: Tensor, condition: Tensor, return_features_early: bool, feature_indices: set[int]
    ) -> list[Tensor]:
        """The features behind some of its blocks, as maps."""
        assert return_features_early
        carry, found = self.stack.part(0, 1).fold(noisy.flatten(1), condition, times.float()), []
        side = SIDE // DIT["patch"]  # type: ignore[operator]
        for block in range(max(feature_indices) + 1):
            carry = self.stack.part(block + 1, block + 2).fold(*carry)
            if block in feature_indices:
                found.append(carry[0].mT.unflatten(2, (side, side)))
        return found


def public_model(given: bigsgan.Recipe, first: dict[str, LayerStack]) -> Any:
    """FastGen's, with our networks."""
    model = importlib.import_module("fastgen.methods.distribution_matching.ladd").LADDModel
    schedule = importlib.import_module("fastgen.networks.noise_schedule").RFNoiseSchedule()
    head = importlib.import_module("fastgen.networks.discriminators").Discriminator_ImageDiT
    found = model.__new__(model)
    nn.Module.__init__(found)
    times = importlib.import_module("omegaconf").OmegaConf.create({})
    found.config = SimpleNamespace(gan_use_same_t_noise=False, gan_r1_reg_weight=0, sample_t_cfg=times)
    found.device = torch.device("cpu")
    found.net = public_fastgen.Network(first["G"], schedule)
    stack = build_network(given, "generator")
    stack.load_state_dict({**first["G"].state_dict(), **_of_teacher(first["D"])})
    found.teacher = Teacher(stack.requires_grad_(False))
    found.discriminator = head(feature_indices=set(JUDGED), num_blocks=DIT["depth"], inner_dim=DIT["width"])
    found.discriminator.load_state_dict({_public_name(k): v for k, v in first["D"].named_parameters()})
    return found


def _of_teacher(d: LayerStack) -> dict[str, Tensor]:
    return {name: each for name, each in d.state_dict().items() if ".head." not in name}


def _public_name(name: str) -> str:
    """Their name of a tensor of a head."""
    _, number, _, layer, kind = name.split(".")
    return f"cls_pred_heads.{int(number) - 1}.{PLACES[layer]}.{kind}"


def noises(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Times and noise of D's images."""
    shares = torch.sigmoid(MEAN + DEVIATION * noise.normal(seeds, 0, (1,)).squeeze(1))
    return (FIRST + (LAST - FIRST) * shares).double(), noise.normal(seeds, 1, (CHANNELS, SIDE, SIDE))


def main(path: str) -> None:
    """Train seven updates, repeat the first six with the public methods, and print the distances."""
    sys.path.insert(0, path)
    with tempfile.TemporaryDirectory() as directory:
        given = game(Path(directory))
        first, updates = trained(given)
    public = public_model(given, first)
    networks: dict[str, nn.Module] = {"G": public.net.stack, "D": public.discriminator}
    optimizers = {name: torch.optim.AdamW(each.parameters(), **ADAM) for name, each in networks.items()}
    public._get_outputs = lambda *arguments, **keywords: {}  # which callbacks show
    for update, (entered, ours) in enumerate(updates[:-1]):  # samples follow the last
        before = {name: {n: p.detach().clone() for n, p in each.named_parameters()} for name, each in networks.items()}
        *learnt, (_, _, seeds_of_g) = entered["D"]
        for step, (images, _, seeds) in enumerate(learnt):
            latents, y, t = entered["G"][step - STEPS]  # samples come before
            seeds_of_reals, seeds_of_fakes = seeds.chunk(2)
            times, drawn = noises(seeds_of_reals)
            optimizers["D"].zero_grad()
            schedule = public.net.noise_scheduler
            with (
                mock.patch.object(schedule, "sample_t", lambda *_, times=times, **keywords: times),
                mock.patch("torch.randn_like", lambda *_, drawn=drawn, **keywords: drawn),
            ):
                real = images[:BATCH]
                inputs = latents.view_as(real), t.double(), *noises(seeds_of_fakes), real, y
                losses, _ = public._discriminator_update_step(*inputs)
            losses["total_loss"].backward()
            optimizers["D"].step()
        latents, y, t = entered["G"][-1]
        optimizers["G"].zero_grad()
        inputs = latents.view(-1, CHANNELS, SIDE, SIDE), t.double(), *noises(seeds_of_g), {}, y
        losses, _ = public._student_update_step(*inputs)
        losses["total_loss"].backward()
        optimizers["G"].step()
        for name, network in networks.items():
            own = {f"layers.{key}": each for key, each in ours[name].items()}
            if name == "D":
                own = {_public_name(key): each for key, each in own.items() if ".head." in key}
            print(f"update {update}, {name}: {distances(own, network, before[name])}")


if __name__ == "__main__":
    main(sys.argv[1])
