"""Networks that turn images into features and class logits, read from local files or trained here.

Shapes: n images (n, C, H, W), 0 to 255 in any type, C being 1 (grey) or 3; D features, K classes.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bigsgan.checkpoint.tags import checksum
from bigsgan.config.data import DIGITS, Data
from bigsgan.config.metrics import FeatureNetwork
from bigsgan.data.autoencoders import load_program, naming_program
from bigsgan.errors import UserError
from bigsgan.images.codec import decode
from bigsgan.images.size import Size
from bigsgan.images.wide import viewable
from bigsgan.metrics.digits import DigitClassifier, cached_classifier
from bigsgan.metrics.lpips import Lpips
from bigsgan.metrics.weight_files import CHUNK, DIGITS_OF_HASH, find_weights, load_weights
from bigsgan.runtime import comm

LARGEST_WIDTH = 2**14


class Seen(NamedTuple):
    """A feature network's outputs for images."""

    features: Tensor  # (n, D)
    logits: Tensor | None  # (n, K); None if the network does not classify


@dataclass
class Features:
    """A feature network, frozen."""

    name: str
    resizer: str  # how images are resized for it; `none` if it takes any size
    hash: str  # first 16 digits of the SHA-256 of its weights, or of its file
    network: nn.Module  # on some device
    look: Callable[[Tensor], Seen]  # computes outputs for images on that device
    # features for comparing images that differ little; None for those of `look`
    look_for_paths: Callable[[Tensor], Tensor] | None = None
    width: int = 0  # D
    num_classes: int | None = None  # K; None without logits
    lpips: Lpips | None = None  # what compares images with targets perceptually, if a metric does
    channels: str = ""  # which of the images' channels it sees, unless all

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Seen:
        """Compute float32 features and logits of images, ``CHUNK`` at a time, of the channels that one looks at."""
        parts = [self.look(chunk) for chunk in viewable(images).split(CHUNK)]
        logits = [part.logits.float() for part in parts if part.logits is not None]
        return Seen(torch.cat([part.features.float() for part in parts]), torch.cat(logits) if logits else None)


COMMAND = {"features": "--features", "weights": "--weights"}
RECIPE = {"features": "metrics.features.network", "weights": "metrics.features.weights"}
"""Where the user gives the network and its weights: fields of messages."""


def check_features(section: FeatureNetwork, data: Data, fields: Mapping[str, str] = COMMAND) -> None:
    """Find the files of a feature network, without building it.

    Raises:
        UserError: A file is missing or not the expected one, or the network does not fit the data.
    """
    with _named(fields):
        _find(section, data)


def no_features() -> Features:
    """Return a network without features, for metrics that need none."""
    return Features(
        "none", "none", "", nn.Identity(), lambda images: Seen(images.new_empty(len(images), 0).float(), None)
    )


def open_features(section: FeatureNetwork, data: Data, cache: Path, fields: Mapping[str, str] = COMMAND) -> Features:
    """Build a feature network on the host and load its weights; ``cache`` keeps one that has to be trained.

    Raises:
        UserError: A file is missing or not the expected one, or the network does not fit the data.
    """
    with _named(fields):
        features = _find(section, data)(cache)
        black = torch.zeros(1, data.image_channels, *data.resolution, dtype=torch.uint8)
        if (num := viewable(black).shape[1]) != data.image_channels:
            features.channels = f"first {num} of {data.image_channels}"
        try:
            seen = features(black)
            _, features.width = seen.features.shape
            features.num_classes = None if seen.logits is None else seen.logits.shape[1]
        except Exception as error:  # a foreign network may raise or return anything
            problem = f"cannot process images of {data.resolution} pixels: {str(error).splitlines()[-1]}"
            raise UserError("features", section.network, problem, "choose another network") from error
        if features.width > LARGEST_WIDTH:
            problem = f"has {features.width} features, too many for their covariance"
            raise UserError("features", section.network, problem, "choose a network with fewer features")
        return features


@contextmanager
def _named(fields: Mapping[str, str]) -> Iterator[None]:
    """Replace the fields of messages by those that the user wrote."""
    try:
        yield
    except UserError as error:
        field = fields.get(error.field, error.field)
        raise UserError(field, error.value, error.problem, error.remedy, error.detail) from error.__cause__


