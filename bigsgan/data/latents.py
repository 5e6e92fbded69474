"""Data sets of latents that an autoencoder has made before, in .npy files with their classes.

Three layouts are in use: separate files and dataset.json (REPA, GAT), a zip file of the same (EDM2), and tar shards
(WebDataset), which `bigsgan data encode` writes.

Shapes: N latents in a data set, C channels, H x W numbers.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.config.origin import is_shard
from bigsgan.data.autoencoders import identity
from bigsgan.data.datasets import ImageDataset, Label, LooseFiles
from bigsgan.data.fingerprint import Fingerprint
from bigsgan.data.labels import Listing, labels_of, left_out, names_of_classes, read_listing, unlisted
from bigsgan.data.listing import LABELS_FILE, Files, data_directory, files_below, wrong_num_classes
from bigsgan.data.packed import PackedFiles, zip_content, zip_files, zip_listing, zip_member, zip_members
from bigsgan.data.shards import ABOUT_FILE, names_beside, read_shards, tar_content
from bigsgan.errors import UserError, reason
from bigsgan.images.npz import array_of
from bigsgan.images.reading import CorruptImage, image_tensor, open_image
from bigsgan.runtime.paths import check_regular, parse_json, read_text

_SUFFIX = ".npy"
_MOST_BYTES = 1 << 26  # of that file, which has a checksum for each shard


class PackedLatents(PackedFiles):
    """Latents in tar shards, some of them with their images."""

    def image(self, index: int) -> bytes:
        """Return the file of the image from which latents were made; empty if it was not kept.

        Raises:
            CorruptImage: The image cannot be read.
        """
        entry = self._entries[index]
        try:
            return self._files.read(int(entry["archive"]), int(entry["image_offset"]), int(entry["image_size"]))
        except (OSError, EOFError) as error:
            raise CorruptImage(self.path(index), f"its image cannot be read: {reason(error)}") from None

    def without_image(self) -> str | None:
        """Return the path of the first latents whose image was not kept, or None."""
        missing = np.flatnonzero(self._entries["image_size"] == 0)
        return self.path(int(missing[0])) if len(missing) else None


class LatentFiles(ImageDataset):
    """Latents (C, H, W) float32, or a posterior (2 * C, H, W): the mean and the standard deviation of each number."""

    in_memory = False

    def __init__(self, files: LooseFiles | PackedFiles, data: Data) -> None:
        """Take the files.

        Raises:
            UserError: The recipe's autoencoder cannot be read.
        """
        self._files, self._codec = files, identity(data.codec)
        self._shapes = tuple((times * data.channels, *data.network_size) for times in (1, 2))
        self._fitting, self._image_channels = data.fitting, data.image_channels

    def __len__(self) -> int:
        return len(self._files)

    @property
    def labels(self) -> np.ndarray | None:
        """The labels of the latents; None of tokens."""
        return self._files.labels

    def __getitem__(self, index: int) -> tuple[Tensor, Label]:
        path = self._files.path(index)
        latents = torch.from_numpy(_array(self._files.read(index), path, self._shapes))
        if not torch.isfinite(latents).all():
            raise CorruptImage(path, "it has numbers that are not finite")
        if len(latents) == self._shapes[0][0]:  # give all latents one shape, as some may be posteriors
            latents = torch.cat([latents, torch.zeros_like(latents)])
        return latents, self._files.label(index)

    def image(self, index: int) -> Tensor | None:
        """Return the image from which latents were made, uint8 (C, H, W), or None if the data does not hold it.

        Raises:
            CorruptImage: The image cannot be read.
        """
        content = self._files.image(index) if isinstance(self._files, PackedLatents) else b""
        if not content:
            return None
        path = self._files.path(index)
        return image_tensor(open_image(path, io.BytesIO(content)), path, self._fitting, self._image_channels)

    def without_image(self) -> str | None:
        """Return the path of the first latents without an image; None if all have one."""
        return self._files.without_image() if isinstance(self._files, PackedLatents) else self._files.path(0)

    def fingerprint(self) -> Fingerprint:
        """Return digests of the listing, and the identity of the autoencoder that decodes the latents."""
        return self._files.fingerprint()._replace(codec=self._codec.weights, scaling=self._codec.scaling)


def _array(content: bytes, path: str, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Read a .npy file as float32 of one of these shapes."""
    try:
        found = array_of(content)
    except ValueError as error:
        raise CorruptImage(path, str(error)) from None
    shape = found.shape
    if (shape[1:] if len(shape) == 4 and shape[0] == 1 else shape) not in shapes:
        raise CorruptImage(path, f"it has the shape {shape}, not {shapes[0]} or {shapes[1]}")
    return found.reshape(shape[-3:]).astype(np.float32)


def check_images(dataset: ImageDataset, data: Data) -> None:
    """Refuse latents without their images, which a teacher sees.

    Raises:
        UserError: Some latents have no image.
    """
    if isinstance(dataset, LatentFiles) and (path := dataset.without_image()):
        remedy = "encode them with --keep-images, or remove objective.teacher"
        problem, detail = "has latents without their images", f"a teacher sees them; {path}"
        raise UserError("data.root", data.root, problem, remedy, detail)


