"""Images in archives, for file systems on which millions of small files are slow: one zip file, or shards of tar.

An index of all images is made when an archive is opened; an image is then read by its offset, in any order.
"""

from __future__ import annotations

import io
import os
import re
import resource
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from bigsgan.config.sections import Data
from bigsgan.data.datasets import (
    IMAGE_EXTENSIONS,
    PathList,
    check_filled,
    check_num_folders,
    data_directory,
    is_image,
    no_images,
    unreadable_root,
    wrong_num_classes,
)
from bigsgan.data.images import CorruptImage, explain, image_tensor, open_image
from bigsgan.errors import UserError

_FILE_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
# Half of what a process may have open (often 1,024), as torch's queues between processes need some too.
_MOST_OPEN = 32_768 if _FILE_LIMIT == resource.RLIM_INFINITY else max(1, _FILE_LIMIT // 2)
_READERS = 16  # threads that read the headers of shards; they wait for the file system most of the time

# WebDataset: all up to the first dot of the file's name is the sample's key, the rest says what the member holds.
_KEY_AND_FIELD = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_CLASS_NUMBER = re.compile(rb"\s*([0-9]{1,9})\s*")

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # zip, APPNOTE 4.3.7: signature, ..., length of name and of extra field
_ENCRYPTED = 0x1  # zip, APPNOTE 4.4.4
_TAR_BLOCK = 512

_ZIP_ENTRY = np.dtype(
    [("archive", "i4"), ("offset", "i8"), ("size", "i8"), ("label", "i8"), ("deflated", "?"), ("crc", "u4")]
)
_TAR_ENTRY = np.dtype([("archive", "i4"), ("offset", "i8"), ("size", "i8"), ("label", "i8")])


class OpenFiles:
    """Files that every process opens for itself, each when it is first read from."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._process = os.getpid()
        self._handles: dict[int, io.FileIO] = {}  # the one used last at the end

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[Sequence[str]]]:
        """Travel to other processes without the handles."""
        return OpenFiles, (self._paths,)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of file ``number``.

        Raises:
            OSError: The file cannot be read.
            EOFError: It is shorter.
        """
        if self._process != os.getpid():  # a forked process begins with the handles of its parent
            self._process, self._handles = os.getpid(), {}
        handle = self._handles.pop(number, None) or io.FileIO(self._paths[number])
        self._handles[number] = handle
        if len(self._handles) > _MOST_OPEN:
            self._handles.pop(next(iter(self._handles))).close()
        pieces = []
        while size:  # one call reads 2 GiB at most
            piece = os.pread(handle.fileno(), size, offset)
            if not piece:
                raise EOFError("the archive ends before it")
            pieces.append(piece)
            offset, size = offset + len(piece), size - len(piece)
        return b"".join(pieces)


class PackedImages:
    """Images at known places of archives, each with a class."""

    in_memory = False

    def __init__(
        self,
        archives: list[str],
        names: list[str],
        entries: np.ndarray,
        content: Callable[[OpenFiles, np.void], bytes],
        data: Data,
    ) -> None:
        """Take an index.

        Args:
            archives: Paths of the archives.
            names: What the images are called in them.
            entries: Place and class of each image, (N,), with the fields of ``_TAR_ENTRY`` or ``_ZIP_ENTRY``.
            content: Reads the image file of an entry.
            data: The recipe's section.
        """
        self._archives, self._names, self._entries = archives, PathList(names), entries
        self._files, self._content = OpenFiles(archives), content
        self.resolution, self.channels = data.resolution, data.image_channels

    def __len__(self) -> int:
        return len(self._entries)

    def path(self, index: int) -> str:
        """Path of the archive of image ``index``, with its path in there behind it."""
        return f"{self._archives[self._entries[index]['archive']]}/{self._names[index]}"

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        entry, path = self._entries[index], self.path(index)
        try:
            content = self._content(self._files, entry)
        except Exception as error:  # OSError, EOFError, zlib.error, ...: of this image alone
            raise CorruptImage(path, explain(error)) from error
        image = image_tensor(open_image(path, io.BytesIO(content)), path, self.resolution, self.channels)
        return image, int(entry["label"])


def build_zip(data: Data) -> PackedImages:
    """Open the zip file ``data.root``. Classes and order are those of the same files in a folder.

    Members that are compressed by deflate are read too, at the cost of the time that it takes.

    Raises:
        UserError: It is not there or damaged, holds no image, or has another number of class folders.
    """
    root = Path(str(data.root)).expanduser()
    if not root.is_file():
        problem = "is not a file" if root.exists() else "does not exist"
        raise UserError("data.root", data.root, problem, "give the zip file that holds the images")
    try:
        with zipfile.ZipFile(root) as archive:
            members = list({info.filename: info for info in archive.infolist()}.values())
    except OSError as error:
        raise unreadable_root(data, error) from error
    except Exception as error:  # BadZipFile, struct.error, UnicodeDecodeError, ...
        raise _damaged(data, "is a damaged archive", error) from error
    visible = [info for info in members if not _is_hidden(info.filename)]
    images, labels = _list_zip_classes(visible, data) if data.num_classes else _list_zip(visible)
    if not images:
        raise no_images(data, "a zip file with files")
    for info in images:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & _ENCRYPTED:
            problem = f"holds {info.filename} encrypted or compressed by another method than deflate"
            raise UserError("data.root", data.root, problem, "pack it anew without compression (zip -0)")
    entries = np.array(
        [
            (0, info.header_offset, info.compress_size, label, info.compress_type == zipfile.ZIP_DEFLATED, info.CRC)
            for info, label in zip(images, labels, strict=True)
        ],
        dtype=_ZIP_ENTRY,
    )
    return PackedImages([str(root)], [info.filename for info in images], entries, _zip_content, data)


def _is_hidden(name: str) -> bool:
    # macOS packs the doubles of files into a folder __MACOSX beside what was asked for.
    return name.startswith("__MACOSX/") or any(part.startswith(".") for part in name.split("/"))


def _list_zip(members: list[zipfile.ZipInfo]) -> tuple[list[zipfile.ZipInfo], list[int]]:
    images = sorted(filter(_is_zip_image, members), key=lambda info: info.filename)
    return images, [0] * len(images)


def _list_zip_classes(members: list[zipfile.ZipInfo], data: Data) -> tuple[list[zipfile.ZipInfo], list[int]]:
    folders = {info.filename.partition("/")[0] for info in members if "/" in info.filename}
    files: dict[str, list[zipfile.ZipInfo]] = {folder: [] for folder in sorted(folders)}
    for info in _list_zip(members)[0]:
        folder, below, _ = info.filename.partition("/")
        if below:
            files[folder].append(info)
    check_num_folders(data, list(files))
    check_filled(data, files)
    each = list(files.values())
    return [info for found in each for info in found], [label for label, found in enumerate(each) for _ in found]


def _is_zip_image(info: zipfile.ZipInfo) -> bool:
    return is_image(info.filename.rpartition("/")[2])


def _zip_content(files: OpenFiles, entry: np.void) -> bytes:
    # Not zipfile, which has one position in one open file, and keeps a Python object for each member in every process.
    number, offset = int(entry["archive"]), int(entry["offset"])
    signature, name, extra = _LOCAL_HEADER.unpack(files.read(number, offset, _LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise ValueError("it does not begin where the zip file's directory says")
    content = files.read(number, offset + _LOCAL_HEADER.size + name + extra, int(entry["size"]))
    if entry["deflated"]:
        content = zlib.decompress(content, wbits=-zlib.MAX_WBITS)
    if zlib.crc32(content) != entry["crc"]:
        raise ValueError("its checksum differs from that in the zip file's directory")
    return content


class _Shard(NamedTuple):
    names: list[str]
    entries: list[tuple[int, int, int]]  # offset, size and class


def build_tar(data: Data) -> PackedImages:
    """Open the shards ``*.tar`` in the directory ``data.root``, in WebDataset's layout: ``<key>.png``, ``<key>.cls``.

    Images come in the order of the shards' names, and within one as they stand there. An image without a class has
    class 0.

    Raises:
        UserError: They are not there, one is damaged, none holds an image, or they have another number of classes.
    """
    root = data_directory("data.root", data.root, "give the directory that holds the shards (*.tar)")
    try:
        paths = sorted(path for path in root.iterdir() if path.suffix == ".tar" and not path.name.startswith("."))
    except OSError as error:
        raise unreadable_root(data, error) from error
    if not paths:
        raise UserError("data.root", data.root, "holds no shard (*.tar)", "give the directory that holds the shards")
    with ThreadPoolExecutor(_READERS) as threads:
        shards = list(threads.map(partial(_index_shard, data), paths))
    names = [name for shard in shards for name in shard.names]
    if not names:
        raise no_images(data, "a directory with shards (*.tar) of files")
    entries = np.array(
        [(number, *place) for number, shard in enumerate(shards) for place in shard.entries], dtype=_TAR_ENTRY
    )
    num_classes = int(entries["label"].max()) + 1
    if data.num_classes and num_classes != data.num_classes:
        raise wrong_num_classes(data, num_classes, "classes")
    return PackedImages([str(path) for path in paths], names, entries, _tar_content, data)


def _index_shard(data: Data, path: Path) -> _Shard:
    images: list[tuple[str, str, int, int]] = []  # key, name, offset, size
    classes: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                parts = _KEY_AND_FIELD.fullmatch(member.name)
                if parts is None or not member.isreg():
                    continue
                key, field = parts[1], parts[2].lower()
                if f".{field}" in IMAGE_EXTENSIONS:
                    images.append((key, member.name, member.offset_data, member.size))
                elif field == "cls" and data.num_classes:
                    classes[key] = _class_number(archive, member, data)
            _check_end(path, archive.offset)
    except UserError:
        raise
    except OSError as error:
        raise unreadable_root(data, error) from error
    except Exception as error:  # TarError, EOFError, ValueError, ...: whatever tarfile meets in damaged headers
        raise _damaged(data, f"holds a damaged shard, {path.name}", error) from error
    places = [(offset, size, classes.get(key, 0)) for key, _, offset, size in images]
    return _Shard([name for _, name, _, _ in images], places)


def _class_number(archive: tarfile.TarFile, member: tarfile.TarInfo, data: Data) -> int:
    file = archive.extractfile(member)
    found = _CLASS_NUMBER.fullmatch(file.read()) if file else None
    if found is None:
        problem = f"has no class number in {member.name} of {os.fsdecode(archive.name or b'')}"
        raise UserError("data.root", data.root, problem, "pack it anew, or set data.num_classes=0")
    return int(found[1])


def _check_end(path: Path, offset: int) -> None:
    """Raise EOFError unless the archive ends where reading did: tarfile takes any damaged header for the end."""
    with path.open("rb") as file:
        file.seek(offset)
        if file.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
            raise EOFError(f"no header at byte {offset}, and no end of the archive")


def _tar_content(files: OpenFiles, entry: np.void) -> bytes:
    return files.read(int(entry["archive"]), int(entry["offset"]), int(entry["size"]))


def _damaged(data: Data, problem: str, error: Exception) -> UserError:
    return UserError("data.root", data.root, f"{problem}: {explain(error)}", "pack it anew")


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write members, name and content; the bytes of the file depend on them alone."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)  # of user 0, at time 0, mode 644
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_zip(path: Path, members: Iterable[tuple[str, bytes]], comment: bytes = b"") -> None:
    """Write members, name and content, uncompressed; the bytes of the file depend on them and ``comment`` alone."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)  # of 1980-01-01, not compressed
            info.create_system, info.external_attr = 3, 0o100644 << 16  # a file on Unix
            archive.writestr(info, content)
        archive.comment = comment
