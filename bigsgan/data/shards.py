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
import socket
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from bigsgan.config.class_names import are_own_numbers
from bigsgan.config.data import Data
from bigsgan.config.origin import COMPRESSED, is_shard
from bigsgan.data.listing import (
    CONVERTING,
    LABELS_FILE,
    LINKED,
    Ignored,
    data_directory,
    ignored,
    image_suffixes,
    is_image,
    may_be_image,
    no_images,
    some_names,
    unreadable_root,
    wrong_num_classes,
)
from bigsgan.data.packed import OpenFiles, PackedImages, is_stream
from bigsgan.data.shard_headers import NO_CLASS, Shard, label_key, place_of, read_headers
from bigsgan.data.tokens import TOKENS
from bigsgan.errors import UserError, reason
from bigsgan.runtime.atomic import replacing, write_text
from bigsgan.runtime.paths import check_regular, parse_json, read_text

ABOUT_FILE = "codec.json"
"""File in which `bigsgan data encode` describes the shards beside it."""

_READERS = 16  # threads that read the headers of shards; mostly they wait for the file system

_TOOLS = {
    **dict.fromkeys(("gz", "tgz", "Z"), "gunzip"), **dict.fromkeys(("bz2", "tbz", "tbz2"), "bunzip2"),
    **dict.fromkeys(("xz", "txz"), "unxz"), **dict.fromkeys(("zst", "tzst"), "unzstd"), "lz4": "unlz4",
}  # fmt: skip
"""What decompresses files, by the end of their names."""

_RENAMING = "rename the files: a key ends at the first dot of a name, and the rest must be the suffix alone"
_FOLLOWING = "pack the files that links stand for (tar --dereference --hard-dereference), as links are not read"

_State: TypeAlias = tuple[str, int, int]
"""Name, size and time of a shard, which change when it is written again."""

_FORMAT = 5
"""Version of the cached index."""

_unsaved: dict[Path, dict[str, np.ndarray]] = {}
"""Indices by their files, which wait for the run to begin."""

_log = logging.getLogger(__name__)


CLASSES_FILE = "classes.json"
"""File beside shards with a list of the names of their classes."""

_MOST_BYTES = 1 << 26


class Shards(NamedTuple):
    """The images, or latents, in a directory of shards, in the order of the shards."""

    archives: list[str]
    names: list[str]
    entries: np.ndarray  # (number of images,), for ``tar_content``
    others: Ignored
    unlabelled: np.ndarray  # numbers of the images that have no label; theirs is 0


def build_tar(data: Data) -> PackedImages:
    """Open the shards of ``data.root``, a directory or one of them, in WebDataset's layout; see ``read_headers``.

    Images are in the order of the shards' names, and within a shard in its order.

    Raises:
        UserError: There are no shards, one is damaged, none has images, an image has no class, or they have another
            number of classes.
    """
    found = read_shards(data)
    names = names_beside(Path(str(data.root)))
    if data.num_classes and not data.has_vectors:
        num_classes = int(found.entries["label"].max()) + 1
        if data.num_classes not in (num_classes, len(names)):  # the last classes may have no image
            raise wrong_num_classes(data, max(num_classes, len(names)), "classes")
    return PackedImages(found.archives, found.names, found.entries, tar_content, names, data)


def names_beside(root: Path) -> list[str]:
    """Return the names of classes that ``bigsgan data`` has written beside shards; none if there are no such names.

    Raises:
        UserError: The file with them is damaged, or cannot be read.
    """
    try:
        directory = root.parent if os.path.isfile(root) else root
        found = parse_json(read_text(directory / CLASSES_FILE, _MOST_BYTES))
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise ValueError("it is no list of names")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        problem = f"has a {CLASSES_FILE} that cannot be read: {reason(error)}"
        raise UserError("data.root", str(root), problem, "write a list of the classes' names, or remove it") from None
    return found


def write_names(root: Path, names: Sequence[str]) -> None:
    """Write the names of the classes beside shards, which have their numbers, if they have other names."""
    if not are_own_numbers(names) and names_beside(root) != names:
        write_text(root / CLASSES_FILE, json.dumps(names) + "\n")


