"""Perceptual distances: between the features that a frozen network computes of images and of their targets.

The network is VGG-16 with the heads of LPIPS (Zhang et al. 2018, arXiv 1801.03924), or a program.

Shapes: n images, C channels of H x W pixels; layer i has feature maps (n, C_i, H_i, W_i).
"""

from __future__ import annotations

import importlib
import os
import re
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bigsgan.config.families.features import FeaturesNetwork
from bigsgan.config.reconstruction import PerceptualNetwork
from bigsgan.data.autoencoders import check_readable, naming_program, weights_digest
from bigsgan.data.frozen import load_frozen, refuse_moving
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.runtime.paths import check_stored

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""Mean and standard deviation of ImageNet's colours, in [-1, 1], as LPIPS rounds them."""
_TAPS = {3: 64, 8: 128, 15: 256, 22: 512, 29: 512}
"""Channels of relu1_2, 2_2, 3_3, 4_3 and 5_3 in torchvision's VGG-16, by the numbers of the layers."""
_SMALLEST = 16
"""Least side of an image of which four poolings leave a pixel."""
_EPS = 1e-10
"""LPIPS adds it to norms."""
_TRIED = (2, 3)
"""Numbers of images with which a program is tried: it must accept any number."""
_REMEDY = "give a program that makes a tuple of feature maps (n, C, H, W) of images (n, 3, H, W) in [-1, 1]"
_NAMES = {
    re.compile(r"(?:net\.slice\d|features)\.(\d+\.(?:weight|bias))"): "layers.",
    re.compile(r"lin(\d)\.model\.1\.weight"): "heads.",
}
"""Names in files, of VGG-16 in LPIPS or of torchvision, and of heads, and what is before their number in ``VGG``."""


class VGG(nn.Module):
    """VGG-16 up to relu5_3, with the weights of LPIPS' heads, (1, C_i, 1, 1)."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        models = importlib.import_module("torchvision.models")  # takes seconds
        with torch.device("meta"):
            self.layers = models.vgg16(weights=None).features[: max(_TAPS) + 1]
            self.heads = nn.ParameterList([torch.empty(1, width, 1, 1) for width in _TAPS.values()])
        self.register_buffer("shift", torch.tensor(_SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(_SCALE).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(n, 3, H, W) in [-1, 1] -> five maps (n, C_i, H_i, W_i)."""
        h, found = (images - self.shift) / self.scale, []
        for number, layer in enumerate(self.layers):
            h = layer(h)
            if number in _TAPS:
                found.append(h)
        return found


class Features:
    """Callable that returns feature maps of images.

    Attributes:
        tensors: The network's parameters and buffers.
        heads: Weights of the channels of each map, (1, C_i, 1, 1); none of a program's, which all count as 1.
    """

    def __init__(self, network: nn.Module, path: str, field: str) -> None:
        """Take a frozen network. Messages name it by ``path``, and the key or option ``field`` that gave it."""
        self._network, self._path, self._field = network, path, field
        self.tensors = [*network.parameters(), *network.buffers()]
        self.heads = list(network.heads) if isinstance(network, VGG) else []

    def __call__(self, images: Tensor) -> Sequence[Tensor]:
        """Return maps (n, C_i, H_i, W_i), float32, of images (n, C, H, W) in [-1, 1]; grey ones get three channels.

        Raises:
            UserError: A program fails, or returns something else.
        """
        shown = f"images {(len(images), 3, *images.shape[2:])}"
        is_ours = isinstance(self._network, VGG)
        with nullcontext() if is_ours else naming_program(self._path, self._field, shown, _REMEDY):
            found = self.made(images)
        maps = found if isinstance(found, list | tuple) else ()
        if not maps or not all(isinstance(x, Tensor) and x.dim() == 4 and len(x) == len(images) for x in maps):
            raise UserError(
                self._field, self._path, f"must make a tuple of feature maps (n, C, H, W) of {shown}", _REMEDY
            )
        return [each.float() for each in maps]

    def made(self, images: Tensor) -> Any:
        """Return what the network makes of the same images, and raise what it raises."""
        # The profiling executor would change the arithmetic from one call to the next.
        with torch.jit.optimized_execution(False):
            return self._network(images.float().expand(-1, 3, -1, -1))


