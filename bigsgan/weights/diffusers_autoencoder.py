"""Autoencoders of diffusers in a folder: AutoencoderKL and VQModel, whose networks are those of ``autoencoder``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from bigsgan.config.families.autoencoder import AutoencoderGenerator

_ATTENTION = {"norm": "group_norm", "query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out.0"}


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
