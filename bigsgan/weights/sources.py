"""Reads files of public implementations: weights under our names, and the matching sections of a recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigsgan.errors import UserError, reason
from bigsgan.weights import (
    biggan_pytorch,
    biggan_settings,
    diffusers_autoencoder,
    gat,
    gat_settings,
    nvidia_settings,
    pix2pix,
    pix2pix_settings,
    r3gan,
    sit,
    studiogan,
    stylegan,
)
from bigsgan.weights.optimizer_state import Moments, adam_moments
from bigsgan.weights.settings import NONE, OPTION, Settings
from bigsgan.weights.stylegan_pickle import ForeignNetwork, Snapshot, read_snapshot
from bigsgan.weights.tensor_file import Arguments, check_file, read_content

SOURCES: dict[str, ModuleType] = {
    "biggan-pytorch": biggan_pytorch,
    "studiogan": studiogan,
    "stylegan2-ada": stylegan,
    "stylegan3-style2": stylegan,
    "r3gan": r3gan,
    "gat": gat,
    "sit": sit,
    "pix2pix": pix2pix,
}
"""Each module's functions take state dicts under the source's names. ``generator_section``, ``discriminator_section``
and ``data_section`` return the keys of a recipe's sections that names and shapes tell; ``generator_state`` and
``discriminator_state`` return the state dicts of our networks of these sections, and are called first. ``untold`` names
the keys of a section that a state dict does not tell; what no recipe has is text with a ``=``. All but ``untold`` raise
a UserError if the state dict is of another network, or incomplete, or of a network that no recipe can describe. A
module may answer for more: ``moments`` (instead of ``adam_moments``), ``teacher_section`` of D's state dict,
``left_out`` of the EMA's."""

DIFFUSERS = "diffusers"
"""The source whose networks are folders, not files."""

_CHECKPOINTS = (gat.CHECKPOINT, sit.CHECKPOINT)
"""Of trainers whose checkpoints are one file: names there of a snapshot's networks, and of their optimizers' states."""

_ARGUMENTS = {"gat": gat_settings.checkpoint_settings, "sit": sit.checkpoint_settings}
"""What reads the arguments in a checkpoint of a source's trainer."""

_PREFIXES = ("module.", "_orig_mod.")  # added by DataParallel and DDP, and by torch.compile

_FORMATS = {
    r"conv_to_rgb|generator\.(gen_z|layers\.\d+\.(bn_0|snconv))": "pytorch-pretrained-biggan, whose pixels and "
    "statistics for 51 truncations are in another order than any network here has",
    r"g\.(style|convs|to_rgbs)\.|g_ema\.": "rosinality/stylegan2-pytorch",
    r"GAN\.": "lucidrains/stylegan2-pytorch",
}
"""Formats of other projects, by the beginnings of names; names in a wrapper's part have its key and a dot before."""


class Found(NamedTuple):
    """Contents of published files."""

    data: dict[str, Any]  # keys of the recipe's `data` that shapes tell
    sections: dict[str, dict[str, Any]]  # the recipe's section of each network
    # by entry of a checkpoint (generator, average, discriminator), parameters and buffers under our names
    states: dict[str, dict[str, Tensor]]
    settings: tuple[Settings, ...] = ()  # known settings of the training: first the snapshot's, then the file's
    augmentation_p: float | None = None  # probability of ADA's augmentations, if a pickle has them
    nimg: int | None = None  # images seen, if the files tell them
    moments: Mapping[str, Moments] = {}  # state of the optimizer, by network
    without_moments: Mapping[str, str] = {}  # by network, why the state of its optimizer was not taken
    has_ema: bool = False  # whether there was an EMA besides the generator
    assumed: tuple[str, ...] = ()  # dotted keys of the recipe that no file tells; what no recipe has with a `=`
    teacher: dict[str, Any] | None = None  # keys of `objective.teacher`, if D has heads for its features
    left_out: tuple[str, ...] = ()  # parts of the networks that have no place here


