"""The doctor's smallest games: a tiny recipe of each family and of variants of some, and layouts of it.

The recipe has every kind of layer of BigGAN. It begins where no tensor's change is too small to compare.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

import torch

from bigsgan.config import Recipe, RunPlan, load_recipe, plan_run
from bigsgan.models import cat, dcgan, dit, gat, pix2pix
from bigsgan.models.layers import SelfAttention


@torch.no_grad()
def attend(layer: SelfAttention, generators: Any = None) -> None:
    """Switch attention on: it begins switched off, and then its weights have no gradient that could be compared."""
    layer.gamma.fill_(0.7)


@contextmanager
def awake() -> Iterator[None]:
    """Initialize networks inside the block so that a few updates change every tensor visibly.

    The published initial weights are for layers with hundreds of channels: in tiny layers, weights of 0.02 make signals
    and gradients too small to compare.
    """
    with (
        mock.patch.object(SelfAttention, "initialize", attend),
        mock.patch.object(dcgan, "_STD", 0.2),
        mock.patch.object(pix2pix, "_STD", 0.2),
        mock.patch.multiple(dit, _STD=1.0, _MODULATION_GAIN=0.5, _HEAD_GAIN=1.0),
        mock.patch.multiple(gat, _STD=1.0, _MAPPING_RATE=1.0, _MODULATION_GAIN=1.0, _LAYER_SCALE=0.5),
        mock.patch.object(cat, "_STD", 1.0),
    ):
        yield


TINY = """
out: unset
seed: 1
total_nimg: 1000000
batch: 8
report_nimg: 1000000
sample_nimg: 1000000
checkpoint_nimg: 1000000
data: {kind: digits, resolution: 16}
generator: {channels: 2, latent_size: 12, embedding_size: 6, attention: [8]}
discriminator: {channels: 2, attention: [8]}
optimizer:
  generator: {kind: sgd, lr: 0.002}
  discriminator: {kind: sgd, lr: 0.002}
