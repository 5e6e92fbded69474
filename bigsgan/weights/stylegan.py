"""StyleGAN2's weights with the names of stylegan2-ada-pytorch, and of stylegan3 with its configuration ``stylegan2``.

Values stay as they are, bit for bit: both projects scale weights where they are used. Only names differ, and the
strength of the noise, which is a number there and a vector of one here. ``sources.SOURCES`` lists the errors
raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from bigsgan.config.families.base import BOTTOM
from bigsgan.config.families.stylegan2 import (
    StyleGAN2Discriminator,
    StyleGAN2Generator,
    stylegan2_sizes,
)
from bigsgan.errors import UserError
from bigsgan.weights import stylegan_names
from bigsgan.weights.empty import empty_network
from bigsgan.weights.settings import LARGEST, short
from bigsgan.weights.stylegan_names import BINOMIAL
from bigsgan.weights.stylegan_pickle import ForeignNetwork

State = Mapping[str, Tensor]

_NESTED = ("mapping_kwargs", "synthesis_kwargs", "block_kwargs", "epilogue_kwargs")
"""Arguments of the originals that contain arguments."""

_TOLD_OR_READ = {
    *("z_dim", "c_dim", "w_dim", "img_resolution", "img_channels", "channel_base", "channel_max"),
    *("num_layers", "embed_features", "layer_features", "cmap_dim", "mbstd_num_channels", "architecture"),
    *("num_fp16_res", "conv_clamp", "lr_multiplier", "w_avg_beta", "mbstd_group_size", "freeze_layers"),
    *("activation", "resample_filter", "use_noise"),
    *("fp16_channels_last", "fused_modconv_default"),  # these change numbers only by rounding
}
"""Arguments that shapes tell, or that are read below."""

_PRECISION = ("conv_clamp", "half_resolutions", "mapping_lr_multiplier")
_UNTOLD = {"generator": (*_PRECISION, "relu", "w_avg_beta"), "discriminator": (*_PRECISION, "relu", "mbstd_group")}
"""Keys of each network's section that only the original's arguments tell."""

_ONLY: dict[str, Any] = {"kernel_size": 3}
"""Arguments with the only value that our layers support."""

_OTHERS = {
    r"synthesis\.(L\d+_|input\.)": "StyleGAN3's own generator (configurations T and R)",
    r"(style|convs|to_rgbs)\.\d+\.": "StyleGAN2 as rosinality/stylegan2-pytorch saves it",
    r"(GAN\.)?([SG]E?\.(net|blocks|initial_)|D\.blocks)": "StyleGAN2 as lucidrains/stylegan2-pytorch saves it",
}
"""Other projects' networks, by the beginnings of names."""


