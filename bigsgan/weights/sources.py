"""Reads files of public implementations: weights under our names, and the sections of a recipe that they fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from bigsgan.errors import UserError
from bigsgan.paths import check_regular, check_stored
from bigsgan.weights import biggan_pytorch, pix2pix, r3gan, stylegan
from bigsgan.weights.stylegan_pickle import ForeignNetwork, read_networks

SOURCES: dict[str, ModuleType] = {
    "biggan-pytorch": biggan_pytorch,
    "stylegan2-ada": stylegan,
    "stylegan3-style2": stylegan,
    "r3gan": r3gan,
    "pix2pix": pix2pix,
}


class Found(NamedTuple):
    """What a file or two hold.

    Attributes:
        data: Keys of the recipe's section that shapes tell.
        sections: By network, its section.
        states: By entry of a checkpoint (generator, average, discriminator), parameters and buffers under our names.
        augmentation_p: Probability of ADA's augmentations, where a pickle holds them.
    """

    data: dict[str, Any]
    sections: dict[str, dict[str, Any]]
    states: dict[str, dict[str, Tensor]]
    augmentation_p: float | None = None


def read_source(source: str, weights: Path, discriminator: Path | None) -> Found:
    """Read published weights.

    Args:
        source: One of ``SOURCES``.
        weights: The generator's state dict, or a pickle with all networks.
        discriminator: The discriminator's state dict, if it has a file of its own.

    Raises:
        UserError: A file cannot be read, holds code, or is not of that source.
    """
    networks = _read("--weights", weights)
    if discriminator is not None:
        others = _read("--discriminator", discriminator)
        if "D" not in others and len(others) != 1:
            raise UserError("--discriminator", str(discriminator), "holds no discriminator", "give the file of one")
        networks["D"] = others.get("D") or next(iter(others.values()))
    average = networks.get("G_ema", networks.get("G"))
    if average is None:
        raise UserError("--weights", str(weights), "holds no generator", "give the file of a generator")
    module = SOURCES[source]
    live = networks.get("G", average)
    sections = {"generator": _section(module.generator_section, average)}
    states = {"generator": module.generator_state(live.state), "average": module.generator_state(average.state)}
    if "D" in networks:
        sections["discriminator"] = _section(module.discriminator_section, networks["D"])
        states["discriminator"] = module.discriminator_state(networks["D"].state)
    p = networks["augment_pipe"].state.get("p") if "augment_pipe" in networks else None
    return Found(module.data_section(average.state), sections, states, None if p is None else float(p))


def _section(describe: Any, network: ForeignNetwork) -> dict[str, Any]:
    if network.init_kwargs and describe.__module__ in (stylegan.__name__, r3gan.__name__):
        return describe(network.state, network.init_kwargs)
    return describe(network.state)


def _read(option: str, path: Path) -> dict[str, ForeignNetwork]:
    """Networks in a file, by name: a state dict alone is G's."""
    try:
        check_regular(path)
    except OSError as error:
        raise UserError(option, str(path), f"cannot be read ({error.strerror})", "give another file") from None
    if path.suffix == ".pkl":
        return dict(read_networks(path))
    try:
        check_stored(path)
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # damaged bytes make the reader raise whatever it likes
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        problem = f"cannot be read ({cause})"
        raise UserError(option, str(path), problem, "give a state dict, as .pth or .safetensors") from None
    named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    if not named or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(option, str(path), "is no state dict: it holds more than named tensors", "save the state dict")
    for name, value in state.items():
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            problem = f"is no state dict: {name} is larger than what is stored of it"
            raise UserError(option, str(path), problem, "save the state dict")
    return {"G": ForeignNetwork("", {}, dict(state))}