def distances(features: Features, images: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the squared distances of each layer's features, summed over channels: (n, H_i, W_i).

    Features are divided by their norm over channels (equation 1), and channels weigh as the heads say.

    Args:
        features: The network.
        images: (n, C, H, W) in [-1, 1].
        targets: The same; they get no gradient.
    """
    with torch.no_grad():
        kept = [_unit(each) for each in features(targets)]
    pairs = zip(features(images), kept, strict=True)
    squares = [(_unit(ours) - theirs).square() for ours, theirs in pairs]
    if features.heads:
        squares = [each * head for each, head in zip(squares, features.heads, strict=True)]
    return [each.sum(dim=1) for each in squares]


def _unit(features: Tensor) -> Tensor:
    """Divide by the norm over channels, whose gradient is 0 where it is 0."""
    return features / (torch.linalg.vector_norm(features, dim=1, keepdim=True) + _EPS)


class Fields(NamedTuple):
    """The keys or options that name the files of a perceptual distance, for messages."""

    path: str
    heads: str


def open_features(network: PerceptualNetwork, size: Size, fields: Fields, device: torch.device) -> Features:
    """Load the network of a perceptual distance of images of a size, and try a program with a few of them.

    Raises:
        UserError: A file cannot be read or is of another kind, a program fails, or images are too small.
    """
    if not _is_program(Path(network.path), fields.path):
        if size.shorter < _SMALLEST:
            nearest = Size(*(max(_SMALLEST, side) for side in size))
            problem, remedy = f"must be at least {_SMALLEST} with VGG-16", f"set data.resolution={nearest.text}"
            raise UserError("data.resolution", size.value, problem, remedy, "it pools four times")
        return Features(_load_vgg(network, fields).to(device), network.path, fields.path)
    if network.heads is not None:
        remedy = f"remove it, or give torchvision's VGG-16 as {fields.path}"
        raise UserError(fields.heads, network.heads, "must be null with a program", remedy)
    return open_program(network.path, fields.path, size, device)


def open_program(path: str, field: str, size: Size, device: torch.device, has_gradient: bool = True) -> Features:
    """Load a program that makes feature maps of images of a size, and try it with a few of them.

    ``field`` is the key that named it. It must have a gradient at the images if it ``has_gradient``.

    Raises:
        UserError: It cannot be read, fails, or makes something else.
    """
    features = Features(load_frozen(Path(path), field, device), path, field)
    for num in _TRIED:
        with torch.enable_grad():
            maps = features(torch.zeros(num, 3, *size, device=device, requires_grad=True))
        if has_gradient and not any(each.requires_grad for each in maps):
            raise UserError(field, path, "has no gradient at its images", "write it without torch.no_grad")
    ones = torch.ones(2, 3, *size, device=device)
    refuse_moving(features.tensors, lambda: features(ones), field, path)
    return features


def open_maps(section: FeaturesNetwork, size: Size, device: torch.device) -> Features:
    """Open a section's program, and check that it makes the maps that the section says of images of a size.

    Raises:
        UserError: It cannot be read, fails, or makes something else.
    """
    field = f"{section.network}.path"
    features = open_program(section.path, field, size, device, has_gradient=section.network == "discriminator")
    with torch.no_grad():
        made = [list(each.shape[1:]) for each in features(torch.zeros(2, 3, *size, device=device))]
    if made != section.maps:
        field, problem = f"{section.network}.maps", f"must be {made} with the program {section.path!r}"
        raise UserError(field, section.maps, problem, f"set {field}={str(made).replace(' ', '')}")
    return features


def _load_vgg(given: PerceptualNetwork, fields: Fields) -> VGG:
    path, named = given.path, dict[str, Tensor]()
    for field, file in ((fields.path, path), (fields.heads, given.heads)):
        tensors = {} if file is None else _tensors(file, field, fields)
        for name, tensor in tensors.items():
            matches = ((pattern.fullmatch(name), before) for pattern, before in _NAMES.items())
            named |= {before + found[1]: tensor for found, before in matches if found}
    kinds = {name.partition(".")[0] for name in named}
    if kinds == {"layers"}:
        remedy = "name LPIPS' heads of VGG-16, the file vgg.pth in the packages lpips and torchmetrics"
        raise UserError(fields.heads, given.heads, "must be LPIPS' heads with torchvision's VGG-16", remedy)
    if kinds == {"heads"}:
        remedy = f"give torchvision's, and {fields.heads}"
        raise UserError(fields.path, path, "must be VGG-16: it has LPIPS' heads alone", remedy)
    network = VGG().requires_grad_(False)
    try:
        network.load_state_dict(named, assign=True)
    except RuntimeError:
        problem = "must be LPIPS or VGG-16, with five heads of VGG-16, or a program"
        raise UserError(fields.path, path, problem, "give one of these", "names or shapes differ") from None
    return network.float()


def _is_program(path: Path, field: str) -> bool:
    """Whether a file is of torch.export, or an archive with code, which torch.save does not write."""
    check_readable([path], field)
    try:
        with zipfile.ZipFile(path) as archive:
            return path.suffix == ".pt2" or any("/code/" in name for name in archive.namelist())
    except zipfile.BadZipFile:
        return path.suffix == ".pt2"


def _tensors(path: str, field: str, fields: Fields) -> dict[str, Tensor]:
    """Return the tensors of a state dict; code in it is not executed."""
    check_readable([Path(path)], field)
    try:
        check_stored(path)
        is_safe = path.endswith(".safetensors")
        state = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
        return {n: each for n, each in state.items() if isinstance(each, Tensor) and each.is_floating_point()}
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # pickle, zip, torch and safetensors each raise their own
        problem, remedy = "must be a state dict of tensors", "save one by torch.save or safetensors"
        remedy += ", or give a program of torch.export (.pt2) or torch.jit.save" if field == fields.path else ""
        raise UserError(field, path, problem, remedy) from None


def check_program(section: Any, digest: str | None) -> None:
    """Refuse a file at a section's ``path`` that is not the program of a ``digest``, with which a network was trained.

    Raises:
        UserError: It is another one, or cannot be read.
    """
    if not digest or not isinstance(section, FeaturesNetwork) or not os.path.exists(section.path):
        return
    field = f"{section.network}.path"
    if weights_digest([Path(section.path)], field) != digest:
        problem = "is not the program that the network was trained with"
        raise UserError(field, section.path, problem, "put that one there")
