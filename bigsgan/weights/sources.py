"""Reads files of public implementations: weights under our names, and the sections of a recipe that they fit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from bigsgan.errors import UserError
from bigsgan.paths import check_regular, check_stored
from bigsgan.weights import biggan_pytorch, pix2pix, r3gan, studiogan, stylegan
from bigsgan.weights.stylegan_pickle import ForeignNetwork, read_networks

SOURCES: dict[str, ModuleType] = {
    "biggan-pytorch": biggan_pytorch,
    "studiogan": studiogan,
    "stylegan2-ada": stylegan,
    "stylegan3-style2": stylegan,
    "r3gan": r3gan,
    "pix2pix": pix2pix,
}

_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and DDP, and of torch.compile

_FORMATS = {
    r"conv_to_rgb|generator\.(gen_z|layers\.\d+\.(bn_0|snconv))": "pytorch-pretrained-biggan, whose pixels and "
    "statistics for 51 truncations are in another order than any network here has",
    r"g\.(style|convs|to_rgbs)\.|g_ema\.": "rosinality/stylegan2-pytorch",
    r"GAN\.": "lucidrains/stylegan2-pytorch",
}
"""Formats of other projects, by what names in them begin with; those of a wrapper's parts by its key and a dot."""


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


def read_source(source: str, weights: Path, discriminator: Path | None, norm_eps: float | None = None) -> Found:
    """Read published weights.

    Args:
        source: One of ``SOURCES``.
        weights: The generator's state dict, or a pickle with all networks.
        discriminator: The discriminator's state dict, if it has a file of its own.
        norm_eps: What BigGAN-PyTorch's generator was trained with as ``BN_eps``; None for its default.

    Raises:
        UserError: A file cannot be read, holds code, or is not of that source.
    """
    if norm_eps is not None and source != "biggan-pytorch":
        raise UserError("--bn-eps", norm_eps, f"is an argument of biggan-pytorch, not of {source}", "leave it out")
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
    if norm_eps is not None:
        sections["generator"]["norm_eps"] = norm_eps
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
    except ValueError as error:
        what = "holds code, which is not run" if "/code/" in str(error) else f"cannot be read: {error}"  # TorchScript's
        raise UserError(option, str(path), what, "save the state dict alone, by torch.save") from None
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _load(path)
    except OSError as error:
        raise UserError(option, str(path), f"cannot be read ({error.strerror or error})", "give another file") from None
    except Exception as error:  # damaged bytes make the reader raise whatever it likes
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = "cannot be read: it is damaged, or of another format"
        if asked or "weights_only" in str(error):  # never torch's text, whose advice is to run the code
            what = f"holds code{f' ({asked[1]})' if asked else ''}, which is not run"
        remedy = "give a state dict, as .pth or .safetensors, in which there are tensors alone"
        raise UserError(option, str(path), what, remedy) from None
    return {"G": ForeignNetwork("", {}, _state(option, path, content))}


def _load(path: Path) -> Any:
    """Load a file of tensors and plain values; NumPy's numbers, such as a trainer's best score, are passed over."""
    numpy = [*(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")), "numpy.dtype"]
    with warnings.catch_warnings(), torch.serialization.safe_globals([(_PassedOver, name) for name in numpy]):
        warnings.simplefilter("ignore")  # of torch, about a pickle's version
        return torch.load(path, "cpu", weights_only=True)


class _PassedOver:
    """Stands for a value that is not needed."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _state(option: str, path: Path, content: Any) -> dict[str, Tensor]:
    """The state dict in a file, alone or under ``state_dict``, without the names of what was around the network."""
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]  # beside an optimizer's and the like
    if isinstance(content, Mapping):
        names = [f"{key}.{name}" for key, inner in content.items() if isinstance(inner, Mapping) for name in inner]
        for beginning, project in _FORMATS.items():
            if any(re.match(beginning, str(name)) for name in [*content, *names]):
                remedy = "give weights of a source that --from lists"
                raise UserError(option, str(path), f"is of {project}, which is not supported", remedy)
    named = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    if not named or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(option, str(path), "is no state dict: it holds more than named tensors", "save the state dict")
    for name, value in content.items():
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            problem = f"is no state dict: {name} is larger than what is stored of it"
            raise UserError(option, str(path), problem, "save the state dict")
    state = dict(content)
    while prefix := next((p for p in _PREFIXES if state and all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state