ema: {half_life_nimg: 16}
"""

_AUTOENCODER = "family: autoencoder, channels: 4, multipliers: [1, 2], num_blocks: 1, norm_groups: 2"
_R3GAN = "family: r3gan, embedding_size: 6, widths: [8, 8, 4], cardinalities: [4, 2, 2], blocks: [1, 2, 1]"
# By default, the learning rate of a mapping network is a hundredth of that of other layers.
_STYLEGAN2 = "family: stylegan2, mapping_layers: 2, mapping_lr_multiplier: 1.0, channel_base: 64, channel_max: 8"
_GAT = "family: gat, width: 16, heads: 2, patch: 4, levels: 2"
_CAT = "family: cat, width: 16, heads: 2, levels: 2, depth: 2"

TINY_GAMES: dict[str, list[str]] = {
    "biggan_deep": [
        "data.resolution=[24,16]",
        "generator={family: biggan_deep, channels: 4, latent_size: 12, embedding_size: 6, attention: [8]}",
        "discriminator={family: biggan_deep, channels: 4, attention: [8]}",
    ],
    "biggan_light": [
        "data={kind: synthetic, resolution: 16, num_images: 64, num_classes: 3, condition_size: 2}",
        "generator={channels: 2, latent_size: 12, embedding_size: 6, block: inverted_residual, width: 3, depth: 1}",
        "discriminator={channels: 2, block: grouped, groups: 2, depth: 2, width: 3}",
        "objective.loss=non_saturating",  # with hinge, D's bias has no gradient while all logits are within the margin
        "optimizer.generator.lr=0.015",
    ],
    "biggan_unshared": [
        "generator={channels: 2, latent_size: 12, shared_embedding: false, hierarchical: false, norm_eps: 0.01}",
        "optimizer.generator.lr=0.02",
    ],
    "dcgan_light": [
        "data.resolution=[16,24]",
        "generator={family: dcgan, latent_size: 12, channels: 4, block: depthwise_separable}",
        "discriminator={family: dcgan, channels: 4, block: inverted_residual, norm: spectral}",
        "optimizer.generator.lr=0.1",
        "optimizer.discriminator.lr=0.05",
    ],
    "r3gan": [
        "data.resolution=[16,24]",
        f"generator={{latent_size: 12, {_R3GAN}}}",
        f"discriminator={{{_R3GAN}}}",
        "objective={loss: relativistic, r2: {weight: 0.1, every: 2}}",
        # Blocks begin as the identity, and the classes' embedding of D is small: the first updates have far to go.
        "optimizer.generator.lr=1",
        "optimizer.discriminator.lr=1",
    ],
    "dcgan": [
        "generator={family: dcgan, latent_size: 12, channels: 4, embedding_size: 4}",
        "discriminator={family: dcgan, channels: 4}",
    ],
    "dcgan_spectral": [
        "data.num_classes=0",
        "generator={family: dcgan, latent_size: 12, channels: 4}",
        "discriminator={family: dcgan, channels: 4, norm: spectral}",
        "optimizer.generator.lr=0.006",
    ],
    "gat": [
        f"generator={{latent_size: 12, embedding_size: 6, depth: 4, {_GAT}}}",
        f"discriminator={{embedding_size: 8, depth: 2, {_GAT}}}",
        "objective={loss: relativistic, reuse_fakes: true}",
        "augmentation={kind: diffaugment, policy: [latent_color, translation, cutout, flip]}",
        "optimizer.generator.lr=2",
        "optimizer.discriminator.lr=0.05",
    ],
    "cat": [
        f"generator={{latent_size: 12, embedding_size: 6, patch: 4, {_CAT}}}",
        f"discriminator={{embedding_size: 8, patch: 4, {_CAT}}}",
        "objective={loss: relativistic, reuse_fakes: true, consistency: {weight: 1}}",
        "augmentation={kind: diffaugment, policy: [latent_color, translation, cutout, flip]}",
        "optimizer.generator.lr=0.2",
        "optimizer.discriminator.lr=0.05",
    ],
    "dit": [  # an adversarial flow model
        "data={kind: synthetic, resolution: [8, 12], num_images: 64, num_classes: 3, image_channels: 3}",
        "generator={family: dit, latent_size: 288, depth: 2, width: 16, heads: 2}",
        "discriminator={family: dit, depth: 2, width: 16, heads: 2}",
        "objective={loss: relativistic, reuse_fakes: true, centering: 0.3, transport: {weight: 0.2, final_weight: 0},"
        " adversarial: {normalize: {decay: 0.5}}}",
        "optimizer.generator.lr=0.05",
        "optimizer.discriminator.lr=0.05",
    ],
    "mlp": [
        "data={kind: synthetic, resolution: [12, 20], num_images: 64, num_classes: 0, condition_size: 3}",
        "generator={family: mlp, latent_size: 12, width: 16, depth: 2}",
        "discriminator={family: mlp, width: 16, depth: 2}",
        "optimizer.generator.lr=0.006",
    ],
    "stylegan2": [
        f"generator={{latent_size: 8, w_size: 8, {_STYLEGAN2}}}",
        f"discriminator={{{_STYLEGAN2}, mbstd_group: 2}}",
        "optimizer.generator.lr=0.04",
        "optimizer.discriminator.lr=0.02",
    ],
    "stylegan2_path_length": [
        f"generator={{latent_size: 8, w_size: 8, {_STYLEGAN2}}}",
        f"discriminator={{{_STYLEGAN2}, mbstd_group: 2}}",
        "objective={loss: non_saturating, path_length: {weight: 0.1, every: 2, decay: 0.5}}",
        "optimizer.generator.lr=0.08",
        "optimizer.discriminator.lr=0.02",
    ],
    "stylegan2_architectures": [  # other architectures than the published ones
        "data={kind: synthetic, resolution: [16, 24], num_images: 64, num_classes: 0, condition_size: 3}",
        f"generator={{latent_size: 8, w_size: 8, architecture: resnet, {_STYLEGAN2}}}",
        f"discriminator={{{_STYLEGAN2}, architecture: skip, mbstd_group: 2}}",
        "optimizer.generator.lr=0.04",
        "optimizer.discriminator.lr=0.02",
    ],
    "pix2pix": [
        "data={kind: synthetic_pairs, resolution: 64, num_images: 64, num_classes: 0, image_channels: 3}",
        "data.crop_from=72",
        "generator={family: pix2pix, channels: 2}",  # six levels, with dropout in one
        "discriminator={family: pix2pix, channels: 4, depth: 2}",
        "objective={loss: non_saturating, l1: 10, reuse_fakes: true}",
        "optimizer.generator.lr=0.2",
    ],
    "pix2pix_resnet": [
        "data={kind: synthetic_pairs, resolution: 16, num_images: 64, num_classes: 0, image_channels: 3}",
        "generator={family: pix2pix, architecture: resnet, channels: 2, num_blocks: 2}",
        "discriminator={family: pix2pix, architecture: pixels, channels: 4}",
        "objective={loss: least_squares, l1: 1, reuse_fakes: true}",
        "optimizer.generator.lr=0.04",
    ],
    "pix2pix_features": [
        "data={kind: synthetic_pairs, resolution: [32, 48], num_images: 64, num_classes: 0, image_channels: 3}",
        "generator={family: pix2pix, channels: 4}",
        "discriminator={family: pix2pix, channels: 4, depth: 2}",
        "objective={loss: non_saturating, feature_matching: 3, reuse_fakes: true}",
        "optimizer.generator.lr=0.1",
    ],
    "cyclegan": [
        "data={kind: unpaired_digits, resolution: 16, num_classes: 0, input_channels: 1, image_channels: 1}",
        "generator={family: cyclegan, channels: 4, num_blocks: 1}",
        "discriminator={family: cyclegan, channels: 4, depth: 2}",
        "objective={loss: least_squares, cycle: 3, identity: 2, reuse_fakes: true, schedule: generator_first}",
        "objective.adversarial={weight: 2}",
        "optimizer.generator.lr=0.005",
    ],
    "autoencoder": [
        "data.num_classes=0",
        f"generator={{{_AUTOENCODER}, latent_channels: 2}}",
        "discriminator={family: autoencoder, channels: 4, depth: 2}",
        "objective={l1: 3, kl: 0.01, reuse_fakes: true, schedule: generator_first}",
        "objective.adversarial={adaptive: {parameter: conv_out.weight}}",
        "optimizer.generator.lr=0.1",
    ],
    "autoencoder_vq": [
        "data.resolution=[16,24]",
        "data.num_classes=0",
        f"generator={{{_AUTOENCODER}, attention: [1], encoder_channels: 4, bottleneck: {{kind: vq, num_codes: 16}}}}",
        "discriminator={family: autoencoder, channels: 4, depth: 2}",
        "objective={l1: 3, codebook: {weight: 2, commitment: 0.5}, reuse_fakes: true}",
        "optimizer.generator.lr=0.1",
    ],
}
"""Overrides that turn the tiny recipe into another game's."""

