"""A network's weights under the names of a public project's class, as a file that its ``load_state_dict`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bigsgan.config import Recipe
from bigsgan.config.families.pix2pix import Pix2PixGenerator, pix2pix_levels
from bigsgan.errors import UserError, reason
from bigsgan.models.gat import Mapping as GATMapping
from bigsgan.runtime.atomic import replacing
from bigsgan.training.sampling import FORWARD
from bigsgan.weights import biggan_pytorch, gat, pix2pix, r3gan, stylegan, stylegan_names

_FAMILIES = {
    "biggan-pytorch": ("biggan", "biggan_deep"),
    "stylegan2-ada": ("stylegan2",),
    "r3gan": ("r3gan",),
    "gat": ("gat",),
    "pix2pix": ("pix2pix", "cyclegan"),
}
FORMS = tuple(_FAMILIES)

_NAMES: Mapping[str, ModuleType] = {
    "biggan-pytorch": biggan_pytorch,
    "stylegan2-ada": stylegan_names,
    "r3gan": r3gan,
    "gat": gat,
    "pix2pix": pix2pix,
}
"""What has ``exported``, which renames to the public names, and ``opened``, which returns the class's call as text."""
_SOURCES: Mapping[str, ModuleType] = {**_NAMES, "stylegan2-ada": stylegan}
"""What reads them back, see ``weights/sources.py``."""

_OF_COLOURS = ("biggan-pytorch", "r3gan")
"""Projects whose networks have three channels."""
_OF_CLASSES = (("gat", "generator"), ("gat", "discriminator"), ("biggan-pytorch", "discriminator"))
"""Networks that need classes."""
_OF_VECTORS = ("stylegan2-ada", "r3gan")
"""Projects whose embedding of labels is a linear map of any ``c_dim`` numbers, of which one-hot vectors are a case."""
_OTHERWISE_TOLD = {
    *("bf16", "half_type", "style_mixing"),  # training alone, or rounding
    *("size", "filter", "channel_base", "channel_max"),  # the shapes are the same
}
_UNREAD = (
    ("embedding_size", "shared_embedding", False),
    ("depth", "architecture", "pixels"),
    ("num_blocks", "architecture", "unet"),
)
"""Keys of a section that are not read where another one has this value."""
_REMEDY = "use --format safetensors"


def refuse_unfit(recipe: Recipe, network: str, form: str) -> None:
    """Refuse a network of another family than the project's, or of images and labels that its class does not have.

    Raises:
        UserError: It is so.
    """
    section, data, size = getattr(recipe, network), recipe.data, recipe.data.network_size
    families = " or ".join(_FAMILIES[form])
    unfit = {
        f"{network}.family={families}": section.family not in _FAMILIES[form],
        "the generator of family=cyclegan": section.family == "cyclegan" and network == "discriminator",
        "labels that are classes": data.has_vectors and form not in _OF_VECTORS,
        "data.image_channels=3": form in _OF_COLOURS and data.channels != 3,
        "square images of a power of two": form not in ("gat", "pix2pix") and size.value != size.nominal,
        "square images": form == "gat" and not size.is_square,
        "images as pixels": data.codec.kind == "dct",
        "data.num_classes=1 or more": (form, network) in _OF_CLASSES and not data.num_classes,
    }
    if form == "gat" and section.family == "gat":
        depth, levels = section.depth, section.levels
        unfit |= {f"{network}.levels=4": levels != 4 or depth % 4 > 0}
        same = network == "discriminator" or section.embedding_size == section.latent_size
        unfit |= {"generator.embedding_size=generator.latent_size": not same}
    if form == "biggan-pytorch" and getattr(section, "multiples", None):
        unfit |= {"generator.multiples=null": True}
    for needed in [needed for needed, misses in unfit.items() if misses]:
        raise UserError("--format", form, f"needs {needed}", _REMEDY, "that project's class has no other")


