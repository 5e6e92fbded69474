"""Images in tar shards, in WebDataset's layout, and their cached index.

A tar archive has no directory: all of its headers have to be read to find the images, which takes 0.13 ms per image on
one core. A run that has begun caches the result in a file beside the shards, so that the headers of unchanged shards
are read once.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import socket
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from bigsgan.config.data import Data
from bigsgan.data.listing import (
    LINKED,
    Ignored,
    data_directory,
    ignored,
    image_suffixes,
    is_hidden,
    no_images,
    rarer_twins,
    some_names,
    unreadable_root,
    wrong_num_classes,
)
from bigsgan.data.packed import OpenFiles, PackedImages, check_member, damaged
from bigsgan.errors import UserError, reason
from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import check_regular, parse_json, read_text

ABOUT_FILE = "codec.json"
"""File in which `bigsgan data encode` describes the shards beside it."""

_READERS = 16  # threads that read the headers of shards; mostly they wait for the file system

# WebDataset: the file name up to its first dot is the sample's key, the rest is the field.
_KEY_AND_FIELD = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_CLASS_NUMBER = re.compile(rb"\s*([0-9]{1,9})\s*")
_TAR_BLOCK = 512
_COMPRESSED = re.compile(r"(.*)\.(?:tar\.(?:gz|bz2|xz|zst|lz4|Z)|tgz|tbz2?|txz|tzst)")
_TOOLS = {
    **dict.fromkeys(("gz", "tgz", "Z"), "gunzip"), **dict.fromkeys(("bz2", "tbz", "tbz2"), "bunzip2"),
    **dict.fromkeys(("xz", "txz"), "unxz"), **dict.fromkeys(("zst", "tzst"), "unzstd"), "lz4": "unlz4",
}  # fmt: skip
"""What decompresses files, by the end of their names."""

_NO_CLASS = -1
_RENAMING = "rename the files: a key ends at the first dot of a name, and the rest must be the suffix alone"
_FOLLOWING = "pack the files that links stand for (tar --dereference --hard-dereference), as links are not read"

_PLACE = np.dtype([("offset", "i8"), ("size", "i8"), ("label", "i8")])
_LATENTS_PLACE = np.dtype([*_PLACE.descr, ("image_offset", "i8"), ("image_size", "i8")])
"""Place of latents, and of the image with the same key; without an image, its size is 0."""

_State: TypeAlias = tuple[str, int, int]
"""Name, size and time of a shard, which change when it is written again."""

_FORMAT = 3
"""Version of the cached index."""

_unsaved: dict[Path, dict[str, np.ndarray]] = {}
"""Indices by their files, which wait for the run to begin."""

_log = logging.getLogger(__name__)


class _Shard(NamedTuple):
    """Names and offsets of a shard's images or latents, in its order."""

    names: list[str]
    places: np.ndarray  # (number of images,), of type _PLACE, or _LATENTS_PLACE; without a class, it is _NO_CLASS
    others: Ignored


CLASSES_FILE = "classes.json"
"""File beside shards with a list of the names of their classes."""

_MOST_BYTES = 1 << 26


class Shards(NamedTuple):
    """The images, or latents, in a directory of shards, in the order of the shards."""

    archives: list[str]
    names: list[str]
    entries: np.ndarray  # (number of images,), for ``tar_content``
    others: Ignored
    num_unlabelled: int  # images that have no class, though others have one; theirs is 0


def build_tar(data: Data) -> PackedImages:
    """Open the shards ``*.tar`` in the directory ``data.root``, in WebDataset's layout: ``<key>.png``, ``<key>.cls``.

    Images are in the order of the shards' names, and within a shard in its order. An image without a class has class 0.

    Raises:
        UserError: There are no shards, one is damaged, none has images, or they have another number of classes.
    """
    found = read_shards(data)
    if not found.names:
        raise no_images(data, "a directory with shards (*.tar) of files", found.others)
    check_shards(data, found)
    num_classes = int(found.entries["label"].max()) + 1
    if data.num_classes and num_classes != data.num_classes:
        raise wrong_num_classes(data, num_classes, "classes")
    return PackedImages(
        found.archives, found.names, found.entries, tar_content, names_beside(Path(str(data.root))), data
    )


def names_beside(root: Path) -> list[str]:
    """Return the names of classes that ``bigsgan data`` has written beside shards; none if there are no such names.

    Raises:
        UserError: The file with them is damaged, or cannot be read.
    """
    try:
        found = parse_json(read_text(root / CLASSES_FILE, _MOST_BYTES))
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise ValueError("it is no list of names")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        problem = f"has a {CLASSES_FILE} that cannot be read: {reason(error)}"
        raise UserError("data.root", str(root), problem, "write a list of the classes' names, or remove it") from None
    return found