def generator_section(state: State, init_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Recipe section of a generator with these shapes.

    ``init_kwargs`` are the original's arguments, if known: only they tell how activations are clamped, which blocks
    compute in half precision, and how the mapping network's layers are scaled. Defaults are stylegan3's.
    """
    resolution = _resolution(state, "synthesis.b")
    widths = {size: _shape(state, f"synthesis.b{size}.conv1.weight")[0] for size in stylegan2_sizes(resolution)}
    w_size, layers = _shape(state, "mapping.w_avg")[0], _mapping_layers(state)
    if layers == 0 and "mapping.embed.weight" in state:
        _refuse("mapping_kwargs.num_layers", "is 0, which with classes only a discriminator supports")
    _check_mapping(state, w_size)
    embedded = w_size if "mapping.embed.weight" in state else 0
    without_image = "resnet" if f"synthesis.b{resolution}.skip.weight" in state else "orig"
    section = {
        "family": "stylegan2",
        "architecture": "skip" if "synthesis.b4.torgb.weight" in state else without_image,
        "latent_size": _shape(state, "mapping.fc0.weight")[1] - embedded if layers else w_size,
        "w_size": w_size,
        "mapping_layers": layers,
        **_channels(widths, "synthesis.b4.conv1.weight"),
        **_filter(state.get("synthesis.b8.conv0.resample_filter")),
    }
    if not any(name.endswith(".noise_strength") for name in state):
        section["noise"] = False
    if not init_kwargs:
        return _valid(StyleGAN2Generator, section)
    kwargs = _checked(init_kwargs)
    synthesis = "synthesis_kwargs." if "synthesis_kwargs" in init_kwargs else ""  # stylegan3 gives them directly
    section |= _untold(kwargs, synthesis, resolution)
    section |= _relu(kwargs, {"mapping": "mapping_kwargs.", "blocks": synthesis})
    section["w_avg_beta"] = _number(kwargs, "mapping_kwargs.w_avg_beta", 0.998, 0, 1)
    return _valid(StyleGAN2Generator, section)


def discriminator_section(state: State, init_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Recipe section of a discriminator with these shapes; see ``generator_section``.

    Only ``init_kwargs`` tell the size of the groups for the minibatch standard deviation.
    """
    resolution = _resolution(state, "b")
    widths = {size: _shape(state, f"b{size}.conv0.weight")[0] for size in stylegan2_sizes(resolution)[1:]}
    head = _shape(state, "b4.conv.weight")
    widths[BOTTOM] = head[0]
    without_image = "resnet" if f"b{resolution}.skip.weight" in state else "orig"
    section: dict[str, Any] = {
        "family": "stylegan2",
        "architecture": "skip" if "b4.fromrgb.weight" in state else without_image,
        "mbstd_channels": head[1] - head[0],
        **_channels(widths, "b4.conv.weight"),
        **_filter(state.get("b8.conv1.resample_filter")),
    }
    if "mapping.embed.weight" in state:
        features = _shape(state, "b4.out.weight")[0]
        if not len(state["mapping.embed.weight"]):
            _refuse("cmap_dim", "is 0, a discriminator that ignores the classes, which is not supported")
        _check_mapping(state, features)
        section["mapping_layers"] = _mapping_layers(state)
        if features != head[0]:
            section["projection_size"] = features
    if not init_kwargs:
        return _valid(StyleGAN2Discriminator, section)
    kwargs = _checked(init_kwargs)
    section |= _untold(kwargs, "", resolution)
    _number(kwargs, "block_kwargs.freeze_layers", 0, 0, whole=True)
    section |= _relu(kwargs, {"mapping": "mapping_kwargs.", "blocks": "block_kwargs.", "head": "epilogue_kwargs."})
    group = kwargs.get("epilogue_kwargs.mbstd_group_size", 4)
    if group is not None:
        group = _number(kwargs, "epilogue_kwargs.mbstd_group_size", 4, 1, whole=True)
    return _valid(StyleGAN2Discriminator, {**section, "mbstd_group": group})


def frozen(network: ForeignNetwork) -> tuple[int, int]:
    """Blocks that Freeze-D keeps in a pickle's discriminator, and further layers that it keeps of the next block.

    The original counts convolutions in the order in which they are made: of the image, two, and of the shortcut.
    """
    blocks = network.init_kwargs.get("block_kwargs")
    rest = blocks.get("freeze_layers", 0) if isinstance(blocks, dict) else 0
    if type(rest) is not int or rest <= 0:
        return 0, 0
    sizes = stylegan2_sizes(_resolution(network.state, "b"))[:0:-1]
    for i, size in enumerate(sizes):
        layers = sum(f"b{size}.{name}.weight" in network.state for name in ("fromrgb", "conv0", "conv1", "skip"))
        if rest < layers:
            return i, rest
        rest -= layers
    return len(sizes), 0


def untold(network: str, section: Mapping[str, Any], state: State) -> tuple[str, ...]:
    """Keys of a ``network``'s section that a state dict does not tell."""
    return _UNTOLD[network]


def data_section(state: State) -> dict[str, int]:
    """Return ``resolution``, ``image_channels`` and ``num_classes``, which follow from either network's shapes."""
    embedding = state.get("mapping.embed.weight")
    classes = 0 if embedding is None else embedding.shape[1]
    if any(name.startswith("synthesis.") for name in state):
        resolution = _resolution(state, "synthesis.b")
        channels = _shape(state, f"synthesis.b{resolution}.torgb.weight")[0]
    else:
        resolution = _resolution(state, "b")
        channels = _shape(state, f"b{resolution}.fromrgb.weight")[1]
    if channels not in (1, 3):
        alpha = " (RGBA)" if channels == 4 else ""
        _refuse("img_channels", f"is {channels}{alpha}, which is not supported", "give a network of grey or RGB images")
    return {"resolution": resolution, "image_channels": channels, "num_classes": classes}


def generator_state(state: State) -> dict[str, Tensor]:
    """State dictionary of our generator, for ``generator_section`` and ``data_section``."""
    return _renamed("generator", generator_section(state), data_section(state), state)


def discriminator_state(state: State) -> dict[str, Tensor]:
    """State dictionary of our discriminator, for ``discriminator_section`` and ``data_section``."""
    return _renamed("discriminator", discriminator_section(state), data_section(state), state)


def _renamed(network: str, section: Mapping[str, Any], data: Mapping[str, int], state: State) -> dict[str, Tensor]:
    """Rename all entries and compare them with our network's; filters of layers that do not resample are left out."""
    needed = {name: tensor.shape for name, tensor in empty_network(network, section, data).state_dict().items()}
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        ours = stylegan_names.ours(network, name, data["resolution"])
        if name.endswith("resample_filter"):
            tensor = _square(tensor)
        if ours in needed:
            tensor = tensor.reshape(1) if name.endswith("noise_strength") and tensor.dim() == 0 else tensor
            if tensor.shape != needed[ours]:
                _refuse(name, f"has the shape {tuple(tensor.shape)}, not {tuple(needed[ours])}")
            found[ours] = tensor
        elif ours is None or not name.endswith("resample_filter"):
            _refuse(name, "is not an entry of StyleGAN2")
    missing = needed.keys() - found.keys()
    if missing:
        _refuse(min(missing), "has no counterpart in it")
    return found


def _resolution(state: State, prefix: str) -> int:
    """Return the largest resolution that has a block; refuse if a smaller one has none."""
    for beginning, project in _OTHERS.items():
        if name := next((name for name in state if re.match(beginning, name)), None):
            _refuse(name, f"is of {project}, which is not supported")
    pattern = re.compile(rf"{re.escape(prefix)}(\d{{1,5}})\..*")
    sizes = {int(match[1]) for name in state if (match := pattern.fullmatch(name))}
    if len(sizes) < 2 or sorted(sizes) != stylegan2_sizes(max(sizes)):
        _refuse(f"{prefix}4, {prefix}8, ...", "are not complete up to a power of two")
    return max(sizes)


def _shape(state: State, name: str) -> torch.Size:
    tensor = state.get(name)
    if tensor is None or tensor.dim() not in (1, 2, 4):
        _refuse(name, "is missing, or is not a weight")
    return tensor.shape


def _mapping_layers(state: State) -> int:
    return sum(re.fullmatch(r"mapping\.fc\d+\.weight", name) is not None for name in state)


def _channels(widths: dict[int, int], name: str) -> dict[str, int]:
    """Find the smallest ``channel_base`` that gives these widths, with the largest of them as ``channel_max``."""
    largest = max(widths.values())
    base = max(size * width for size, width in widths.items())
    if any(width != min(base // size, largest) for size, width in widths.items()):
        _refuse(name, f"has, as the other blocks, a width that no channel_base gives: {widths}")
    return {"channel_base": base, "channel_max": largest}


def _filter(filter: Tensor | None) -> dict[str, list[float]]:
    """The taps of a filter, as a section's key unless they are the published ones."""
    if filter is None:
        return {}
    square = _square(filter)
    taps = square.sum(0)
    if not torch.allclose(torch.outer(taps, taps), square, atol=1e-6):
        _refuse("resample_filter", "is not the outer product of taps whose sum is 1")
    published = torch.tensor(BINOMIAL) / sum(BINOMIAL)
    return {} if torch.equal(taps, published) else {"filter": taps.tolist()}


def _square(taps: Tensor) -> Tensor:
    """A filter as our layers have it: (K,), which is separable, or (K, K) -> (K, K), K even."""
    taps = taps.float()
    square = torch.outer(taps, taps) if taps.dim() == 1 else taps
    if square.dim() != 2 or square.shape[0] != square.shape[1] or len(square) > 16:
        _refuse("resample_filter", f"has the shape {tuple(taps.shape)}, which is not supported")
    return F.pad(square, (1, 0, 1, 0)) if len(square) % 2 else square


def _relu(kwargs: Mapping[str, Any], parts: Mapping[str, str]) -> dict[str, list[str]]:
    """Parts whose activation is a ReLU, as a section's key, from the prefix of each part's arguments."""
    found = []
    for part, prefix in parts.items():
        value = kwargs.get(f"{prefix}activation", "lrelu")
        if value not in ("lrelu", "relu"):
            _refuse(f"{prefix}activation", f"is {short(value)}, which is not supported", "give a network with 'lrelu'")
        found += [part] if value == "relu" else []
    return {"relu": found} if found else {}


def _valid(model: type[StyleGAN2Generator | StyleGAN2Discriminator], section: dict[str, Any]) -> dict[str, Any]:
    """Return the section, or refuse sizes that no recipe may have."""
    try:
        model(**section)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        _refuse(key, f"is {section[key]!r}, which is not supported ({first['msg']})")
    return section


def _check_mapping(state: State, w_size: int) -> None:
    """Refuse a mapping network if its layers or embedding have another width than its result."""
    layers = _mapping_layers(state)
    for i in range(layers):
        if (width := _shape(state, f"mapping.fc{i}.weight")[0]) != w_size:
            _refuse("mapping_kwargs.layer_features", f"is {width}; only the {w_size} of the result is supported")
    embedding = state.get("mapping.embed.weight")
    if embedding is not None and len(embedding) != w_size:
        _refuse("mapping_kwargs.embed_features", f"is {len(embedding)}; only the {w_size} of the result is supported")


def _checked(init_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by dotted names; refuse unknown ones, and values that our layers do not support."""
    flat: dict[str, Any] = {}
    for name, value in init_kwargs.items():
        inner = value if name in _NESTED and isinstance(value, dict) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": entry for key, entry in inner.items()}
    if not all(isinstance(name, str) for name in flat):
        _refuse("init_kwargs", "has a name that is not text")
    for name, value in flat.items():
        argument = name.rpartition(".")[2]
        if argument in _ONLY:
            only = _ONLY[argument]
            if (list(value) if isinstance(value, tuple) else value) != only:
                _refuse(name, f"is {short(value)}, which is not supported", f"give a network with {only!r}")
        elif argument not in _TOLD_OR_READ:
            _refuse(name, "is an unknown argument")
    return flat


def _untold(kwargs: Mapping[str, Any], prefix: str, resolution: int) -> dict[str, Any]:
    """Keys of both sections for half precision, its clamp, and the mapping network's learning rate."""
    clamp = kwargs.get(f"{prefix}conv_clamp", 256)
    if clamp is not None:
        clamp = float(_number(kwargs, f"{prefix}conv_clamp", 256, 1e-9))
    half = _number(kwargs, f"{prefix}num_fp16_res", 4, 0, whole=True)
    return {
        "conv_clamp": clamp,
        "half_resolutions": min(half, len(stylegan2_sizes(resolution)) - 1),
        "half_type": "fp16",
        "mapping_lr_multiplier": float(_number(kwargs, "mapping_kwargs.lr_multiplier", 0.01, 1e-9)),
    }


def _number(
    kwargs: Mapping[str, Any], name: str, default: float, least: float, most: float = LARGEST, whole: bool = False
) -> Any:
    value = kwargs.get(name, default)
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        _refuse(name, f"is {short(value)}, which is not supported", f"give a network with a number such as {default}")
    return value


def _refuse(name: str, problem: str, remedy: str | None = None) -> NoReturn:
    default = "give the weights of a StyleGAN2 network of stylegan2-ada-pytorch or stylegan3"
    raise UserError("weights", name, problem, remedy or default)
