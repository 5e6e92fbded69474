"""Reads the headers of a tar shard: where its images or latents begin, and their classes.

WebDataset's layout: the name of a file up to its first dot is the key of a sample, the rest is the field.
"""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from bigsgan.config.data import Data
from bigsgan.data.labels import as_vector
from bigsgan.data.listing import LINKED, Ignored, ignored, image_suffixes, is_hidden, rarer_twins, unreadable_root
from bigsgan.data.packed import check_member, damaged, open_archive
from bigsgan.data.tokens import TOKENS
from bigsgan.errors import UserError, shown
from bigsgan.runtime.paths import parse_json

_KEY_AND_FIELD = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_CLASS_NUMBER = re.compile(rb"\s*([0-9]{1,9})\s*")
_TAR_BLOCK = 512
_CLASS_FIELDS = {"cls": _TAR_BLOCK, "json": 1 << 20, "txt": _TAR_BLOCK}
"""Fields that may hold the class, the first one before the others, and their most bytes."""
_MOST_CLASSES = 10**9

NO_CLASS = -1


class Shard(NamedTuple):
    """Names and offsets of a shard's images or latents, in its order."""

    names: list[str]
    places: np.ndarray  # (number of images,), of the type of ``place_of``; without a label, it is NO_CLASS or NaN
    others: Ignored


class _Label(NamedTuple):
    name: str  # of the member
    value: Any  # a class, or the numbers of a vector
    problem: str = ""  # why it is no label


def place_of(data: Data) -> np.dtype:
    """Return the type of a sample's place, also of the image of latents and of tokens with its key, of size 0 if none.

    With tokens, the label is 0 if they are there.
    """
    is_vector = data.has_vectors and not data.conditions_are_tokens
    label = ("label", "f4", (data.condition_width,)) if is_vector else ("label", "i8")
    more = [(f"{what}_{number}", "i8") for what in _beside(data) for number in ("offset", "size")]
    return np.dtype([("offset", "i8"), ("size", "i8"), label, *more])


def _beside(data: Data) -> list[str]:
    """Return what is read beside an image or latents, with the same key."""
    return ["image"] * (data.kind == "latents") + ["tokens"] * data.conditions_are_tokens


def label_key(data: Data) -> str:
    """Return the key of the class number in JSON files."""
    return data.label_key or "label"


