"""Images in archives, for file systems on which millions of small files are slow: one zip file, or tar (shards.py).

Opening an archive builds an index of all images; an image is then read by its offset, in any order.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import resource
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data.datasets import ImageDataset, Label, PathList, label_at, read_image
from bigsgan.data.fingerprint import Fingerprint, digest, file_sizes
from bigsgan.data.labels import with_classes
from bigsgan.data.listing import LABELS_FILE, Files, is_hidden, plain_name, sort_files, unreadable_root
from bigsgan.data.tokens import read_tokens
from bigsgan.errors import UserError, reason
from bigsgan.images.npz import LOCAL_HEADER
from bigsgan.images.reading import CorruptImage

_FILE_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
# Half of a process's limit (often 1,024), as torch's queues between processes need open files too.
_MOST_OPEN = 32_768 if _FILE_LIMIT == resource.RLIM_INFINITY else max(1, _FILE_LIMIT // 2)

_ENCRYPTED = 0x1  # zip, APPNOTE 4.4.4

_ZIP_PLACE = np.dtype([("offset", "i8"), ("size", "i8"), ("inflated", "i8"), ("crc", "u4")])
"""``inflated``: uncompressed size of a compressed member; -1 for a stored one."""

_FORMATS = {
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"\x1f\x8b": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\0": "an xz file",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"\x04\x22\x4d\x18": "an LZ4 file",
}
"""Formats that are not zip, by how their files begin."""

_STREAMS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("gz", "tgz"), gzip.open),
    **dict.fromkeys(("bz2", "tbz", "tbz2"), bz2.open),
    **dict.fromkeys(("xz", "txz"), lzma.open),
}
"""What opens compressed files, by the end of their names."""

_MAGIC_BYTES = max(map(len, _FORMATS))

_MOST_BYTES = 1 << 28
"""Limit of an image file's size."""


def is_stream(path: str) -> bool:
    """Return whether an archive is compressed as a whole, so that it is read from its beginning on."""
    return path.rpartition(".")[2] in _STREAMS


def open_archive(path: str) -> IO[bytes]:
    """Open an archive to read, as if it were not compressed."""
    return _STREAMS.get(path.rpartition(".")[2], open)(path, "rb")  # type: ignore[no-any-return]


class OpenFiles:
    """Files that every process opens for itself, at the first read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._process = os.getpid()
        self._handles: dict[int, Any] = {}  # least recently used first

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[Sequence[str]]]:
        """Pickle without the handles."""
        return OpenFiles, (self._paths,)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of file ``number``.

        Raises:
            OSError: The file cannot be read.
            EOFError: It is shorter.
        """
        if self._process != os.getpid():  # a forked process inherits the handles of its parent
            self._process, self._handles = os.getpid(), {}
        path = self._paths[number]
        handle = self._handles.pop(number, None) or (open_archive(path) if is_stream(path) else io.FileIO(path))
        self._handles[number] = handle
        if len(self._handles) > _MOST_OPEN:
            self._handles.pop(next(iter(self._handles))).close()
        if is_stream(path):
            handle.seek(offset)
        pieces = []
        while size:  # one call reads at most 2 GiB
            piece = handle.read(size) if is_stream(path) else os.pread(handle.fileno(), size, offset)
            if not piece:
                raise EOFError("the archive is truncated")
            pieces.append(piece)
            offset, size = offset + len(piece), size - len(piece)
        return b"".join(pieces)