def _find(section: FeatureNetwork, data: Data) -> Callable[[Path], Features]:
    """Find the files of a network, and return a function that builds it, given the directory of the cache."""
    name = section.resolved(data.kind)
    if name == "digits" and data.kind not in DIGITS:
        raise UserError("features", name, "needs data.kind=digits", "choose inception", f"data.kind is {data.kind}")
    if name == "digits":
        return lambda cache: _digits(data.resolution, cache)
    if name == "inception":
        inception = importlib.import_module("bigsgan.metrics.inception")  # and torchvision, which takes seconds
        path = find_weights(section.weights, inception.NAMES, inception.URL, inception.DIGEST)
        return lambda _: _inception(inception, path, section.resizer)
    if name.startswith("torchvision:"):
        published, path = _published(name.partition(":")[2], section.weights)
        return lambda _: _torchvision(name.partition(":")[2], published, path)
    path = Path(name).expanduser()
    if not path.is_file():
        remedy = "give inception, digits, torchvision:NAME or the path of a TorchScript file"
        raise UserError("features", str(path), "must be a feature network or a file", remedy)
    return lambda _: _torchscript(path)


def _digits(size: Size, cache: Path) -> Features:
    """The digits classifier, trained or read from the cache by rank 0: its outputs must be the same on all ranks."""
    network = cached_classifier(size, cache) if comm.rank() == 0 else DigitClassifier()
    network.load_state_dict(comm.from_rank_zero(network.state_dict()))
    network.eval().requires_grad_(False)

    def look(images: Tensor) -> Seen:
        return Seen(*network(decode(images).mean(dim=1, keepdim=True)))  # grey

    return Features("digits", "none", _hash_of_weights(network), network, look)


def _inception(inception: ModuleType, path: Path, resizer: str) -> Features:
    with torch.device("meta"):  # nothing to initialize
        network = inception.Inception()
    load_weights(network, path)

    def look(images: Tensor) -> Seen:
        return Seen(*network(inception.resized(_coloured(images).float(), resizer)))

    return Features("inception", resizer, _hash_of_weights(network), network, look)


def _published(name: str, weights: str | None) -> tuple[Any, Path]:
    """The published weights of a classifier of torchvision, and their file."""
    models = importlib.import_module("torchvision.models")  # takes seconds
    try:
        known = list(models.get_model_weights(name))
    except (ValueError, KeyError):
        remedy = "give a classifier such as torchvision:resnet50"
        raise UserError("features", f"torchvision:{name}", "must be a network of torchvision", remedy) from None
    given = Path(weights or "").name
    published = next((each for each in known if each.url.endswith(f"/{given}")), known[0])
    file = published.url.rpartition("/")[2]  # such as resnet50-0676ba61.pth
    digest = file.rpartition("-")[2].partition(".")[0]
    return published, find_weights(weights, [file], published.url, digest)


def _torchvision(name: str, published: Any, path: Path) -> Features:
    """A classifier of torchvision; its features are the inputs of its last linear layer."""
    models, field = importlib.import_module("torchvision.models"), f"torchvision:{name}"
    with torch.device("meta"):
        # For published weights, the builders of these two add this option themselves.
        options = {"transform_input": True} if name.lower() in ("inception_v3", "googlenet") else {}
        network = models.get_model(name, weights=None, **options)
    load_weights(network, path)
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError("features", field, "has no linear layer, whose inputs are the features", "choose another")
    transform = published.transforms()

    def look(images: Tensor) -> Seen:
        seen: list[Tensor] = []
        with linear[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            logits = network(transform(_coloured(images).float() / 255))
        return Seen(seen[-1].flatten(1), logits)

    return Features(field, "torchvision", _hash_of_weights(network), network, look)


def _torchscript(path: Path) -> Features:
    """A TorchScript file that takes images (n, 3, H, W), 0 to 255, and returns features, or features and logits.

    The files of the StyleGAN papers' metrics take ``return_features``, ``no_output_bias`` and ``return_lpips``.
    """
    network = load_program(path, "features", torch.device("cpu"))
    takes = {argument.name for argument in network.forward.schema.arguments}
    for_features: dict[str, Any] = {"return_features": True} if "return_features" in takes else {}

    def look(images: Tensor) -> Seen:
        images = _coloured(images)
        with naming_program(path, "features", f"images {tuple(images.shape)}", "give a program of images alone"):
            found = network(images, **for_features)
        if isinstance(found, tuple):
            return Seen(found[0].flatten(1), found[1])
        logits = None
        if "no_output_bias" in takes:  # such files end in a softmax
            logits = network(_coloured(images), no_output_bias=True).float().clamp(min=1e-30).log()
        return Seen(found.flatten(1), logits)

    def look_for_paths(images: Tensor) -> Tensor:
        return network(_coloured(images), resize_images=False, return_lpips=True)

    for_paths = look_for_paths if {"resize_images", "return_lpips"} <= takes else None
    return Features(str(path), "its own", checksum(path)[:DIGITS_OF_HASH], network, look, for_paths)


def _coloured(images: Tensor) -> Tensor:
    return images.expand(-1, 3, -1, -1)


def _hash_of_weights(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:DIGITS_OF_HASH]