def read_headers(data: Data, path: Path) -> Shard:
    """Find the images or latents of a shard.

    A sample's class is the number in ``<key>.cls``; without one, the ``label_key`` of the object in ``<key>.json``;
    without it, ``<key>.txt``, if each of the shard holds a number alone. For vectors, ``<key>.json`` comes first.
    Tokens are in ``<key>.tokens.npy``. Other files, and those that are not used, are ignored.

    Raises:
        UserError: The shard is damaged or cannot be read, or has a class that is no number.
    """
    found: list[tuple[str, str, int, int]] = []  # key, name, offset, size
    labels: dict[str, dict[str, _Label]] = {}  # by key and field
    beside: dict[str, dict[str, tuple[int, int]]] = {what: {} for what in _beside(data)}  # by key: offset, size
    others: list[str] = []
    links: list[str] = []
    latents = data.kind == "latents"
    try:
        with open_archive(str(path)) as file, tarfile.open(path, "r:", fileobj=file) as archive:
            for member in archive:
                parts = _KEY_AND_FIELD.fullmatch(member.name)
                key, field = (parts[1], parts[2].lower()) if parts else (member.name, "")
                is_array = f".{field}".endswith(".npy") and field != TOKENS
                is_image = f".{field}" in image_suffixes() or (field == "npy" and data.range is not None)
                what = "tokens" if field == TOKENS else "image" if is_image else ""
                if member.isreg() and (is_image or (is_array and latents) or what in beside):
                    check_member(data, f"{member.name} in {path.name}", member.size)
                    if what in beside:
                        beside[what][key] = member.offset_data, member.size
                    else:
                        found.append((key, member.name, member.offset_data, member.size))
                elif member.isreg() and (label := _label(archive, member, field, data)) is not None:
                    labels.setdefault(key, {})[field] = label
                elif not member.isdir() and not is_hidden(member.name):
                    (links if member.issym() or member.islnk() else others).append(member.name)
            _check_end(file, archive.offset)
    except UserError:
        raise
    except Exception as error:  # TarError, EOFError, ValueError, ...: tarfile raises all kinds for damaged headers
        if isinstance(error, OSError) and error.errno is not None:  # damaged compressed data have none
            raise unreadable_root(data, error) from error
        raise damaged(data, f"has a damaged shard, {path.name}", error) from error
    if twins := rarer_twins([name for _, name, *_ in found], lambda name: name.rpartition(".")[0]):
        found, others = [each for each in found if each[1] not in twins], [*others, *sorted(twins)]
    if any(name.endswith(".txt") for name in others):  # these are texts, of which one may be a number
        others += [fields.pop("txt").name for fields in labels.values() if "txt" in fields]
    found_labels, unused = _used_labels(labels, {key for key, *_ in found}, data, path)
    if data.conditions_are_tokens:
        found_labels = dict.fromkeys(beside["tokens"], 0)
    missing = np.full(data.condition_width, np.nan) if data.has_vectors and not data.conditions_are_tokens else NO_CLASS
    places = [
        (*place, found_labels.get(key, missing), *(at for each in beside.values() for at in each.get(key, (0, 0))))
        for key, _, *place in found
    ]
    names = [name for _, name, *_ in found]
    left = ignored(others + unused, names) + ignored(links, names, LINKED)
    return Shard(names, np.array(places, dtype=place_of(data)), left)


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo, field: str, data: Data) -> _Label | None:
    """Return the label that a member holds; None if it holds none. Without labels, only .cls counts, unread."""
    if data.conditions_are_tokens or not data.condition_width:
        return _Label(member.name, 0) if field == "cls" else None
    if field not in _CLASS_FIELDS or (field != "cls" and member.size > _CLASS_FIELDS[field]):
        return None
    file = archive.extractfile(member)
    content = file.read(_CLASS_FIELDS[field]) if file else b""
    if field == "json":
        return _label_in_json(member.name, content, data)
    if number := _CLASS_NUMBER.fullmatch(content):
        return _checked(data, member.name, int(number[1]))
    return _Label(member.name, 0, "no class number") if field == "cls" else None


def _checked(data: Data, name: str, value: Any) -> _Label:
    """Return the label, a vector where the recipe has these."""
    if not data.has_vectors:
        return _Label(name, value)
    try:
        return _Label(name, as_vector(data, value))
    except ValueError as error:
        return _Label(name, 0, f"a label that does not fit ({error})")


def _label_in_json(name: str, content: bytes, data: Data) -> _Label | None:
    key = label_key(data)
    try:
        about = parse_json(content)
    except ValueError:
        return None
    if not isinstance(about, dict) or key not in about:
        return None
    label = about[key]
    if data.has_vectors:
        return None if label is None else _checked(data, name, label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < _MOST_CLASSES:
        return _Label(name, label)
    return _Label(name, 0, f"{shown(label)} as {key!r}, which is not the number of a class,")


def _used_labels(
    labels: dict[str, dict[str, _Label]], keys: set[str], data: Data, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return the label of each key that has one, and the names of the members that are not used.

    Raises:
        UserError: What comes first is no label.
    """
    values, unused = dict[str, Any](), list[str]()
    order = sorted(_CLASS_FIELDS, key=lambda field: field != "json") if data.has_vectors else list(_CLASS_FIELDS)
    for key, fields in labels.items():
        given = [fields[field] for field in order if field in fields]
        used = given[:1] if key in keys else []
        first = used[0].name if used else None
        unused += [label.name for field, label in fields.items() if label.name != first and (field != "cls" or first)]
        for label in used:
            if label.problem:
                problem = f"has {label.problem} in {label.name} of {os.fspath(path)}"
                remedy = "pack it again, or set data.num_classes=0"
                if label.name.endswith(".json"):
                    remedy = "give the key of the class numbers (data.label_key), or set data.num_classes=0"
                raise UserError("data.root", data.root, problem, remedy)
            values[key] = label.value
    return values, unused


def _check_end(file: IO[bytes], offset: int) -> None:
    """Raise EOFError unless the archive ends where reading ended: tarfile takes a damaged header for the end."""
    file.seek(offset)
    if file.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
        raise EOFError(f"neither a header nor the end of the archive at byte {offset}")