def _check(data: Data, found: Shards, field: str) -> None:
    """Warn of ignored files, and of images without labels where these may be missing.

    Of a single class, images need labels only if some have one.

    Raises:
        UserError: There are no images, most of the data set would be ignored, or the recipe has labels, and images have
            none.
    """
    num, num_unlabelled = len(found.names), len(found.unlabelled)
    num_links = sum(count for kind, count in found.others.kinds.items() if kind.startswith(LINKED))
    kinds = [f"x{kind}" for kind in found.others.kinds if not kind.startswith(LINKED)]
    kinds = kinds if num_links < found.others.num_lost else []
    causes = [_FOLLOWING] * (num_links > 0) + [_RENAMING] * any(map(is_image, kinds))
    if not num and data.kind == "latents":
        problem, remedy = "has no latents (*.npy) in its shards", "encode some images"
        raise UserError("data.root", data.root, problem, remedy, found.others.text())
    if not num:
        raise no_images(data, "a directory with shards (*.tar) of files", found.others, causes)
    causes += [CONVERTING] * any(may_be_image(name) and not is_image(name) for name in kinds)
    found.others.check(field, data.root, num, data.max_ignored, "; ".join(causes))
    found.others.tell(data.root)
    if data.condition_width and num_unlabelled == num and LABELS_FILE in found.others.kinds:
        problem, detail = "has no labels but those of a dataset.json", "it is read beside files, and in zip files"
        remedy = "unpack the shards into a folder, pack a zip file, or set data.num_classes=0"
        raise UserError(field, str(data.root), problem, remedy, detail)
    needed = data.num_classes > 1 or data.has_vectors or (data.num_classes and data.label_key is not None)
    if needed and num_unlabelled == num:
        detail = (
            f"beside no image is a number in <key>.cls, in <key>.json as {label_key(data)!r}, or alone in <key>.txt"
        )
        problem, detail = "has no classes", f"{detail}; {found.others.text()}"
        remedy = "write the number of each image's class into <key>.cls, set data.label_key, or set data.num_classes=0"
        if data.conditions_are_tokens:
            problem, detail, remedy = f"has no tokens in <key>.{TOKENS}", "", "encode the images with --text-encoder"
        raise UserError("data.root", data.root, problem, remedy, detail.removesuffix("; "))
    if not data.condition_width or not 0 < num_unlabelled < num:
        return
    if data.missing_labels == "accept":
        _log.warning("%s: %d of %d images have no label; theirs is null", data.root, num_unlabelled, num)
        return
    problem = f"has {num_unlabelled} of {num} images without a label"
    suffix = TOKENS if data.conditions_are_tokens else "json" if data.has_vectors else "cls"
    remedy = f"write them into <key>.{suffix}, or set data.missing_labels=accept"
    remedy += ", or data.num_classes=0 to train without classes" * (not data.has_vectors)
    raise UserError("data.root", data.root, problem, remedy, f"such as {_name(found, int(found.unlabelled[0]))}")


def _name(found: Shards, number: int) -> str:
    """Return the name of an image and that of its shard."""
    return f"{found.names[number]} in {os.path.basename(found.archives[int(found.entries['archive'][number])])}"


def read_shards(data: Data, streams: bool = False, field: str = "data.root") -> Shards:
    """Read the headers of the shards in the directory ``data.root``, or of the only one, or their cached index.

    With ``streams``, compressed shards count too, whose images are read quickly in their order alone. ``field`` names
    the directory in what is said of its files.

    Raises:
        UserError: There are no shards, some are compressed in another way or without ``streams``, or one is damaged;
            or see ``_check``.
    """
    given = Path(str(data.root))
    is_one = data.kind == "tar" and is_shard(given.name, streams=True) and os.path.isfile(given)
    remedy = "give a shard (*.tar), or the directory with the shards"
    root = given.parent if is_one else data_directory("data.root", data.root, remedy)
    try:
        visible = [given] if is_one else sorted(path for path in root.iterdir() if not path.name.startswith("."))
        packed = [path.name for path in visible if _is_compressed(path) or (is_one and not is_shard(path.name))]
        taken = {name for name in packed if streams and is_stream(name)}
        paths = [path for path in visible if is_shard(path.name) or path.name in taken]
        if packed := [name for name in packed if name not in taken]:
            problem = "is a compressed shard" if is_one else f"has compressed shards{some_names(packed)}"
            detail = "images in them cannot be read in any order"
            tools = ", ".join(sorted({tool for name in packed for end, tool in _TOOLS.items() if name.endswith(end)}))
            remedy = f"decompress them to *.tar ({tools})"
            if not streams and data.kind == "tar" and all(map(is_stream, packed)):
                remedy += ", or convert them once, as `bigsgan data prepare` reads them in their order"
            raise UserError("data.root", data.root, problem, remedy, detail)
        used = {path.name for path in paths}
        files = [path.name for path in visible if path.name not in used and path.is_file()]
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
    place = place_of(data)
    entries = np.empty(len(names), dtype=[("archive", "i4"), *place.descr])
    entries["archive"] = np.repeat(np.arange(len(shards)), [len(shard.names) for shard in shards])
    for part in place.names or ():
        entries[part] = np.concatenate([shard.places[part] for shard in shards])
    labels = entries["label"]
    unlabelled = labels == NO_CLASS if labels.ndim == 1 else np.isnan(labels[:, 0])
    entries["label"][unlabelled] = 0
    others = sum((shard.others for shard in shards), others)
    found = Shards([str(path) for path in paths], names, entries, others, np.flatnonzero(unlabelled))
    _check(data, found, field)
    return found


