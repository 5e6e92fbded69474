"""StyleGAN2's weights as stylegan2-ada-pytorch names them, and stylegan3 for its configuration ``stylegan2``.

Values stay as they are, bit for bit: both projects scale weights where they are used. Only names differ, and the
strength of the noise, which is a number there and a vector of one here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bigsgan.config.families.stylegan2 import BOTTOM_RESOLUTION, StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.errors import UserError
from bigsgan.models.network import LayerStack
from bigsgan.models.stylegan2 import discriminator_layers, generator_layers

State = Mapping[str, Tensor]

_LEAF = r"(?:affine\.)?(?:weight|bias)|noise_strength|noise_const|resample_filter"
_GENERATOR_BLOCK = re.compile(rf"synthesis\.b(\d+)\.(const|resample_filter|(?:conv0|conv1|torgb)\.(?:{_LEAF}))")
_DISCRIMINATOR_BLOCK = re.compile(
    r"b(\d+)\.((?:fromrgb|conv0|conv1|skip|conv|fc|out)\.(?:weight|bias|resample_filter))"
)
_DISCRIMINATOR_FILTER = re.compile(r"b\d+\.resample_filter")
_MAPPING = re.compile(r"mapping\.(?:fc(\d+)|(embed))\.(weight|bias)")


def generator_section(state: State, init_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Recipe section of a generator with these shapes.

    Args:
        state: State dictionary of the original.
        init_kwargs: What the original was made with, if known: it alone says how activations are clamped and which
            blocks are half.

    Raises:
        UserError: The state is not that of a StyleGAN2 generator.
    """
    resolution = _resolution(state, "synthesis.b")
    if "synthesis.b4.torgb.weight" not in state or "synthesis.b8.skip.weight" in state:
        _refuse("synthesis.b4.torgb.weight", "is missing, or blocks are residual: images must be sums of all blocks'")
    widths = {size: _shape(state, f"synthesis.b{size}.conv1.weight")[0] for size in _sizes(resolution)}
    w_size = _shape(state, "mapping.w_avg")[0]
    embedded = w_size if "mapping.embed.weight" in state else 0
    kwargs = init_kwargs or {}
    synthesis = kwargs.get("synthesis_kwargs", kwargs)  # stylegan3 gives them directly
    return {
        "family": "stylegan2",
        "latent_size": _shape(state, "mapping.fc0.weight")[1] - embedded,
        "w_size": w_size,
        "mapping_layers": _mapping_layers(state),
        **_channels(widths, "synthesis.b4.conv1.weight"),
        **_precision(synthesis if isinstance(synthesis, dict) else {}, resolution),
    }