class PackedFiles:
    """Files at known offsets in archives, each with a label."""

    def __init__(
        self,
        archives: list[str],
        names: list[str],
        entries: np.ndarray,
        content: Callable[[OpenFiles, np.void], bytes],
        data: Data | None = None,
    ) -> None:
        """Take the names of all files, and (N,) entries: ``archive``, ``label``, and fields that ``content`` needs.

        ``data`` describes labels that are tokens, and are read with an image.
        """
        self._archives, self._names, self._entries = archives, PathList(names), entries
        self._files, self._content = OpenFiles(archives), content
        self._tokens = data if data is not None and data.conditions_are_tokens else None

    def __len__(self) -> int:
        return len(self._entries)

    def path(self, index: int) -> str:
        """Return the path of the archive of file ``index``, followed by its path in the archive."""
        return f"{self._archives[self._entries[index]['archive']]}/{self._names[index]}"

    @property
    def labels(self) -> np.ndarray | None:
        """The label of each file: classes (N,) int64, or vectors (N, K) float32; None of tokens."""
        return self._entries["label"] if self._tokens is None else None

    def label(self, index: int) -> Label:
        """Return the label of file ``index``.

        Raises:
            CorruptImage: Its tokens cannot be read, or do not fit.
        """
        if self._tokens is None:
            return label_at(self._entries["label"], index)
        entry = self._entries[index]
        place = (int(entry[name]) for name in ("archive", "tokens_offset", "tokens_size"))
        try:
            return read_tokens(self._tokens, self._files.read(*place))
        except (OSError, EOFError, ValueError) as error:
            raise CorruptImage(self.path(index), f"its tokens do not fit: {reason(error)}") from None

    def read(self, index: int) -> bytes:
        """Return the content of file ``index``.

        Raises:
            CorruptImage: It cannot be read.
        """
        try:
            return self._content(self._files, self._entries[index])
        except Exception as error:  # OSError, EOFError, zlib.error, ...: only this image is affected
            raise CorruptImage(self.path(index), reason(error)) from error

    def is_in_stream(self, index: int) -> bool:
        """Return whether the archive of a file is compressed as a whole."""
        return is_stream(self._archives[self._entries[index]["archive"]])

    def times(self) -> list[int]:
        """Return when each archive was last written, in nanoseconds; 0 if unknown."""
        found = []
        for path in self._archives:
            try:
                found.append(os.stat(path).st_mtime_ns)
            except OSError:
                found.append(0)
        return found

    def fingerprint(self) -> Fingerprint:
        """Return digests of the index, of the archives' names if there are several, and of their sizes."""
        fields = {name: self._entries[name].tobytes() for name in self._entries.dtype.names or ()}
        label = fields.pop("label")
        archives = [os.path.basename(path).encode("utf-8", "surrogateescape") for path in self._archives]
        shards = archives if len(archives) > 1 else []  # a zip file is the root itself, whose path does not count
        return Fingerprint(
            len(self),
            digest([self._names.digest().encode(), *shards]),
            digest([label]),
            digest([*fields.values(), file_sizes(self._archives).encode()]),
        )


class PackedImages(PackedFiles, ImageDataset):
    """Images in archives."""

    in_memory = False

    def __init__(
        self,
        archives: list[str],
        names: list[str],
        entries: np.ndarray,
        content: Callable[[OpenFiles, np.void], bytes],
        class_names: list[str],
        data: Data,
    ) -> None:
        """See ``PackedFiles``; ``data`` gives the size and the channels of images."""
        super().__init__(archives, names, entries, content, data)
        self.class_names = class_names
        self.data = data

    def __getitem__(self, index: int) -> tuple[Tensor, Label]:
        return read_image(self.data, self.path(index), self.read(index)), self.label(index)


def build_zip(data: Data) -> PackedImages:
    """Open the zip file ``data.root``. Classes and order are as for the same files in a folder.

    Members compressed by deflate are supported too, but are slower.

    Raises:
        UserError: The file does not exist, is damaged, or does not fit; see ``with_classes``.
    """
    members = zip_members(data)
    names, labels, classes = with_classes(data, zip_listing(data, members), "a zip file with files")
    return PackedImages(*zip_files(data, members, names, labels), zip_content, classes, data)


def zip_members(data: Data) -> dict[str, zipfile.ZipInfo]:
    """Return the members that the directory of the zip file ``data.root`` lists, by their names.

    Raises:
        UserError: The file does not exist, is no zip file, is damaged, or has names that differ only in how they are
            written.
    """
    root = Path(str(data.root))
    if not os.path.isfile(root):
        problem = "must be a file" if os.path.exists(root) else "does not exist"
        raise UserError("data.root", data.root, problem, "give the zip file with the images")
    try:
        if tarfile.is_tarfile(root):
            remedy = "unpack it and set data.kind=folder, or read it with data.kind=tar if it is a shard (*.tar)"
            if data.kind == "latents":
                remedy = "give the directory of the shards"
            raise UserError("data.root", data.root, "must be a zip file", remedy, "it is a tar archive")
        with zipfile.ZipFile(root) as archive:
            return _by_plain_name(data, archive.infolist())
    except UserError:
        raise
    except OSError as error:
        raise unreadable_root(data, error) from error
    except Exception as error:  # BadZipFile, struct.error, UnicodeDecodeError, ...
        raise _no_zip_file(data, root) or damaged(data, "is damaged", error) from error


def _no_zip_file(data: Data, root: Path) -> UserError | None:
    """Return the error that a file is of another format, by how it begins."""
    with open(root, "rb") as file:
        begins = file.read(_MAGIC_BYTES)
    if begins.startswith(b"PK"):
        return None
    what = "latents" if data.kind == "latents" else "images"
    remedy, detail = f"give the zip file with the {what}", "it does not begin as one" if begins else "it is empty"
    for magic, name in _FORMATS.items():
        if begins.startswith(magic):
            remedy, detail = f"pack the {what} in it as a zip file (zip -0)", f"it is {name}"
    return UserError("data.root", data.root, "must be a zip file", remedy, detail)