def renamed(
    recipe: Recipe, network: str, form: str, state: Mapping[str, Tensor], direction: str = FORWARD
) -> tuple[dict[str, Tensor], str]:
    """Return a state dict under the project's names, and the call that makes the module for it.

    An import reads it back, and has to find the same weights in a network that computes the same. Of CycleGAN's two
    generators, it is that of a ``direction``.

    Raises:
        UserError: The project's class has no such network.
    """
    section, data = getattr(recipe, network), _data(recipe)
    keys, names, source = section.model_dump(), _NAMES[form], _SOURCES[form]
    own = {name: value for name, value in state.items() if not name.startswith("layers.-")}
    if recipe.data.joins_domains:
        section = Pix2PixGenerator(**keys | {"family": "pix2pix"})
        keys, own = section.model_dump(), _translator(own, direction)
        channels = [recipe.data.input_channels, recipe.data.image_channels]
        data["input_channels"], data["image_channels"] = channels if direction == FORWARD else channels[::-1]
    theirs = names.exported(network, keys, data, own)
    try:
        found = getattr(source, f"{network}_section")(theirs)
        back = getattr(source, f"{network}_state")(theirs)
        made = type(section)(**found).model_dump()
    except UserError as error:
        raise UserError("--format", form, f"cannot hold this {network}", _REMEDY, str(error)) from None
    free = {*_OTHERWISE_TOLD, *source.untold(network, found, theirs)}
    free |= set() if recipe.data.condition_width else set(section.of_classes)
    free |= {key for key, other, value in _UNREAD if keys.get(other) == value}
    for key in [key for key in made if key not in free and made[key] != keys[key]]:
        detail = f"it is {keys[key]!r} here, which that project's class does not have"
        raise UserError("--format", form, f"needs {network}.{key}={made[key]!r}", _REMEDY, detail)
    vectors = (".u", ".v") if form == "biggan-pytorch" else ()
    for name in own:
        assert name.endswith(vectors) or torch.equal(back[name], own[name]), f"{name} is written as it is read"
    return theirs, names.opened(network, keys, data)


def _translator(state: Mapping[str, Tensor], direction: str) -> dict[str, Tensor]:
    """Return the state of one of CycleGAN's generators, as a pix2pix of its own has it."""
    prefix = f"layers.0.{'to_b' if direction == FORWARD else 'to_a'}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _data(recipe: Recipe) -> dict[str, Any]:
    """What the classes are told of images, labels and a teacher: a vector's numbers count as classes."""
    data, teacher = recipe.data, recipe.objective.teacher
    side = data.network_size.shorter
    if isinstance(recipe.generator, Pix2PixGenerator) and recipe.generator.architecture == "unet":
        side = 1 << pix2pix_levels(data.network_size)  # what matters to a U-Net is how often it halves them
    found = {"resolution": side, "image_channels": data.channels, "num_classes": data.condition_width}
    if recipe.translates:
        found["input_channels"] = recipe.input_channels
    return found | ({"teacher_width": teacher.width, "teacher_hidden": teacher.hidden} if teacher else {})


@torch.no_grad()
def write(
    recipe: Recipe,
    network: str,
    form: str,
    module: nn.Module,
    state: Mapping[str, Tensor],
    out: Path,
    direction: str = FORWARD,
) -> tuple[int, str]:
    """Write the weights; return the number of tensors, and the call that makes the module for them. See ``renamed``.

    Raises:
        UserError: The project's class has no such network, or the file cannot be written.
    """
    theirs, text = renamed(recipe, network, form, state, direction)
    for mapping in module.modules():
        if isinstance(mapping, GATMapping):
            classes = torch.arange(recipe.data.num_classes, device=next(mapping.parameters()).device)
            theirs["w_avg"] = mapping.means_of_classes(classes).cpu()
    try:
        with replacing(out) as unfinished:
            torch.save(theirs, unfinished)
    except (OSError, RuntimeError) as error:
        raise UserError("--out", str(out), f"cannot be written: {reason(error, out)}", "give a writable path") from None
    return len(theirs), text