def discriminator_section(state: State, init_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Recipe section of a discriminator with these shapes; arguments and errors are those of ``generator_section``.

    ``init_kwargs`` is also what says the size of the groups for the minibatch standard deviation.
    """
    resolution = _resolution(state, "b")
    if "b4.fromrgb.weight" in state:
        _refuse("b4.fromrgb.weight", "belongs to a discriminator that looks at the image in every block")
    widths = {size: _shape(state, f"b{size}.conv0.weight")[0] for size in _sizes(resolution)[1:]}
    head = _shape(state, "b4.conv.weight")
    widths[BOTTOM_RESOLUTION] = head[0]
    kwargs = init_kwargs or {}
    section: dict[str, Any] = {
        "family": "stylegan2",
        "architecture": "resnet" if f"b{resolution}.skip.weight" in state else "orig",
        "mbstd_channels": head[1] - head[0],
        **_channels(widths, "b4.conv.weight"),
        **_precision(kwargs, resolution),
    }
    if "mapping.embed.weight" in state:
        section["mapping_layers"] = _mapping_layers(state)
    epilogue = kwargs.get("epilogue_kwargs")
    group = epilogue.get("mbstd_group_size") if isinstance(epilogue, dict) else None
    return {**section, "mbstd_group": group} if isinstance(group, int) else section


def data_section(state: State) -> dict[str, int]:
    """Return what either network's shapes say of the images: ``resolution``, ``image_channels`` and ``num_classes``.

    Raises:
        UserError: The state is of neither network.
    """
    embedding = state.get("mapping.embed.weight")
    classes = 0 if embedding is None else embedding.shape[1]
    if any(name.startswith("synthesis.") for name in state):
        resolution = _resolution(state, "synthesis.b")
        channels = _shape(state, f"synthesis.b{resolution}.torgb.weight")[0]
    else:
        resolution = _resolution(state, "b")
        channels = _shape(state, f"b{resolution}.fromrgb.weight")[1]
    return {"resolution": resolution, "image_channels": channels, "num_classes": classes}


def generator_state(state: State) -> dict[str, Tensor]:
    """State dictionary of our generator, for ``generator_section`` and ``data_section``.

    Raises:
        UserError: The state is not that of a StyleGAN2 generator.
    """
    section, data = generator_section(state), data_section(state)
    with torch.device("meta"):
        layers = generator_layers(StyleGAN2Generator(**section), **data)

    def rename(name: str) -> str | None:
        if name == "mapping.w_avg":
            return "layers.0.w_avg"
        if match := _MAPPING.fullmatch(name):
            return f"layers.0.network.{_mapping_name(match)}"
        if match := _GENERATOR_BLOCK.fullmatch(name):
            return f"layers.{int(match[1]).bit_length() - 2}.{match[2]}"
        return None

    return _renamed(state, rename, layers)


def discriminator_state(state: State) -> dict[str, Tensor]:
    """State dictionary of our discriminator, for ``discriminator_section`` and ``data_section``.

    Raises:
        UserError: The state is not that of a StyleGAN2 discriminator.
    """
    section, data = discriminator_section(state), data_section(state)
    with torch.device("meta"):
        layers = discriminator_layers(StyleGAN2Discriminator(**section), **data)
    top = data["resolution"].bit_length()

    def rename(name: str) -> str | None:
        if match := _MAPPING.fullmatch(name):
            return f"layers.{len(layers) - 1}.mapping.{_mapping_name(match)}"
        if match := _DISCRIMINATOR_BLOCK.fullmatch(name):
            return f"layers.{top - int(match[1]).bit_length()}.{match[2]}"
        return name if _DISCRIMINATOR_FILTER.fullmatch(name) else None

    return _renamed(state, rename, layers)


def _renamed(state: State, rename: Callable[[str], str | None], layers: list[nn.Module]) -> dict[str, Tensor]:
    """Rename all entries and compare with what the layers need; filters where nothing is resampled are left out."""
    needed = {name: tensor.shape for name, tensor in LayerStack(layers).state_dict().items()}
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        ours = rename(name)
        if ours in needed:
            tensor = tensor.reshape(1) if name.endswith("noise_strength") and tensor.dim() == 0 else tensor
            if tensor.shape != needed[ours]:
                _refuse(name, f"has the shape {tuple(tensor.shape)} and not {tuple(needed[ours])}")
            found[ours] = tensor
        elif ours is None or not name.endswith("resample_filter"):
            _refuse(name, "is no entry of StyleGAN2's")
    missing = needed.keys() - found.keys()
    if missing:
        _refuse(min(missing), "has no counterpart in it")
    return found


def _mapping_name(match: re.Match[str]) -> str:
    """Ours for the original's ``fc3.weight`` or ``embed.weight``."""
    return f"{match[2] or f'fc.{match[1]}'}.{match[3]}"


def _resolution(state: State, prefix: str) -> int:
    """Return the largest resolution that there is a block for, all below being there too."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d{{1,5}})\..*")
    sizes = {int(match[1]) for name in state if (match := pattern.fullmatch(name))}
    if len(sizes) < 2 or sorted(sizes) != _sizes(max(sizes)):
        _refuse(f"{prefix}4, {prefix}8, ...", "are not all there, up to a power of two")
    return max(sizes)


def _sizes(resolution: int) -> list[int]:
    return [BOTTOM_RESOLUTION << i for i in range((resolution // BOTTOM_RESOLUTION).bit_length())]


def _shape(state: State, name: str) -> torch.Size:
    tensor = state.get(name)
    if tensor is None or tensor.dim() not in (1, 2, 4):
        _refuse(name, "is missing, or is no weight")
    return tensor.shape


def _mapping_layers(state: State) -> int:
    return sum(re.fullmatch(r"mapping\.fc\d+\.weight", name) is not None for name in state)


def _channels(widths: dict[int, int], name: str) -> dict[str, int]:
    """Find the least ``channel_base`` that gives these widths, with the largest of them as ``channel_max``."""
    largest = max(widths.values())
    base = max(size * width for size, width in widths.items())
    if any(width != min(base // size, largest) for size, width in widths.items()):
        _refuse(name, f"and the like have widths that no channel_base gives: {widths}")
    return {"channel_base": base, "channel_max": largest}


def _precision(kwargs: Mapping[str, Any], resolution: int) -> dict[str, Any]:
    """Return the section's keys about half precision; nothing where the original's arguments are unknown."""
    if not kwargs:
        return {}
    clamp, half = kwargs.get("conv_clamp", 256), kwargs.get("num_fp16_res", 4)  # stylegan3 leaves out its defaults
    return {
        "conv_clamp": float(clamp) if isinstance(clamp, (int, float)) else None,
        "half_resolutions": min(half, len(_sizes(resolution)) - 1) if isinstance(half, int) else 0,
        "half_type": "fp16",
    }


def _refuse(name: str, problem: str) -> NoReturn:
    remedy = "give the weights of a StyleGAN2 network of stylegan2-ada-pytorch or stylegan3"
    raise UserError("weights", name, problem, remedy)