def check_shards(data: Data, found: Shards, field: str = "data.root") -> None:
    """Warn of ignored files, and of images without classes.

    Raises:
        UserError: Most of the data set would be ignored, or the recipe has classes, and no image has one.
    """
    num = len(found.names)
    num_links = sum(count for kind, count in found.others.kinds.items() if kind.startswith(LINKED))
    causes = [_FOLLOWING] * (num_links > 0) + [_RENAMING] * (num_links < found.others.num_lost)
    found.others.check(field, data.root, num, data.max_ignored, "; ".join(causes))
    found.others.tell(data.root)
    if data.num_classes > 1 and found.num_unlabelled == num:
        problem, detail = "has no classes", f"no image has a file <key>.cls beside it; {found.others.text()}"
        remedy = "write the number of each image's class into <key>.cls, or set data.num_classes=0"
        raise UserError("data.root", data.root, problem, remedy, detail.removesuffix("; "))
    if data.num_classes and 0 < found.num_unlabelled < num:
        _log.warning("%s: %d of %d images have no <key>.cls; their class is 0", data.root, found.num_unlabelled, num)


def read_shards(data: Data) -> Shards:
    """Read the headers of the shards in ``data.root``, or their cached index.

    Raises:
        UserError: There are no shards, some are compressed, or one is damaged.
    """
    root = data_directory("data.root", data.root, "give the directory with the shards (*.tar)")
    try:
        visible = sorted(path for path in root.iterdir() if not path.name.startswith("."))
        paths = [path for path in visible if is_shard(path.name)]
        if packed := [path.name for path in visible if _is_compressed(path)]:
            problem = f"has compressed shards{some_names(packed)}"
            detail = "images in them cannot be read in any order"
            tools = ", ".join(sorted({tool for name in packed for end, tool in _TOOLS.items() if name.endswith(end)}))
            raise UserError("data.root", data.root, problem, f"decompress them to *.tar ({tools})", detail)
        files = [path.name for path in visible if not is_shard(path.name) and path.is_file()]
        others = ignored(
            [name for name in files if name != CLASSES_FILE and (data.kind != "latents" or name != ABOUT_FILE)],
            map(str, paths),
        )
        shards = _index(data, root, paths)
    except OSError as error:
        raise unreadable_root(data, error) from error
    if not paths:
        remedy = "give the directory with the shards"
        raise UserError("data.root", data.root, "contains no shards (*.tar)", remedy)
    names = [name for shard in shards for name in shard.names]
    place = _place(data)
    entries = np.empty(len(names), dtype=[("archive", "i4"), *place.descr])
    entries["archive"] = np.repeat(np.arange(len(shards)), [len(shard.names) for shard in shards])
    for field in place.names or ():
        entries[field] = np.concatenate([shard.places[field] for shard in shards])
    unlabelled = entries["label"] == _NO_CLASS
    entries["label"][unlabelled] = 0
    others = sum((shard.others for shard in shards), others)
    return Shards([str(path) for path in paths], names, entries, others, int(unlabelled.sum()))


def _is_compressed(path: Path) -> bool:
    """Return whether a file is a compressed shard, and not beside its decompressed one."""
    found = _COMPRESSED.fullmatch(path.name)
    return found is not None and not path.with_name(f"{found[1]}.tar").exists()


def is_shard(name: str) -> bool:
    """Return whether a file counts as a shard, by its name."""
    return name.endswith(".tar") and not name.startswith(".")


def _place(data: Data) -> np.dtype:
    return _LATENTS_PLACE if data.kind == "latents" else _PLACE


def _index(data: Data, root: Path, paths: list[Path]) -> list[_Shard]:
    """Return the content of each shard: from the cached index, or from its headers.

    Raises:
        UserError: A shard is damaged.
        OSError: A shard cannot be read.
    """
    what = "-latents" if data.kind == "latents" else ""
    index = root / f".bigsgan-index{what}-{'classes' if data.num_classes else 'plain'}.npz"  # "plain" has no classes
    states = [_state(path) for path in paths]
    known = _read_index(index, _place(data))
    left = [(state, path) for state, path in zip(states, paths, strict=True) if state not in known]
    if left:
        start = time.perf_counter()
        with ThreadPoolExecutor(_READERS) as threads:
            read = threads.map(partial(_read_headers, data), [path for _, path in left])
            known.update(zip((state for state, _ in left), read, strict=True))
        _log.info("read the headers of %d shards in %.1f s", len(left), time.perf_counter() - start)
        _unsaved[index] = _packed_index({state: known[state] for state in states})
    return [known[state] for state in states]


def _state(path: Path) -> _State:
    check_regular(path)
    found = path.stat()
    return path.name, found.st_size, found.st_mtime_ns


