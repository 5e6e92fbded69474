"""Lists image files below a directory, tells which other files are ignored, and has the messages about what is there.

The layout is that of torchvision's ImageFolder: each folder of the root is a class.
"""

from __future__ import annotations

import functools
import logging
import mimetypes
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageFile

from bigsgan.config.data import Data
from bigsgan.errors import UserError, counted, reason
from bigsgan.runtime.paths import check_regular

_FREQUENT = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".pgm", ".pbm", ".pnm", ".bmp", ".dib", ".tif", ".tiff", ".webp",
)  # fmt: skip
_NO_PIXELS = ("EPS", "MPEG")
"""Formats that Pillow only recognizes, or reads with Ghostscript."""
_NO_RANGE = ".pfm"  # floats
KINDS_OF_IMAGES = ".jpg, .png, .webp, .tif, .bmp, .gif or another suffix of images that Pillow reads"

LABELS_FILE = "dataset.json"
"""File that lists images or latents with their classes."""

LINKED = "linked "
CONVERTING = "convert them to .jpg or .png, or move them elsewhere"
_PHOTOGRAPHS = (".heic", ".heif", ".hif", ".jxl", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".raf")
"""Suffixes of photographs that Pillow does not read."""
_MOST_VISITS = 1_000
_SHOWN_KINDS = 4
_TYPES = mimetypes.MimeTypes()
for _suffix in ("cfg", "ini", "ipynb", "jsonl", "lock", "log", "md", "parquet", "pkl", "toml", "yaml", "yml"):
    _TYPES.add_type("text/plain", f".{_suffix}")  # which Python's own list lacks

_log = logging.getLogger(__name__)


class Files(NamedTuple):
    """The visible files below a root, by their paths in it: a directory's or an archive's.

    Files and folders whose names begin with a dot are hidden: macOS leaves files such as ._cat.jpg beside cat.jpg,
    which are not images.
    """

    images: list[str]  # sorted
    others: list[str]  # without dataset.json
    folders: list[str]  # names of the root's folders, sorted
    labels: Callable[[], bytes] | None = None  # reads dataset.json in the root, if there is one


class Ignored(NamedTuple):
    """Files that are listed beside images, and not read."""

    kinds: dict[str, int]  # their number by suffix, or LABELS_FILE; LINKED and a suffix for links in an archive
    num_lost: int = 0  # of them, those that may be images: neither text, nor named after an image that is read
    example: str = ""  # the name of one of them

    def __add__(self, other: Ignored) -> Ignored:  # type: ignore[override]
        """Return the files of both."""
        kinds = dict(Counter(self.kinds) + Counter(other.kinds))
        first, second = (other, self) if other.num_lost and not self.num_lost else (self, other)
        return Ignored(kinds, self.num_lost + other.num_lost, first.example or second.example)

    def text(self) -> str:
        """Return their number, their most frequent suffixes, and a name; an empty text if there are none."""
        num = sum(self.kinds.values())
        if not num:
            return ""
        shown = sorted(self.kinds.items(), key=lambda kind: (-kind[1], kind[0]))[:_SHOWN_KINDS]
        kinds = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in shown)
        more = ", ..." if len(self.kinds) > _SHOWN_KINDS else ""
        return f"{counted(num, 'other file')} ignored: {kinds}{more}" + f", such as {self.example}" * bool(self.example)

    def check(
        self, field: str, root: object, num_images: int, most: int | None = None, remedy: str = CONVERTING
    ) -> None:
        """Refuse to ignore more than ``most`` files that may be images; by default, than the ``num_images`` read.

        Raises:
            UserError: Most of the data set would be ignored.
        """
        if self.num_lost > (num_images if most is None else most):
            lost, them = counted(self.num_lost, "file"), "it" if self.num_lost == 1 else "them"
            problem = f"has {lost} that would be ignored, and {counted(num_images, 'image')}"
            key = {"SRC": "give --max-ignored ", "--input": ""}.get(field, "set data.max_ignored=")
            remedy += f", or {key}{self.num_lost} to ignore {them}" if key else ""
            raise UserError(field, str(root), problem, remedy, self.text())

    def tell(self, root: object) -> None:
        """Warn of them, once in a process: a run may list its data twice."""
        if text := self.text():
            warn_once(f"{root}: {text}")