def _by_plain_name(data: Data, members: Iterable[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    for info in members:  # of members with the very same name the last one counts, as in zipfile
        plain = plain_name(info.filename, True)
        if not plain:  # the root itself
            continue
        other = found.get(plain, info).filename
        if other != info.filename and not plain.endswith("/"):
            problem = f"has members with the same name, {other!r} and {info.filename!r}"
            raise UserError("data.root", data.root, problem, "pack it again with one of them")
        found[plain] = info
    return found


def zip_listing(data: Data, members: Mapping[str, zipfile.ZipInfo]) -> Files:
    """Sort the members of a zip file; folders without images count too."""
    visible = [name for name in members if not is_hidden(name)]
    folders = {name.partition("/")[0] for name in visible if "/" in name}
    labels = partial(zip_member, data, members[LABELS_FILE]) if LABELS_FILE in members else None
    files = (name for name in visible if not name.endswith("/"))
    return sort_files(files, folders, labels, data.range is not None)


def zip_member(data: Data, info: zipfile.ZipInfo) -> bytes:
    """Read a member of the zip file ``data.root``.

    Raises:
        UserError: It is too large, or damaged.
    """
    check_member(data, info.filename, info.file_size)
    try:
        with zipfile.ZipFile(str(data.root)) as archive:
            return archive.read(info)
    except OSError as error:
        raise unreadable_root(data, error) from error
    except Exception as error:  # BadZipFile, zlib.error, NotImplementedError, ...
        raise damaged(data, "is damaged", error) from error


def zip_files(
    data: Data, members: Mapping[str, zipfile.ZipInfo], names: list[str], labels: np.ndarray
) -> tuple[list[str], list[str], np.ndarray]:
    """Return the archive, and the names of some members and their entries (N,), with which ``zip_content`` reads them.

    Raises:
        UserError: A member is encrypted, compressed by a method that is not supported, or too large.
    """
    places = []
    for name in names:
        info = members[name]
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & _ENCRYPTED:
            problem = f"has a member that is encrypted or compressed by another method than deflate, {name}"
            raise UserError("data.root", data.root, problem, "pack it again without compression (zip -0)")
        check_member(data, name, max(info.file_size, info.compress_size))
        inflated = info.file_size if info.compress_type == zipfile.ZIP_DEFLATED else -1
        places.append((info.header_offset, info.compress_size, inflated, info.CRC))
    return [str(data.root)], names, labelled(np.array(places, dtype=_ZIP_PLACE), labels)


def labelled(places: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return entries (N,) of files in the first archive at these places, with their labels (N,) or (N, K)."""
    label = ("label", labels.dtype, labels.shape[1:])
    entries = np.zeros(len(places), dtype=[("archive", "i4"), label, *places.dtype.descr])
    entries["label"] = labels
    for field in places.dtype.names or ():
        entries[field] = places[field]
    return entries


def zip_content(files: OpenFiles, entry: np.void) -> bytes:
    """Return the content of a member of a zip file, checked by its checksum."""
    # Does not use zipfile, which has one position in one open file, and keeps an object per member in every process.
    number, offset = int(entry["archive"]), int(entry["offset"])
    signature, name, extra = LOCAL_HEADER.unpack(files.read(number, offset, LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise ValueError("it does not start where the zip file's directory says")
    content = files.read(number, offset + LOCAL_HEADER.size + name + extra, int(entry["size"]))
    if (inflated := int(entry["inflated"])) >= 0:
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, inflated + 1)
        if len(content) > inflated:
            raise ValueError("it is larger than the zip file's directory says")
    if zlib.crc32(content) != entry["crc"]:
        raise ValueError("its checksum differs from that in the zip file's directory")
    return content


def check_member(data: Data, name: str, size: int) -> None:
    """Refuse a member of an archive that is larger than any image.

    Raises:
        UserError: It is too large; the message names it.
    """
    if size > _MOST_BYTES:
        problem = f"has a member of {size / 2**30:.1f} GiB, larger than any image, {name}"
        raise UserError("data.root", data.root, problem, "remove the member, or pack the images again")


def damaged(data: Data, problem: str, error: Exception) -> UserError:
    """Return the error that an archive is damaged."""
    return UserError("data.root", data.root, f"{problem}: {reason(error)}", "pack it again")


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write members (name, content); the bytes of the file depend only on them."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)  # user 0, time 0, mode 644
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_zip(path: Path, members: Iterable[tuple[str, bytes]], comment: bytes = b"") -> None:
    """Write members (name, content), uncompressed; the bytes of the file depend only on them and ``comment``."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)  # date 1980-01-01, not compressed
            info.create_system, info.external_attr = 3, 0o100644 << 16  # a file on Unix
            archive.writestr(info, content)
        archive.comment = comment
