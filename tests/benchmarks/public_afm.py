"""Trains ``family: dit`` as an adversarial flow model, and compares each update with the public trainer's own step.

    python -m tests.benchmarks.public_afm PATH [dotted.key=value ...]

PATH is a checkout of github.com/ByteDance-Seed/Adversarial-Flow-Models (Lin et al. 2025), with DiT's models.py at
models/afm/dit/dit.py as its README says; DiT needs timm. Its classes are both networks and the normalization of
gradients, and ``training_step`` is its trainer's method. One process, at ZeRO 0 to 2. Theirs begins from our first
weights, and gets its images, noise and labels. Printed for each update and network: the distance of its parameters, and
the largest of one, relative to what the update changed. Left out are the attentions' biases of keys, which softmax does
not see.
"""

from __future__ import annotations

import ast
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigsgan
from bigsgan.doctor.games import awake
from tests.benchmarks.short_run import short_run

BATCH, SIDE, CHANNELS, CLASSES, SIGMA = 8, 8, 3, 3, 0.25
SHRINK = 4
"""Penalties take a quarter of each batch: ours every fourth image, theirs the first ones, so these are put first."""
SIZE: dict[str, int] = {"depth": 2, "width": 32, "heads": 2}
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": [0.0, 0.9], "eps": 1e-3, "weight_decay": 0.01}
SEGMENTS = [BATCH, BATCH, BATCH // SHRINK, BATCH // SHRINK]
ORDER = sorted(range(BATCH), key=lambda number: number % SHRINK > 0)
NAMES = {
    "modulation.linear": "adaLN_modulation.1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "perceptron.expand": "mlp.fc1",
    "perceptron.contract": "mlp.fc2",
}


class Given(dict[str, Any]):
    """Settings, as attributes too."""

    __getattr__ = dict.__getitem__


CONFIG = Given(
    adversarial=Given(gp_scale=0.25, gp_bsz_ratio=1 / SHRINK, gp_eps=SIGMA, cp_scale=0.01, ot_scale=0.2),
    training=Given(),
    gen=Given(),
)


def recipe(directory: Path) -> Path:
    """Write the recipe of the game, small, and return its file."""
    penalty = {"weight": 0.5, "form": "finite_difference", "sigma": SIGMA, "check_every": 0, "batch_shrink": SHRINK}
    data = {
        "kind": "synthetic",
        "resolution": SIDE,
        "image_channels": CHANNELS,
        "num_classes": CLASSES,
        "num_images": 64,
    }
    sections = {
        "data": data,
        "generator": {"family": "dit", "latent_size": CHANNELS * SIDE**2, **SIZE},
        "discriminator": {"family": "dit", **SIZE},
        "objective": {
            "loss": "relativistic",
            "reuse_fakes": True,
            "fake_labels": "data",
            "r1": penalty,
            "r2": penalty,
            "centering": 0.01,
            "transport": {"weight": 0.2},
            "adversarial": {"normalize": {"decay": 0.9}},
        },
        "optimizer": {name: {"kind": "adamw", **ADAM} for name in ("generator", "discriminator")},
    }
    return short_run(directory, BATCH, 7, CLASSES, **sections)


def public_step(path: Path) -> dict[str, Any]:
    """The methods of the public trainer, without the modules that its file imports."""
    tree = ast.parse((path / "train_adversarial_flow_imagenet.py").read_text())
    (trainer,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    wanted = ("is_dis_step", "get_gp_scale", "get_ot_scale", "get_aug_p", "augment", "interpolate", "training_step")
    methods: list[ast.stmt] = [
        each for each in trainer.body if isinstance(each, ast.FunctionDef) and each.name in wanted
    ]
    space: dict[str, Any] = {"torch": torch, "F": F, "Tensor": Tensor}
    exec(compile(ast.Module(methods, []), str(path), "exec"), space)
    return {name: space[name] for name in wanted}


def public_networks() -> list[Any]:
    """Their generator and discriminator."""
    shape = {"input_size": SIDE, "in_channels": CHANNELS, "patch_size": 2, "num_classes": CLASSES}
    shape |= {"depth": SIZE["depth"], "hidden_size": SIZE["width"], "num_heads": SIZE["heads"]}
    more = {"class_dropout_prob": 0.0, "learn_sigma": False}
    kinds = ("generator", "Generator"), ("discriminator", "Discriminator")
    return [getattr(importlib.import_module(f"models.afm.dit.{file}"), kind)(**shape, **more) for file, kind in kinds]


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A network's parameters by their names, on a copy."""
    last, found = SIZE["depth"] + 1, dict[str, Tensor]()
    first = {"linear.weight": "x_embedder.proj.weight", "linear.bias": "x_embedder.proj.bias", "token": "dis_embed"}
    first |= {"embedding.weight": "y_embedder.embedding_table.weight"}
    is_generator = f"layers.{last}.linear.bias" in state
    for name, value in state.items():
        _, number, rest = name.split(".", 2)
        for ours, theirs in NAMES.items():
            rest = rest.replace(ours, theirs)
        if number == "0":
            theirs = first[rest]
        elif int(number) < last:
            theirs = f"blocks.{int(number) - 1}.{rest}"
        else:
            theirs = f"final_layer.{rest}" if is_generator else "final_layer.1.weight"
        found[theirs] = value.detach().clone()
    found["x_embedder.proj.weight"] = found["x_embedder.proj.weight"].view(SIZE["width"], CHANNELS, 2, 2)
    return found


def distances(ours: dict[str, Tensor], theirs: nn.Module, before: dict[str, Tensor]) -> str:
    """Those of the whole network and of the farthest parameter, with its name, relative to what the update changed."""
    found, far, moved, width = list[tuple[float, str]](), list[Tensor](), list[Tensor](), SIZE["width"]
    for name, parameter in theirs.named_parameters():
        if name not in ours:
            continue
        own, now, then = ours[name], parameter.detach(), before[name]
        if name.endswith("qkv.bias"):
            own, now, then = (torch.cat([each[:width], each[2 * width :]]) for each in (own, now, then))
        far.append((own - now).norm())
        moved.append((now - then).norm())
        found.append((float(far[-1] / moved[-1].clamp(min=1e-30)), name))
    whole = torch.stack(far).norm() / torch.stack(moved).norm().clamp(min=1e-30)
    return "{:.1e}, farthest {:.1e} ({})".format(whole, *max(found))


def trained(overrides: list[str]) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """First parameters of G and D; and of each update what entered the networks, and the parameters after it."""
    updates, inputs = list[Any](), dict[str, Any]()
    with awake(), bigsgan.Trainer(bigsgan.Recipe.read(recipe(Path(tempfile.mkdtemp())), *overrides)) as trainer:
        run = trainer.build()
        networks: list[Any] = [run.step.generator.network, run.step.discriminator.network]
        first = [renamed(dict(network.named_parameters())) for network in networks]

        def note(name: str, given: Any) -> None:
            if len(given[0]) == {"G": BATCH, "D": sum(SEGMENTS)}[name]:  # where D trains
                inputs[name] = [each.detach().clone() for each in given]

        for name, network in zip("GD", networks, strict=True):
            network.layers["0"].register_forward_pre_hook(lambda module, given, name=name: note(name, given))
        for _ in trainer:  # a report an update
            updates.append((dict(inputs), [renamed(dict(network.named_parameters())) for network in networks]))
            inputs.clear()
    return first, updates


def main(path: str, overrides: list[str]) -> None:
    """Train seven updates, repeat the first six with the public step, and print the distances."""
    sys.path.insert(0, path)
    first, updates = trained(overrides)
    networks = public_networks()
    for network, state in zip(networks, first, strict=True):
        missing, unexpected = network.load_state_dict(state, strict=False)
        assert [*missing, *unexpected] == ["pos_embed"], "all but the fixed positions are ours"
    optimizers = [torch.optim.AdamW([p for p in n.parameters() if p.requires_grad], **ADAM) for n in networks]
    public = SimpleNamespace(config=CONFIG, cls=None, gen=networks[0], dis=networks[1])
    for name, method in public_step(Path(path)).items():
        setattr(public, name, method.__get__(public))
    public.dis_trainable_params = [p for p in networks[1].parameters() if p.requires_grad]
    public.gen_dis_grad_capture = public.gen_ot_grad_capture = nn.Identity()
    public.grad_norm = importlib.import_module("grad_norm").GradientNormalization()
    for update, (inputs, ours) in enumerate(updates[:-1]):  # samples follow the last
        before = [{n: p.detach().clone() for n, p in network.named_parameters()} for network in networks]
        real, fake, *ahead = inputs["D"][0].split(SEGMENTS)
        z, labels = inputs["G"][0].view_as(real), inputs["G"][1]
        real, fake, z, labels = (each[ORDER] for each in (real, fake, z, labels))
        pairs = zip(ahead, (real, fake), strict=True)
        noise = [(each - start[: len(each)]) / SIGMA for each, start in pairs]
        given = {"latents": real, "labels": labels, "noises_src": z, "noises_tgt": z, "noises_cg": z}
        given |= {"noises_r1": noise[0], "noises_r2": noise[1]}
        given |= {"timesteps_src": torch.ones(BATCH), "timesteps_tgt": torch.zeros(BATCH), "timesteps_cg": None}
        for step, optimizer in zip((2 * update, 2 * update + 1), reversed(optimizers), strict=True):
            for each in optimizers:
                each.zero_grad()
            losses, _ = public.training_step(step, **given)
            losses["loss/total"].backward()
            optimizer.step()
        for name, *each in zip("GD", ours, networks, before, strict=True):
            print(f"update {update}, {name}: {distances(*each)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