def _is_compressed(path: Path) -> bool:
    """Return whether a file is a compressed shard, and not beside its decompressed one."""
    found = COMPRESSED.fullmatch(path.name)
    return found is not None and not path.with_name(f"{found[1]}.tar").exists()


def _index(data: Data, root: Path, paths: list[Path]) -> list[Shard]:
    """Return the content of each shard: from the cached index, or from its headers.

    Raises:
        UserError: A shard is damaged.
        OSError: A shard cannot be read.
    """
    what = "-latents" if data.kind == "latents" else ""
    kind = "vectors" if data.has_vectors else "classes" if data.num_classes else "plain"
    kind = "tokens" if data.conditions_are_tokens else kind
    index = Path(os.path.abspath(root)) / f".bigsgan-index{what}-{kind}.npz"
    states = [_state(path) for path in paths]
    key = label_key(data) if data.condition_width else ""
    if data.has_vectors:  # of which other numbers are valid with other keys
        key = repr((key, data.num_classes, data.condition_size, data.multi_label, data.missing_labels))
    key = repr(
        (key, data.range is None, zlib.crc32(" ".join(sorted(image_suffixes())).encode()))
    )  # other Pillows may read more
    known = _read_index(index, place_of(data), key)
    left = [(state, path) for state, path in zip(states, paths, strict=True) if state not in known]
    if left:
        start = time.perf_counter()
        with ThreadPoolExecutor(_READERS) as threads:
            read = threads.map(partial(read_headers, data), [path for _, path in left])
            known.update(zip((state for state, _ in left), read, strict=True))
        _log.info("read the headers of %d shards in %.1f s", len(left), time.perf_counter() - start)
        # Of one shard alone, the index keeps those of the others.
        others = [state for state in known if len(states) == 1 and state[0] != states[0][0]]
        _unsaved[index] = _packed_index({state: known[state] for state in [*others, *states]}, key)
    return [known[state] for state in states]


def _state(path: Path) -> _State:
    check_regular(path)
    found = path.stat()
    return path.name, found.st_size, found.st_mtime_ns


def _read_index(index: Path, place: np.dtype, key: str) -> dict[_State, Shard]:
    """Read a cached index, or one that waits to be cached; a missing or damaged one is empty."""
    try:
        if index not in _unsaved:
            check_regular(index)
        with nullcontext(_unsaved[index]) if index in _unsaved else np.load(index, allow_pickle=False) as file:
            about = json.loads(file["about"].tobytes())
            names = file["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
            places = file["places"]
        states = [(name, size, mtime) for name, size, mtime in about["states"]]
        ends = np.cumsum(about["numbers"])
        if (about["format"], about["label_key"]) != (_FORMAT, key):
            return {}
        if places.dtype != place or not len(names) == len(places) == ends[-1]:
            return {}
        starts = ends - about["numbers"]
        each = zip(states, starts, ends, strict=True)
        others = dict(zip(states, itertools.starmap(Ignored, about["others"]), strict=True))
        return {state: Shard(names[start:end], places[start:end], others[state]) for state, start, end in each}
    except FileNotFoundError:
        return {}
    except Exception as error:  # BadZipFile, ValueError, KeyError, ...: a damaged file raises all kinds of errors
        _log.info("%s is damaged and will be replaced: %s", index, reason(error))
        return {}


def _packed_index(shards: dict[_State, Shard], key: str) -> dict[str, np.ndarray]:
    about = {
        "format": _FORMAT,
        "label_key": key,
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


def tar_content(files: OpenFiles, entry: np.void) -> bytes:
    """Return the content of a member of a shard."""
    return files.read(int(entry["archive"]), int(entry["offset"]), int(entry["size"]))
