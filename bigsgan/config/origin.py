"""The source of `bigsgan data prepare` and `encode`: its kind, and the keys of a recipe with which it is read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from bigsgan import plugins
from bigsgan.config.data import Data
from bigsgan.config.from_data import AUTO
from bigsgan.config.messages import explain
from bigsgan.config.sections import Section
from bigsgan.config.yaml_file import apply_overrides
from bigsgan.errors import UserError, shown
from bigsgan.images.size import Fitting

OPTIONS = {
    "data.root": "SRC",
    "data.kind": "--kind",
    "data.resolution": "--resolution",
    "data.fit": "--fit",
    "data.truncated": "--truncated",
    "data.max_ignored": "--max-ignored",
}
"""The arguments and options that stand for keys of a recipe."""

_KEYS_OF_LABELS = ("num_classes", "condition_size", "multi_label", "missing_labels")
_KEYS = ("arguments", "dataset", "image_key", "input_root", "input_side", "label_key", "labels_file", "range", "split")
_KEYS_OF_CODE = ("image_channels", "root")
"""Keys that only code of the user's own reads here, whose name may be SRC; with ``range``, files have channels too."""

_UNPREPARED = {
    "digits": "give files: the digits need no preparation",
    "synthetic": "give files: noise needs no preparation",
    "synthetic_pairs": "give files: drawings need no preparation",
    "unpaired_digits": "give files: the digits need no preparation",
    "latents": "give the images of which latents are made",
    "unpaired_folders": "prepare each of the two folders by its own command, with --kind folder",
}

STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
"""What ``save_to_disk`` of Hugging Face's `datasets` writes beside one split, and beside several."""
PARQUET = ".parquet"
COMPRESSED = re.compile(r"(.*)\.(?:tar\.(?:gz|bz2|xz|zst|lz4|Z)|tgz|tbz2?|txz|tzst)")
"""Names of compressed shards."""

_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
"""Suffixes by which a directory of images is told from one of shards."""

_MAGIC = {b"\x89HDF": "hdf5", b"PAR1": "huggingface"}
"""How files begin."""


class Origin(NamedTuple):
    """A source of images."""

    data: Data  # the section of a recipe that reads it
    keys: Mapping[str, Any] = {}  # that were given, besides the root

    @property
    def plan(self) -> dict[str, Any]:
        """What all parts of a conversion must share, besides the size of images."""
        kind = {} if self.data.kind in ("folder", "zip", "tar") else {"kind": self.data.kind}
        keys = {**self.keys, **kind}
        return ({"truncated": "accept"} if self.data.accepts_truncated else {}) | ({"keys": keys} if keys else {})

    @property
    def keys_of_vectors(self) -> dict[str, Any]:
        """The keys of a recipe that reads labels which are vectors; none where they are classes."""
        keys = self.data.changed("", _KEYS_OF_LABELS) if self.data.has_vectors else []
        values = {key: getattr(self.data, key) for key in keys}
        return {key: value if isinstance(value, str) else shown(value) for key, value in values.items()}


class _Given(Section):
    data: Data


