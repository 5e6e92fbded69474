"""Autoencoders of diffusers in a folder: AutoencoderKL and VQModel, whose networks are those of ``autoencoder``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.data.autoencoders import load_folder, read_config
from bigsgan.errors import UserError

CLASSES = {"kl": "AutoencoderKL", "vq": "VQModel"}
"""diffusers' class for each bottleneck that it has."""

_NEEDED = {"act_fn": "silu", "mid_block_add_attention": True, "norm_type": "group", "lookup_from_codebook": False}
"""Keys of a configuration that have one value here, which is diffusers' default."""
_BLOCKS = {"DownEncoderBlock2D": False, "AttnDownEncoderBlock2D": True}
"""Kinds of the encoder's levels, and whether they have attention."""
_ATTENTION = {"norm": "group_norm", "query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out.0"}


def read(folder: Path, field: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Read a folder; return the keys of a recipe's ``data`` and ``generator`` that it tells, and the state dict.

    Raises:
        UserError: It cannot be read, or has another network than ``autoencoder`` has; ``field`` has named it.
    """
    config = read_config(folder, field, list(CLASSES.values()))
    kind = "kl" if config["_class_name"] == CLASSES["kl"] else "vq"
    widths, types = config["block_out_channels"], config.get("down_block_types", [])
    colours, side = config.get("in_channels", 3), config.get("sample_size", 32)
    up = [name.replace("Encoder", "Decoder").replace("Down", "Up") for name in reversed(types)]
    fits = {key: config.get(key, value) == value for key, value in _NEEDED.items()}
    fits |= {
        "block_out_channels": isinstance(widths, list) and min(widths) > 0 and not any(w % widths[0] for w in widths),
        "down_block_types": len(types) == len(widths) and all(name in _BLOCKS for name in types),
        "up_block_types": config.get("up_block_types", []) == up,
        "out_channels": config.get("out_channels", 3) == colours,
        "sample_size": isinstance(side, int) and side > 0,
    }
    for key in [key for key, each in fits.items() if not each]:
        problem = f"has {key} {json.dumps(config.get(key))} in its config.json, which no recipe has"
        raise UserError(field, str(folder), problem, "give another autoencoder")
    channels = config["latent_channels"]
    section: dict[str, Any] = {
        "family": "autoencoder",
        "channels": widths[0],
        "multipliers": [width // widths[0] for width in widths],
        "num_blocks": config.get("layers_per_block", 1),
        "attention": [level for level, name in enumerate(types) if _BLOCKS[name]],
        "norm_groups": config.get("norm_num_groups", 32),
        "latent_channels": channels,
        "bottleneck": {"kind": kind},
    }
    if kind == "vq":
        section["latent_channels"], section["encoder_channels"] = config.get("vq_embed_dim") or channels, channels
        section["bottleneck"] |= {"num_codes": config.get("num_vq_embeddings", 256), "normalized": False}
    theirs = load_folder(folder, field, torch.device("cpu"), CLASSES[kind]).state_dict()
    for name, ways in (("quant_conv", 2), ("post_quant_conv", 1)):  # some networks leave these maps out
        theirs.setdefault(f"{name}.weight", torch.eye(ways * channels)[:, :, None, None])
        theirs.setdefault(f"{name}.bias", torch.zeros(ways * channels))
    table = names(AutoencoderGenerator(**section))
    if others := sorted(theirs.keys() - table.values()):
        raise UserError(field, str(folder), f"has {others[0]}, which no recipe has", "give another autoencoder")
    data = {"resolution": side, "image_channels": colours}
    return data, section, {ours: theirs[other] for ours, other in table.items()}


def network(
    section: AutoencoderGenerator, state: Mapping[str, Tensor], image_channels: int, side: int, **more: float
) -> Any:
    """Return diffusers' network of a generator with this state dict, of class ``CLASSES[section.bottleneck.kind]``.

    Args:
        section: The recipe's.
        state: The generator's state dict.
        image_channels: Channels of its images.
        side: Pixels a side of the images that it was trained with.
        more: Further keys of its configuration, such as ``scaling_factor``.
    """
    kind, levels = section.bottleneck.kind, range(len(section.multipliers))
    own = {"num_vq_embeddings": section.num_codes, "vq_embed_dim": section.latent_channels} if kind == "vq" else {}
    made = getattr(importlib.import_module("diffusers"), CLASSES[kind])(
        in_channels=image_channels,
        out_channels=image_channels,
        down_block_types=[f"{'Attn' * (level in section.attention)}DownEncoderBlock2D" for level in levels],
        up_block_types=[f"{'Attn' * (level in section.attention)}UpDecoderBlock2D" for level in reversed(levels)],
        block_out_channels=[section.channels * multiplier for multiplier in section.multipliers],
        layers_per_block=section.num_blocks,
        latent_channels=section.encoder_channels or section.latent_channels,
        norm_num_groups=section.norm_groups,
        sample_size=side,
        **own,
        **more,
    )
    made.load_state_dict({theirs: state[ours] for ours, theirs in names(section).items()})
    return made


def names(section: AutoencoderGenerator) -> dict[str, str]:
    """Return diffusers' name of each parameter of our generator, by our name."""
    found = dict[str, str]()
    for ours, theirs in _modules(section):
        for kind in ("weight", "bias"):
            found[f"{ours}.{kind}"] = f"{theirs}.{kind}"
    if section.bottleneck.kind == "vq":
        number = next(ours for ours, theirs in _modules(section) if theirs == "post_quant_conv").split(".")[1]
        found[f"layers.{int(number) - 1}.codebook"] = "quantize.embedding.weight"
    return found


def _modules(section: AutoencoderGenerator) -> Iterator[tuple[str, str]]:
    """Yield the name of each module with weight and bias, and diffusers' name."""
    numbers, last = (f"layers.{number}" for number in count()), len(section.multipliers) - 1
    before = 1
    yield f"{next(numbers)}.conv", "encoder.conv_in"
    for level, multiplier in enumerate(section.multipliers):
        if level:
            yield f"{next(numbers)}.conv", f"encoder.down_blocks.{level - 1}.downsamplers.0.conv"
        for i in range(section.num_blocks):
            has_shortcut = not i and before != multiplier
            yield from _block(
                next(numbers), f"encoder.down_blocks.{level}", i, has_shortcut, level in section.attention
            )
        before = multiplier
    yield from _middle(numbers, "encoder")
    ours = next(numbers)
    yield f"{ours}.norm", "encoder.conv_norm_out"
    yield f"{ours}.conv", "encoder.conv_out"
    yield f"{ours}.to_latents", "quant_conv"
    if section.bottleneck.kind != "none":
        next(numbers)
    ours = next(numbers)
    yield f"{ours}.from_latents", "post_quant_conv"
    yield f"{ours}.conv", "decoder.conv_in"
    yield from _middle(numbers, "decoder")
    for level in range(last, -1, -1):
        theirs, multiplier = f"decoder.up_blocks.{last - level}", section.multipliers[level]
        for i in range(section.num_blocks + 1):
            yield from _block(next(numbers), theirs, i, not i and before != multiplier, level in section.attention)
        before = multiplier
        if level:
            yield f"{next(numbers)}.conv", f"{theirs}.upsamplers.0.conv"
    ours = next(numbers)
    yield f"{ours}.norm", "decoder.conv_norm_out"
    yield f"{ours}.conv_out", "decoder.conv_out"


def _middle(numbers: Iterator[str], part: str) -> Iterator[tuple[str, str]]:
    for i in range(2):
        yield from _block(next(numbers), f"{part}.mid_block", i, has_shortcut=False, attends=i == 0)


def _block(ours: str, theirs: str, i: int, has_shortcut: bool, attends: bool) -> Iterator[tuple[str, str]]:
    for name in ("norm1", "conv1", "norm2", "conv2"):
        yield f"{ours}.{name}", f"{theirs}.resnets.{i}.{name}"
    if has_shortcut:
        yield f"{ours}.shortcut", f"{theirs}.resnets.{i}.conv_shortcut"
    for name, other in _ATTENTION.items() if attends else ():
        yield f"{ours}.attention.{name}", f"{theirs}.attentions.{i}.{other}"