@functools.cache
def warn_once(text: str) -> None:
    """Warn, once in a process."""
    _log.warning(text)


def ignored(others: Sequence[str], images: Iterable[str], mark: str = "") -> Ignored:
    """Describe files that are not read, beside images that are; their suffixes begin with ``mark``."""
    if not others:
        return Ignored({})
    paths = {os.path.splitext(name)[0] for name in images}
    left = _Companions(paths)
    kinds = Counter(mark + _kind(name) for name in others)
    lost = [name for name in others if may_be_image(name) and not left.take(name)]
    return Ignored(dict(kinds), len(lost), min(lost or others))


def may_be_image(name: str) -> bool:
    """Return whether a file's suffix is of images, or unknown."""
    kind = _TYPES.guess_type(f"x{os.path.splitext(name)[1]}")[0]
    return kind is None or kind.startswith("image/")


def _kind(name: str) -> str:
    """Return what a file counts as: its suffix, but for one with labels."""
    return LABELS_FILE if os.path.basename(name) == LABELS_FILE else os.path.splitext(name)[1].lower()


class _Companions:
    """Files that come with images, whose names they have and more, as cat.seg.png and cat.jpg.txt come with cat.jpg.

    They may lie in other folders, as masks/cat.exr. A photograph there is an image of its own.
    """

    def __init__(self, paths: set[str]) -> None:
        self._paths = paths  # of images, without suffixes
        self._images = set(map(os.path.basename, paths))

    def take(self, name: str) -> bool:
        """Return whether a file comes with an image.

        An image with a number more, such as cat.2.jpg, is one of its own, and so is one of the same name elsewhere.
        """
        folder, base = os.path.split(name)
        parts = base.split(".")
        if len(parts) > 2 and parts[-2].isdecimal() and is_image(name):
            return False
        stems = [".".join(parts[:num]) for num in range(1, len(parts))]
        is_picture = is_image(name) or base.lower().endswith(_PHOTOGRAPHS)
        if is_picture and stems and os.path.join(folder, stems[-1]) not in self._paths:
            stems = stems[:-1]
        return not self._images.isdisjoint(stems)


@functools.cache
def image_suffixes() -> tuple[str, ...]:
    """Return the suffixes of the images that Pillow reads; of an animation, it reads the first image."""
    known = Image.registered_extensions()
    reads = {name for name, (factory, _) in Image.OPEN.items() if not _is_stub(factory)} - set(_NO_PIXELS)
    reads |= {"MPO"} & set(known.values())  # which JPEG's reader opens
    return tuple(each for each, name in known.items() if name in reads and each != _NO_RANGE)


def _is_stub(factory: object) -> bool:
    """Return whether Pillow needs a program of somebody else's to read a format."""
    return isinstance(factory, type) and issubclass(factory, ImageFile.StubImageFile)


def is_image(name: str, arrays: bool = False) -> bool:
    """Return whether a file counts as an image, by its name, which one of ``arrays`` may be; hidden ones do not."""
    suffixes = (*image_suffixes(), ".npy") if arrays else image_suffixes()
    return name.lower().endswith(suffixes) and not name.startswith(".")


def rarer_twins(names: Sequence[str], stem: Callable[[str], str] = lambda name: os.path.splitext(name)[0]) -> set[str]:
    """Return the images of rarer formats beside others of the same name, such as cat.psd beside cat.png."""
    rarer = [name for name in names if not name.lower().endswith(_FREQUENT)]
    stems = {stem(name) for name in names if name.lower().endswith(_FREQUENT)} if rarer else set()
    return {name for name in rarer if stem(name) in stems}


def plain_name(name: str, in_archive: bool) -> str:
    """Return the path of a member of an archive, or of a listed file, below the root.

    Some of Windows' programs write names with backslashes, though a zip file's have slashes (APPNOTE 4.4.17). Tools
    that unpack read a name that begins with a slash without it.
    """
    name = name.replace("\\", "/")
    return (name.lstrip("/") if in_archive else name).removeprefix("./")


def is_hidden(name: str) -> bool:
    """Return whether a member of an archive is hidden; macOS adds a folder __MACOSX with metadata files."""
    return name.startswith("__MACOSX/") or any(part.startswith(".") and part != "." for part in name.split("/"))