def find_origin(source: Path, fitting: Fitting, given: Mapping[str, Any], overrides: Sequence[str] = ()) -> Origin:
    """Return the source that SRC names, of the kind that is given or else by what it is.

    Args:
        source: A file, a directory, or the name of code of the user's own.
        fitting: What makes images fit.
        given: The values of options by keys of the section ``data``; None where an option is left out.
        overrides: Further keys, such as ``data.split=train``.

    Raises:
        UserError: A key or a value is invalid, or data of this kind cannot be prepared.
    """
    tree: dict[str, Any] = {}
    apply_overrides(tree, list(overrides))
    keys = tree.pop("data", {})
    if tree or not isinstance(keys, dict):
        remedy = "give keys of the section data, such as data.split=train"
        raise UserError(next(iter(tree), "data"), None, "is no key with which images are read", remedy)
    given = {key: value for key, value in given.items() if value is not None}
    is_code = "kind" not in given and plugins.is_name(str(source)) and not os.path.exists(source)
    kind = str(source) if is_code else given.get("kind") or _detected(source)
    if kind in _UNPREPARED:
        raise UserError("--kind", kind, "cannot be prepared", _UNPREPARED[kind])
    if keys.get("num_classes") == AUTO:
        del keys["num_classes"]  # without it, classes are those of the source
    _check_keys(keys, plugins.is_name(kind), is_code)
    section = {"num_classes": 0, "image_channels": 3, "resolution": fitting.size.value, **keys, **given, "kind": kind}
    if "labels_file" in keys and not any(key in keys for key in _KEYS_OF_LABELS):
        section["num_classes"] = AUTO
    section |= {} if is_code else {"root": str(source)}
    section |= {} if fitting.how == "crop" else {"fit": fitting.how}
    plugins.give(section)
    try:
        data = _Given.model_validate({"data": section}).data
    except (ValidationError, UserError) as error:
        told = error if isinstance(error, UserError) else explain(error, _Given)
        raise by_option(told) from None
    if "range" in data.left_to_data:
        remedy = "give the values of black and of white; `bigsgan train --dry-run` tells those of the data"
        raise UserError("data.range", keys["range"], "must be two numbers here", remedy)
    if data.conditions_are_tokens:
        remedy = "remove it; `bigsgan data encode --text-encoder` makes tokens of captions"
        raise UserError("data.condition_size", data.condition_size, "must be one number here", remedy)
    return Origin(data, keys)


def by_option(error: UserError) -> UserError:
    """Return an error with the option in place of the key that it stands for."""
    return UserError(OPTIONS.get(error.field, error.field), error.value, error.problem, error.remedy, error.detail)


def _check_keys(keys: Mapping[str, Any], is_outside: bool, is_code: bool) -> None:
    needing = [key for key in ("missing_labels", "multi_label") if key in keys]
    if needing and not any(key in keys for key in ("num_classes", "condition_size")):
        remedy = "give the number of classes, or data.condition_size of other labels"
        raise UserError("data.num_classes", None, f"must be given with data.{needing[0]}", remedy)
    for key in keys:
        field = f"data.{key}"
        if field in OPTIONS and not (key == "root" and is_code):
            raise UserError(field, None, f"must be given by {OPTIONS[field]}", "remove it")
        if (
            key not in (*_KEYS, *_KEYS_OF_LABELS)
            and not (key in _KEYS_OF_CODE and is_outside)
            and not (key == "image_channels" and "range" in keys)
            and key in Data.model_fields
        ):
            if key == "pairs":
                raise UserError(field, None, "cannot be prepared of code of your own", "write the pairs as files")
            raise UserError(field, None, "does not change what is made of images", "remove it, and set it in recipes")


def is_shard(name: str, streams: bool = False) -> bool:
    """Return whether a file counts as a shard, by its name; with ``streams``, a compressed one too."""
    return (name.endswith(".tar") or (streams and bool(COMPRESSED.fullmatch(name)))) and not name.startswith(".")


def _detected(source: Path) -> str:
    """Return the kind of a source, by names and by how a file begins; its reader tells what is wrong with it."""
    try:
        if os.path.isfile(source):
            if is_shard(source.name, streams=True):
                return "tar"
            with open(source, "rb") as file:
                return _MAGIC.get(file.read(4), "zip")
        names = set(os.listdir(source))
        if {STATE_FILE, "dataset_info.json"} <= names or SPLITS_FILE in names:
            return "huggingface"
        below = [os.listdir(source / name) for name in sorted(names) if os.path.isdir(source / name)]
    except OSError:
        return "folder"
    inner = [name for each in below for name in sorted(each)]
    is_packed = [any(is_shard(name, streams=True) for name in names)]
    is_packed.append(any(name.endswith(PARQUET) for name in [*names, *inner]))  # in folders of a repository of the Hub
    if not any(is_packed):
        return "folder"
    if image := next((name for name in (*sorted(names), *inner) if name.lower().endswith(_IMAGES)), None):
        problem = f"has {'shards' if is_packed[0] else 'parquet files'} beside images such as {image}"
        remedy = f"give --kind folder, or --kind {'tar' if is_packed[0] else 'huggingface'}"
        raise UserError("SRC", str(source), problem, remedy)
    return "tar" if is_packed[0] else "huggingface"