def read_source(
    source: str,
    weights: Path,
    discriminator: Path | None,
    norm_eps: float | None = None,
    settings_file: str | None = None,
) -> Found:
    """Read published weights.

    Args:
        source: One of ``SOURCES``, or ``DIFFUSERS``.
        weights: The generator's state dict, a pickle with all networks, or a folder.
        discriminator: The discriminator's state dict, if it has a file of its own.
        norm_eps: ``BN_eps`` of BigGAN-PyTorch's generator; None for its default.
        settings_file: Path of the training's settings, ``none`` to take no settings, or None for the file that the
            trainer puts beside the weights, if it exists.

    Raises:
        UserError: A file cannot be read, contains code, or is not of that source.
    """
    module = SOURCES.get(source)
    _refuse("--bn-eps", source, norm_eps is not None and source != "biggan-pytorch")
    _refuse("--discriminator", source, discriminator is not None and not hasattr(module, "discriminator_state"))
    _refuse(OPTION, source, settings_file is not None and source == DIFFUSERS)
    if module is None:
        return _read_autoencoder(weights)
    check_file("--weights", weights)
    in_file, nimg = _file_settings(source, weights, settings_file, norm_eps)
    snapshot = _with_discriminator(_read("--weights", weights), discriminator)
    networks = snapshot.networks
    ema = _ema_generator(networks, weights)
    with _blaming("--weights", weights, f"a generator of {source}"):
        both = {"generator": networks.get("G", ema), "average": ema}
        states = {name: module.generator_state(network.state) for name, network in both.items()}
        sections = {"generator": _section(module.generator_section, ema)}
        data = module.data_section(ema.state)
        sections["generator"] |= {} if norm_eps is None else {"norm_eps": norm_eps}
    if "D" in networks:
        option, path = ("--weights", weights) if discriminator is None else ("--discriminator", discriminator)
        with _blaming(option, path, f"a discriminator of {source}"):
            states["discriminator"] = module.discriminator_state(networks["D"].state)
            sections["discriminator"] = _section(module.discriminator_section, networks["D"])
    with _blaming("--weights", weights, f"a snapshot of {source}"):
        teacher_of = getattr(module, "teacher_section", lambda state: None)
        teacher = teacher_of(networks["D"].state) if "D" in networks else None
        own, in_args = _snapshot_settings(source, weights, snapshot, teacher is not None, settings_file == NONE)
        return Found(
            data,
            sections,
            states,
            tuple(found for found in (own, in_file) if found.keys or found.left),
            nvidia_settings.augmentation_p(networks.get("augment_pipe")),
            next((num for num in (snapshot.nimg, in_args, nimg) if num is not None), None),
            *_moments(module, snapshot),
            "G_ema" in networks and "G" in networks,
            tuple(_assumed(module, sections, networks | {"G": ema}, teacher, (own, in_file))),
            teacher,
            getattr(module, "left_out", lambda state: ())(ema.state),
        )


def _refuse(option: str, source: str, is_given: bool) -> None:
    """Refuse an option that a source has no use for."""
    if is_given:
        raise UserError(option, None, f"is not supported with --from {source}", "remove the option")