def sort_files(
    names: Iterable[str], folders: Iterable[str], labels: Callable[[], bytes] | None, arrays: bool = False
) -> Files:
    """Sort visible files into images, of which some may be ``arrays``, and others."""
    images: list[str] = []
    others: list[str] = []
    for name in names:
        (images if is_image(name.rpartition("/")[2], arrays) else others).append(name)
    if twins := rarer_twins(images):
        images, others = [name for name in images if name not in twins], [*others, *sorted(twins)]
    return Files(sorted(images), [name for name in others if name != LABELS_FILE], sorted(folders), labels)


def files_below(root: Path, arrays: bool = False) -> Files:
    """List the files below a directory; links are followed, as in ImageFolder. Images may be ``arrays``.

    Raises:
        UserError: A link points to one of its own parent directories, or links give a directory too many paths.
        OSError: A directory cannot be read.
    """

    def fail(error: OSError) -> None:  # by default os.walk skips a folder that cannot be read
        raise error

    found: list[str] = []
    folders: list[str] = []
    visits: Counter[tuple[int, int]] = Counter()
    above = {str(root): frozenset([_identity(root)])}  # of each directory to visit: itself and its parents
    for directory, below, names in os.walk(root, onerror=fail, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        folders = folders if directory != str(root) else list(below)
        way = above.pop(directory)
        for inner in (os.path.join(directory, name) for name in below):
            if (identity := _identity(inner)) in way:
                raise UserError(inner, None, "must not link to one of its parent directories", "remove that link")
            above[inner] = way | {identity}
            visits[identity] += 1
            if visits[identity] > _MOST_VISITS:  # n directories with two links each to the next make 2**n paths
                problem = f"must be reachable by at most {_MOST_VISITS} paths"
                raise UserError(inner, None, problem, "remove links to it or to its parents")
        found += [os.path.join(directory, name) for name in names if not name.startswith(".")]
    start = len(os.path.join(root, ""))
    relative = [path[start:] for path in found]
    labels = functools.partial(_content, root / LABELS_FILE) if LABELS_FILE in relative else None
    return sort_files(relative, folders, labels, arrays)


def _identity(directory: str | Path) -> tuple[int, int]:
    found = os.stat(directory)
    return found.st_dev, found.st_ino


def _content(path: Path) -> bytes:
    check_regular(path)
    return path.read_bytes()


def data_directory(field: str, text: str | None, remedy: str) -> Path:
    """Return the directory that a field of the recipe names.

    Raises:
        UserError: It is not a directory.
    """
    root = Path(str(text))
    if not os.path.isdir(root):  # pathlib raises if a name is too long
        problem = "must be a directory" if os.path.exists(root) else "does not exist"
        raise UserError(field, text, problem, remedy)
    return root


def wrong_num_classes(data: Data, found: int, what: str) -> UserError:
    """Return the error that the data has ``found`` classes; ``what`` describes them."""
    remedy = f"set data.num_classes={found}" + (", or 0 to train without classes" if found else "")
    detail = f"{data.root or data.kind} has {found} {what}"
    return UserError("data.num_classes", data.num_classes, f"must be {found} with this data", remedy, detail)


def no_images(data: Data, wanted: str, others: Ignored, remedies: Sequence[str] = ()) -> UserError:
    """Return the error that there are no images beside ``others``; ``wanted`` describes a source that has some."""
    remedy = f"give {wanted} of {KINDS_OF_IMAGES}, whose names and folders do not begin with a dot"
    remedy = ", or ".join([*remedies, setting_range(data, others) + remedy])
    return UserError("data.root", data.root, "contains no images", remedy, others.text())


def setting_range(data: Data, others: Ignored) -> str:
    """Return the beginning of a remedy where ``others`` beside no images are .npy files; else an empty text."""
    if ".npy" not in others.kinds or data.range is not None:
        return ""
    return "set data.range to the values that are black and white in .npy files, such as [0, 255], or "


def unreadable_root(data: Data, error: OSError) -> UserError:
    """Return the error that the file system refuses to read."""
    return UserError("data.root", data.root, f"cannot be read: {reason(error, data.root)}", "fix its permissions")


def some_names(names: Sequence[str]) -> str:
    """Return up to four names in parentheses, for the end of a sentence."""
    shown = ", ".join(names[:4])
    return f" ({shown}{', ...' if len(names) > 4 else ''})" if names else ""