FLOW = [
    "data={kind: synthetic, resolution: [8, 12], num_images: 64, num_classes: 3, image_channels: 3}",
    "generator={family: dit, latent_size: 288, depth: 2, width: 16, heads: 2, times: true}",
    "discriminator={family: none}",
    "objective={flow: {weight: 2, times: logit_normal}}",
    "optimizer={generator: {kind: sgd, lr: 1e-4}}",
]
"""Overrides for flow matching, in which the generator learns alone."""

DMD2 = [
    *FLOW[:2],
    "discriminator={family: dmd2, depth: 2, width: 16, heads: 2, first_time: 0.2, guidance: 1}",
    "objective={loss: non_saturating, d_steps: 2, adversarial: {weight: 0.5},"
    " distribution_matching: {weight: 0.7, denoising: 3}}",
    "optimizer={generator: {kind: sgd, lr: 1e-4}, discriminator: {kind: sgd, lr: 1e-5}}",
    "init_from.run=unset",
]
"""Overrides for distribution matching, whose networks begin as any others here."""

LADD = [
    *FLOW[:2],
    "discriminator={family: ladd, depth: 3, width: 16, heads: 2, judged: [0, 2], first_time: 0.2}",
    "objective={loss: non_saturating, d_steps: 2}",
    "optimizer={generator: {kind: sgd, lr: 1e-3}, discriminator: {kind: sgd, lr: 1e-3}}",
    "init_from.run=unset",
]
"""Overrides for heads on a teacher's features, whose networks begin as any others here."""


def _write_text(path: Path, text: str) -> None:
    """Write a file that other ranks may write and read at the same time, with the same text."""
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as unfinished:
        unfinished.write(text)
    os.replace(unfinished.name, path)


def tiny_recipe(directory: Path, *overrides: str) -> Recipe:
    """The tiny recipe with overrides; its file and its ``out`` are below ``directory``."""
    path = directory / "tiny.yaml"
    _write_text(path, TINY)
    return load_recipe(path, [f"out={directory / 'run'}", *overrides])


def tiny_plan(
    directory: Path, world_size: int, overrides: list[str], ds: dict[str, Any], recipe: Path | None = None
) -> RunPlan:
    """Plan a run whose networks use the DeepSpeed contents ``ds[network]``; tiny unless a recipe is given."""
    files = []
    for network, content in ds.items():
        path = directory / f"{network}.json"
        _write_text(path, json.dumps(content))
        files.append(f"engines.{network}.ds_config={path}")
    if recipe is not None:
        return plan_run(load_recipe(recipe, [f"out={directory / 'run'}", *files, *overrides]), world_size)
    return plan_run(tiny_recipe(directory, *files, *overrides), world_size)


def zero(stage: int, **extra: Any) -> dict[str, Any]:
    """DeepSpeed contents of a ZeRO stage; at ZeRO 3 small parameters are sharded too."""
    section: dict[str, Any] = {"stage": stage}
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": {**section, **extra.pop("zero", {})}, **extra}


def both(stage: int, **extra: Any) -> dict[str, Any]:
    """``zero`` for each network."""
    return {"generator": zero(stage, **extra), "discriminator": zero(stage, **extra)}


def stages(generator: int, discriminator: int) -> list[str]:
    """Options that divide the networks into so many pipeline stages."""
    return [f"engines.generator.pipeline_stages={generator}", f"engines.discriminator.pipeline_stages={discriminator}"]