def _read_autoencoder(folder: Path) -> Found:
    """Read a folder of diffusers, which has neither a discriminator nor settings of a training."""
    with _blaming("--weights", folder, "an autoencoder of diffusers"):
        data, section, state = diffusers_autoencoder.read(folder, "--weights")
    depth = min(3, max(1, (data["resolution"] // 3).bit_length() - 1))  # small images have no patches of 70 pixels
    sections = {"generator": section, "discriminator": {"family": "autoencoder", "depth": depth}}
    return Found(data, sections, {"generator": state, "average": state})


def _ema_generator(networks: Mapping[str, ForeignNetwork], weights: Path) -> ForeignNetwork:
    """The EMA, or the generator itself if there is none."""
    ema = networks.get("G_ema", networks.get("G"))
    if ema is None:
        raise UserError("--weights", str(weights), "contains no generator", "give the file of a generator")
    return ema


def _snapshot_settings(
    source: str, path: Path, snapshot: Snapshot, has_teacher: bool, takes_none: bool
) -> tuple[Settings, int | None]:
    """A snapshot's settings, empty if the user wants none, and the images seen that its arguments tell."""
    own, nimg = nvidia_settings.snapshot_settings(snapshot), None
    if snapshot.args and source in _ARGUMENTS:
        own, nimg = _ARGUMENTS[source](path, snapshot.args, snapshot.steps, has_teacher)
    return Settings() if takes_none else own, nimg


def _with_discriminator(snapshot: Snapshot, path: Path | None) -> Snapshot:
    """Add D from a file of its own, if there is one, and drop the state of the snapshot's optimizer of D."""
    if path is None:
        return snapshot
    others = _read("--discriminator", path).networks
    if "D" not in others and len(others) != 1:
        remedy = "give the file of a discriminator"
        raise UserError("--discriminator", str(path), "contains no discriminator", remedy)
    networks = snapshot.networks | {"D": others.get("D") or next(iter(others.values()))}
    return snapshot._replace(
        networks=networks, optimizers={name: each for name, each in snapshot.optimizers.items() if name == "G"}
    )


@contextmanager
def _blaming(option: str, path: Path, what: str) -> Iterator[None]:
    """Raise a UserError about a file for any error that its content causes, such as an IndexError for a shape."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {reason(error)}"
        remedy = "give another file" + (f", or {OPTION} {NONE}" if option == OPTION else "")
        raise UserError(option, str(path), f"cannot be read as {what}", remedy, cause) from None


def _file_settings(
    source: str, weights: Path, given: str | None, norm_eps: float | None
) -> tuple[Settings, int | None]:
    """Settings in a separate file, and the images seen that it tells."""
    beside = {
        **dict.fromkeys(("stylegan2-ada", "stylegan3-style2", "r3gan"), weights.with_name(nvidia_settings.FILE)),
        "biggan-pytorch": biggan_settings.file_beside(weights),
        "pix2pix": weights.with_name(pix2pix_settings.FILE),
    }
    _refuse(OPTION, source, given is not None and given != NONE and source not in beside)
    path = beside.get(source) if given is None else Path(given)
    if given == NONE or path is None or (given is None and not os.path.isfile(path)):
        return Settings(), None
    with _blaming(OPTION, path, f"settings of {source}"):
        if source == "biggan-pytorch":
            return biggan_settings.file_settings(path, norm_eps)
        if source == "pix2pix":
            return pix2pix_settings.file_settings(path), None
        return nvidia_settings.file_settings(source, path), None


def _moments(module: ModuleType, snapshot: Snapshot) -> tuple[dict[str, Moments], dict[str, str]]:
    """States of optimizers under our names, and the reasons for those that cannot be taken."""
    taken, left = {}, {}
    for theirs, ours in (("G", "generator"), ("D", "discriminator")):
        network = snapshot.networks.get(theirs)
        if theirs not in snapshot.optimizers or network is None:
            continue
        try:
            moments = getattr(module, "moments", adam_moments)(snapshot.optimizers[theirs], network)
        except ValueError as error:
            left[ours] = str(error)
            continue
        convert = getattr(module, f"{ours}_state")
        # Converted like a network whose parameters are the moments, as names and layouts change alike.
        values = {kind: convert({**network.state, **each}) for kind, each in moments.values.items()}
        taken[ours] = Moments(moments.steps, values)
    return taken, left


def _assumed(
    module: ModuleType,
    sections: Mapping[str, Any],
    networks: Mapping[str, ForeignNetwork],
    teacher: Mapping[str, Any] | None,
    settings: tuple[Settings, Settings],
) -> Iterator[str]:
    own, in_file = settings
    names = [f"objective.teacher.{key}" for key in gat.UNTOLD_OF_TEACHER] if teacher else []
    for name, section in sections.items():
        network = networks["G" if name == "generator" else "D"]
        if not network.init_kwargs:
            untold = module.untold(name, section, network.state)
            names += [f"{name}.{key}" for key in untold if "=" not in key]
            names += [text for text in untold if "=" in text and text.partition("=")[0] not in in_file.told]
    yield from (name for name in names if name not in own.keys.keys() | in_file.keys.keys())


def _section(describe: Any, network: ForeignNetwork) -> dict[str, Any]:
    if network.init_kwargs and describe.__module__ in (stylegan.__name__, r3gan.__name__):
        return describe(network.state, network.init_kwargs)
    return describe(network.state)


def _read(option: str, path: Path) -> Snapshot:
    """Read a file as a snapshot; a single state dict counts as G's."""
    check_file(option, path)
    if path.suffix == ".pkl":
        snapshot = read_snapshot(path)
        for network in snapshot.networks.values():
            for name, tensor in network.state.items():
                if problem := _unfit(tensor):
                    raise UserError(option, str(path), f"has {name}, which {problem}", "give another snapshot")
        return snapshot
    content = read_content(option, path)
    for networks, optimizers in _CHECKPOINTS if isinstance(content, Mapping) else ():
        if all(isinstance(content.get(theirs), Mapping) for theirs in networks.values()):
            args = content.get("args")
            return Snapshot(
                {ours: ForeignNetwork(_state(option, path, content[theirs])) for ours, theirs in networks.items()},
                optimizers={
                    ours: content[key] for ours, key in optimizers.items() if isinstance(content.get(key), dict)
                },
                args=args.values if isinstance(args, Arguments) else {},
                steps=content.get("steps"),
            )
    return Snapshot({"G": ForeignNetwork(_state(option, path, content))})


def _state(option: str, path: Path, content: Any) -> dict[str, Tensor]:
    """The state dict in a file, alone or under ``state_dict``, without the prefixes of wrappers in its names."""
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]  # the file also has an optimizer's and the like
    if isinstance(content, Mapping):
        names = [f"{key}.{name}" for key, inner in content.items() if isinstance(inner, Mapping) for name in inner]
        for beginning, project in _FORMATS.items():
            if any(re.match(beginning, str(name)) for name in [*content, *names]):
                remedy = "give weights of a source that --from lists"
                raise UserError(option, str(path), f"is of {project}, which is not supported", remedy)
    named = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    if not named or not all(isinstance(value, Tensor) for value in content.values()):
        problems = ["it contains more than named tensors"]
    else:
        problems = [f"{name} {problem}" for name, value in content.items() if (problem := _unfit(value))]
    if problems:
        raise UserError(option, str(path), "must be a state dict", "save the state dict", problems[0])
    state = dict(content)
    while prefix := next((p for p in _PREFIXES if state and all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _unfit(value: Tensor) -> str | None:
    """Say why a tensor of a file is not a weight, statistic or counter."""
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
        return "is not a plain tensor"
    if not value.is_floating_point() and (value.is_complex() or value.numel() != 1):
        return f"is of {value.dtype}"
    return "is larger than its storage" if value.nbytes > value.untyped_storage().nbytes() else None
