"""Names of StyleGAN2's weights in stylegan2-ada-pytorch and here, in both directions.

stylegan3's configuration ``stylegan2`` has the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigsgan.weights.empty import call

BINOMIAL = [1.0, 3.0, 3.0, 1.0]
"""The published filter."""

_LEAF = r"(?:affine\.)?(?:weight|bias)|noise_strength|noise_const|resample_filter"
_BLOCK = {
    "generator": re.compile(rf"synthesis\.b(\d+)\.(const|resample_filter|(?:conv0|conv1|torgb|skip)\.(?:{_LEAF}))"),
    "discriminator": re.compile(
        r"b(\d+)\.(resample_filter|(?:fromrgb|conv0|conv1|skip|conv|fc|out)\.(?:weight|bias|resample_filter))"
    ),
}
_MAPPING = re.compile(r"mapping\.(?:fc(\d+)|(embed))\.(weight|bias)")
_OUR_MAPPING = re.compile(r"layers\.\d+\.(?:network|mapping)\.(?:fc\.(\d+)|(embed))\.(weight|bias)")
_SEPARABLE = 8
"""Taps from which the project stores a filter's taps and not their products."""
_UNFILTERED = ("torgb", "fc", "out")
"""Layers of a block that have no filter; all others have one, which those that do not resample do not use."""


def ours(network: str, name: str, top: int) -> str | None:
    """Our name of an entry of a ``network`` for ``top`` pixels a side; None for what StyleGAN2 does not have."""
    bits, is_g = top.bit_length(), network == "generator"
    if name == "mapping.w_avg":
        return "layers.0.w_avg" if is_g else None
    if match := _MAPPING.fullmatch(name):
        inner = f"{match[2] or f'fc.{match[1]}'}.{match[3]}"
        return f"layers.0.network.{inner}" if is_g else f"layers.{bits - 3}.mapping.{inner}"
    match = _BLOCK[network].fullmatch(name)
    if match is None:
        return None
    size = int(match[1]).bit_length()
    return f"layers.{size - 2 if is_g else bits - size}.{match[2]}"


def exported(
    network: str, section: Mapping[str, Any], data: Mapping[str, int], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """State dict with the project's names, of ours; buffers that it has in addition have its own values."""
    bits, found = data["resolution"].bit_length(), dict[str, Tensor]()
    own, published = _stored(section["filter"]), _stored(BINOMIAL)
    for name, tensor in state.items():
        number, _, inner = name.removeprefix("layers.").partition(".")
        if match := _OUR_MAPPING.fullmatch(name):
            found[f"mapping.{match[2] or f'fc{match[1]}'}.{match[3]}"] = tensor
            continue
        if inner == "w_avg":
            found["mapping.w_avg"] = tensor
            continue
        size = 2 << int(number) if network == "generator" else 1 << bits - 1 - int(number)
        block = f"synthesis.b{size}" if network == "generator" else f"b{size}"
        found[f"{block}.{inner}"] = tensor.reshape(()) if inner.endswith("noise_strength") else tensor
        if inner.endswith("resample_filter"):
            found[f"{block}.{inner}"] = own
        module = inner.partition(".")[0]
        if inner.endswith("weight") and "affine" not in inner and module not in _UNFILTERED:
            found.setdefault(f"{block}.{module}.resample_filter", published)
        if block != "b4":
            found.setdefault(f"{block}.resample_filter", own)
    return found


def opened(network: str, section: Mapping[str, Any], data: Mapping[str, int]) -> str:
    """The call of the project's class for such weights."""
    relu, is_g = section["relu"], network == "generator"
    filtered = {} if section["filter"] == BINOMIAL else {"resample_filter": section["filter"]}

    def activation(part: str) -> dict[str, str]:
        return {"activation": "relu"} if part in relu else {}

    sizes = {key: section[key] for key in ("channel_base", "channel_max", "conv_clamp", "architecture")}
    sizes["num_fp16_res"] = section["half_resolutions"] if section["half_type"] == "fp16" else 0
    mapping = {"num_layers": section["mapping_layers"], "lr_multiplier": section["mapping_lr_multiplier"]}
    arguments: dict[str, Any] = {"c_dim": data["num_classes"], "img_resolution": data["resolution"]}
    arguments["img_channels"] = data["image_channels"]
    if is_g:
        noise = {} if section["noise"] else {"use_noise": False}
        arguments |= {"z_dim": section["latent_size"], "w_dim": section["w_size"]}
        mapping |= {"w_avg_beta": section["w_avg_beta"], **activation("mapping")}
        synthesis = {**sizes, **filtered, **noise, **activation("blocks")}
        arguments |= {"mapping_kwargs": mapping, "synthesis_kwargs": synthesis}
        return f"training.networks.Generator({call(arguments)})"
    head = {"mbstd_group_size": section["mbstd_group"], "mbstd_num_channels": section["mbstd_channels"]}
    arguments |= {**sizes, "cmap_dim": section["projection_size"], "block_kwargs": {**filtered, **activation("blocks")}}
    arguments |= {"mapping_kwargs": mapping | activation("mapping"), "epilogue_kwargs": head | activation("head")}
    return f"training.networks.Discriminator({call(arguments)})"


def _stored(taps: Sequence[float]) -> Tensor:
    """A filter as the project keeps it: (K,) of many taps, else (K, K)."""
    found = torch.tensor(taps)
    found = found if len(taps) >= _SEPARABLE else torch.outer(found, found)
    return found / found.sum()