def build_latents(data: Data) -> LatentFiles:
    """List the latents of ``data.root``: a directory with dataset.json or with tar shards, or a zip file.

    They are in the order of their names; in shards, in the order of the shards.

    Raises:
        UserError: The data does not exist or has another form, has classes beyond ``data.num_classes``, or was made by
            another autoencoder than the recipe's; or the latter cannot be read or lacks its weights.
    """
    if os.path.isfile(str(data.root)) and not data.conditions_are_tokens:
        return _named(data, *_packed(data))
    remedy = f"give the directory with the .npy files and {LABELS_FILE}, or with tar shards, or a zip file"
    remedy = "give the directory with tar shards" if data.conditions_are_tokens else remedy
    root = data_directory("data.root", data.root, remedy)
    try:
        names = os.listdir(root)
    except OSError as error:
        raise UserError("data.root", data.root, f"cannot be read: {reason(error, root)}", remedy) from None
    if data.conditions_are_tokens and (LABELS_FILE in names or not any(map(is_shard, names))):
        problem, remedy = f"must have shards with data.condition_size={data.condition_size}", "encode the images again"
        detail = f"it has {LABELS_FILE}" if LABELS_FILE in names else ""
        raise UserError("data.root", data.root, problem, f"{remedy} with their captions", detail)
    if LABELS_FILE not in names and any(map(is_shard, names)):
        return _named(data, _sharded(data, root), names_beside(root))
    try:
        check_regular(root / LABELS_FILE)
        listing = read_listing(data, (root / LABELS_FILE).read_bytes())
        # A listing is not compared with the files, as it takes long to look for a million of them.
        files = files_below(root) if listing.labels is None else Files([], [], [])
    except OSError as error:
        raise unlisted(data, error) from None
    names, labels, classes = _listed(data, listing, files)
    return _named(data, LooseFiles(root, names, labels), classes)


def _named(data: Data, files: LooseFiles | PackedFiles, classes: list[str]) -> LatentFiles:
    made = LatentFiles(files, data)
    made.class_names = classes
    return made


def _packed(data: Data) -> tuple[PackedFiles, list[str]]:
    members = zip_members(data)
    if LABELS_FILE not in members:
        raise unlisted(data, KeyError(f"there is no item named {LABELS_FILE} in the archive"))
    listing, files = read_listing(data, zip_member(data, members[LABELS_FILE])), zip_listing(data, members)
    names, labels, classes = _listed(data, listing, files)
    if missing := [name for name in names if name not in members]:
        problem = f"has no {missing[0]}, which its {LABELS_FILE} lists"
        raise UserError("data.root", data.root, problem, "pack it again")
    return PackedFiles(*zip_files(data, members, names, labels), zip_content), classes


def _sharded(data: Data, root: Path) -> PackedLatents:
    found = read_shards(data)
    if not data.has_vectors:
        _check_num_classes(data, int(found.entries["label"].max()) + 1, "classes")
    _check_codec(data, root / ABOUT_FILE)
    return PackedLatents(found.archives, found.names, found.entries, tar_content, data)


def _check_codec(data: Data, path: Path) -> None:
    """Refuse another codec than the one that made the shards, if a file beside them names it."""
    if not os.path.isfile(path):
        return
    try:
        about = dict(parse_json(read_text(path, _MOST_BYTES))["codec"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"has a damaged {ABOUT_FILE}: {reason(error)}"
        raise UserError("data.root", data.root, problem, "encode the images again, or remove that file") from None
    for key in ("kind", "block"):
        given = getattr(data.codec, key)
        if about.get(key, given) != given:
            problem = f"must be {about[key]} with these latents"
            raise UserError(f"data.codec.{key}", given, problem, f"set data.codec.{key}={about[key]}")
    weights = identity(data.codec).weights
    if about.get("weights", weights) != weights:
        problem = f"is another autoencoder than that which made the latents in {data.root}"
        detail = f"their {ABOUT_FILE} has other digests"
        raise UserError("data.codec.path", data.codec.path, problem, "give the one that encoded them", detail)


def _listed(data: Data, listing: Listing, files: Files) -> tuple[list[str], np.ndarray, list[str]]:
    """Return names and labels from dataset.json, and names of classes; of ``files``, all latents if it lists none."""
    listed = listing.labels
    names = sorted(listed if listed is not None else (name for name in files.others if name.endswith(_SUFFIX)))
    if not names:
        raise UserError("data.root", data.root, f"has no latents in {LABELS_FILE}", "encode some images")
    if outside := [name for name in names if os.path.isabs(name) or ".." in name.split("/")]:
        problem = f"has {outside[0]} in its {LABELS_FILE}, which is no name of a file below it"
        raise UserError("data.root", data.root, problem, "give the names of files in the data set")
    labels = labels_of(data, names, listed if data.condition_width else None)
    if not data.has_vectors:
        _check_num_classes(data, int(labels.max()) + 1, f"classes in {LABELS_FILE}")
    classes = names_of_classes(data, listing, labels) if data.num_classes else []
    if classes and len(classes) != data.num_classes:
        raise wrong_num_classes(data, len(classes), f"classes in {LABELS_FILE}")
    others = left_out(files, names)
    others.check("data.root", data.root, len(names), data.max_ignored, f"list them in {LABELS_FILE}")
    others.tell(data.root)
    return names, labels, classes


def _check_num_classes(data: Data, found: int, what: str) -> None:
    """Refuse more classes than the recipe has; a part of a data set may lack the last classes."""
    if data.num_classes and found > data.num_classes:
        raise wrong_num_classes(data, found, what)