def _read_index(index: Path, place: np.dtype) -> dict[_State, _Shard]:
    """Read a cached index; a missing or damaged one is empty."""
    try:
        check_regular(index)
        with np.load(index, allow_pickle=False) as file:
            about = json.loads(file["about"].tobytes())
            names = file["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
            places = file["places"]
        states = [(name, size, mtime) for name, size, mtime in about["states"]]
        ends = np.cumsum(about["numbers"])
        if about["format"] != _FORMAT or places.dtype != place or not len(names) == len(places) == ends[-1]:
            return {}
        starts = ends - about["numbers"]
        each = zip(states, starts, ends, strict=True)
        others = dict(zip(states, itertools.starmap(Ignored, about["others"]), strict=True))
        return {state: _Shard(names[start:end], places[start:end], others[state]) for state, start, end in each}
    except FileNotFoundError:
        return {}
    except Exception as error:  # BadZipFile, ValueError, KeyError, ...: a damaged file raises all kinds of errors
        _log.info("%s is damaged and will be replaced: %s", index, reason(error))
        return {}


def _packed_index(shards: dict[_State, _Shard]) -> dict[str, np.ndarray]:
    about = {
        "format": _FORMAT,
        "states": list(shards),
        "numbers": [len(shard.names) for shard in shards.values()],
        "others": [shard.others for shard in shards.values()],
    }
    names = "".join(f"{name}\0" for shard in shards.values() for name in shard.names)
    return {
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
        "names": np.frombuffer(names.encode("utf-8", "surrogateescape"), np.uint8),
        "places": np.concatenate([shard.places for shard in shards.values()]),
    }


def keep_indices() -> None:
    """Write the indices of the shards that were read, if their directories are writable.

    A start that is refused writes nothing, so this is called when a run has begun. Each rank first writes its own file,
    then renames it.
    """
    while _unsaved:
        index, arrays = _unsaved.popitem()
        mine = index.with_name(f"{index.name}.{socket.gethostname()}-{os.getpid()}")
        try:
            with replacing(mine) as unfinished, open(unfinished, "wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            os.replace(mine, index)
        except OSError as error:
            _log.info("the index of the shards cannot be written: %s", reason(error))


def _read_headers(data: Data, path: Path) -> _Shard:
    found: list[tuple[str, str, int, int]] = []  # key, name, offset, size
    classes: dict[str, int] = {}
    beside: dict[str, tuple[int, int]] = {}  # images beside latents: offset, size
    others: list[str] = []
    links: list[str] = []
    latents = data.kind == "latents"
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                parts = _KEY_AND_FIELD.fullmatch(member.name)
                key, field = (parts[1], parts[2].lower()) if parts else (member.name, "")
                is_image, is_array = f".{field}" in image_suffixes(), f".{field}".endswith(".npy")
                if member.isreg() and (is_image or (is_array and latents)):
                    check_member(data, f"{member.name} in {path.name}", member.size)
                    if is_image and latents:
                        beside[key] = member.offset_data, member.size
                    else:
                        found.append((key, member.name, member.offset_data, member.size))
                elif member.isreg() and field == "cls":
                    classes[key] = _class_number(archive, member, data) if data.num_classes else 0
                elif not member.isdir() and not is_hidden(member.name):
                    (links if member.issym() or member.islnk() else others).append(member.name)
            _check_end(path, archive.offset)
    except UserError:
        raise
    except OSError as error:
        raise unreadable_root(data, error) from error
    except Exception as error:  # TarError, EOFError, ValueError, ...: tarfile raises all kinds for damaged headers
        raise damaged(data, f"has a damaged shard, {path.name}", error) from error
    if twins := rarer_twins([name for _, name, *_ in found], lambda name: name.rpartition(".")[0]):
        found, others = [each for each in found if each[1] not in twins], [*others, *sorted(twins)]
    more = [beside.get(key, (0, 0)) if latents else () for key, *_ in found]
    places = [
        (*place, classes.get(key, _NO_CLASS), *other) for (key, _, *place), other in zip(found, more, strict=True)
    ]
    names = [name for _, name, *_ in found]
    left = ignored(others, names) + ignored(links, names, LINKED)
    return _Shard(names, np.array(places, dtype=_place(data)), left)


def _class_number(archive: tarfile.TarFile, member: tarfile.TarInfo, data: Data) -> int:
    file = archive.extractfile(member)
    found = _CLASS_NUMBER.fullmatch(file.read(_TAR_BLOCK)) if file else None
    if found is None:
        problem = f"has no class number in {member.name} of {os.fsdecode(archive.name or b'')}"
        raise UserError("data.root", data.root, problem, "pack it again, or set data.num_classes=0")
    return int(found[1])


def _check_end(path: Path, offset: int) -> None:
    """Raise EOFError unless the archive ends where reading ended: tarfile takes a damaged header for the end."""
    with path.open("rb") as file:
        file.seek(offset)
        if file.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
            raise EOFError(f"neither a header nor the end of the archive at byte {offset}")


def tar_content(files: OpenFiles, entry: np.void) -> bytes:
    """Return the content of a member of a shard."""
    return files.read(int(entry["archive"]), int(entry["offset"]), int(entry["size"]))
