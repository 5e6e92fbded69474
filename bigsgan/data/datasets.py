"""The protocol of data sets, and the data sets of digits, of noise and of image files in folders.

Shapes: N images in a data set, C channels (1 grey, 3 RGB), R pixels a side. Images are uint8 until the loader has them
on the device.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data.codecs import build_codec
from bigsgan.data.fingerprint import Fingerprint, digest, file_sizes, some_of
from bigsgan.draws import Draws
from bigsgan.errors import UserError, reason
from bigsgan.images.codec import decode
from bigsgan.images.reading import CorruptImage, image_tensor, open_image
from bigsgan.runtime.paths import check_regular

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Same as in torchvision.datasets.folder, which takes seconds to import."""

LABELS_FILE = "dataset.json"
"""File that lists images or latents with their classes."""

Folder = TypeVar("Folder")
Image = TypeVar("Image")

_SYNTHETIC_IMAGES = 8_192
_CPU = torch.device("cpu")
_MOST_VISITS = 1_000


class ImageDataset(Protocol):
    """The interface that the loader needs. A data set is pickled for the loading processes."""

    in_memory: bool  # whether an image is so cheap that loading processes would only slow it down

    def __len__(self) -> int:
        """Return N, at least 1."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return image ``index``, uint8 (C, R, R), and its class, which is 0 if ``data.num_classes`` is 0.

        For latents, the tensor is float32 (2 * C, R, R): means and standard deviations.

        Raises:
            CorruptImage: The image cannot be read.
        """

    def fingerprint(self) -> Fingerprint:
        """Return digests of the listing, computed without opening images and independent of the root's path."""
        return Fingerprint(len(self))


def readable_images(dataset: ImageDataset, data: Data, num: int, device: torch.device = _CPU) -> Tensor:
    """Return up to ``num`` readable images, spread over the data set: (n, C, R, R) in [-1, 1] on the host.

    Latents are decoded on ``device``.

    Raises:
        UserError: Their autoencoder cannot be read.
    """
    found = []
    num = min(num, len(dataset))
    for index in range(num):
        with suppress(CorruptImage):  # the loader counts and reports it
            found.append(dataset[index * len(dataset) // num][0])
    if not found:
        return torch.empty(0)
    if data.kind != "latents":
        return decode(torch.stack(found))
    codec, means = build_codec(data, device), torch.stack(found).chunk(2, dim=1)[0]
    return codec.decode(codec.encode(means.to(device))).cpu()


class DigitImages(ImageDataset):
    """The 1,797 handwritten digits of scikit-learn (8x8, 17 grey levels), resized to R by R.

    The resizing is bicubic (a = -0.5) with antialiasing, which matters below 8x8, on floats, rounded once at the end.
    """

    in_memory = True

    def __init__(self, data: Data) -> None:
        pixels, labels = _load_digits()
        grey = torch.from_numpy(pixels).to(torch.float32).view(-1, 1, 8, 8) * (255 / 16)  # (N, 1, 8, 8), 0 .. 255
        size = (data.resolution, data.resolution)
        large = F.interpolate(grey, size, mode="bicubic", align_corners=False, antialias=True)
        self.images = large.round().clamp(0, 255).to(torch.uint8)  # (N, 1, R, R); bicubic overshoots at edges
        self.labels = [int(label) if data.num_classes else 0 for label in labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (1797, 64) and classes (1797,) from scikit-learn's file; to import scikit-learn takes seconds."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    try:
        table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    except OSError:  # another version of scikit-learn has moved it
        pixels, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
        return pixels, labels
    return table[:, :-1], table[:, -1].astype(np.int64)


class SyntheticImages(ImageDataset):
    """Noise of any size for benchmarks and tests: image and class are a function of the index only.

    Each image is a window of one sequence of random bytes, which costs no work; 8,192 images are different.
    """

    in_memory = True

    def __init__(self, data: Data) -> None:
        self.num_images, self.num_classes = data.num_images, data.num_classes
        self.shape = (data.image_channels, data.resolution, data.resolution)
        self.num_bytes = data.image_channels * data.resolution**2
        words = Draws(seed=0).words("synthetic", (), 0, 1, -(-(self.num_bytes + _SYNTHETIC_IMAGES) // 8))
        self.noise = torch.from_numpy(words[0].view(np.uint8).copy())

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # An odd factor moves neighbours far apart, and maps no two of the 8,192 to the same window.
        first = index * 3_001 % _SYNTHETIC_IMAGES
        image = self.noise[first : first + self.num_bytes].view(self.shape)
        return image, index % self.num_classes if self.num_classes else 0


class PathList:
    """A list of millions of paths, of files or archive members, that forked processes share."""

    def __init__(self, paths: Iterable[str]) -> None:
        # Not a list of str: reading a Python object writes its reference count, and each forked loading process would
        # end up with its own copy (pytorch issue 13246). One block of bytes stays shared.
        encoded = [path.encode("utf-8", "surrogateescape") for path in paths]
        self._paths = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __getitem__(self, index: int) -> str:
        return self._paths[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogateescape")

    def digest(self) -> str:
        """Return the hash of all paths in order."""
        return digest(self._paths[first:end] for first, end in itertools.pairwise(self._ends))


class LooseFiles:
    """Files in a directory, each with a class."""

    def __init__(self, root: Path, names: list[str], labels: list[int]) -> None:
        self._root, self._names = root, PathList(names)
        self._labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> str:
        """Return the path of file ``index``."""
        return os.path.join(self._root, self._names[index])

    def label(self, index: int) -> int:
        """Return the class of file ``index``."""
        return int(self._labels[index])

    def read(self, index: int) -> bytes:
        """Return the content of file ``index``; raise CorruptImage if it cannot be read."""
        path = self.path(index)
        try:
            check_regular(path)
            return Path(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a name with a null byte
            raise CorruptImage(path, reason(error, path)) from None

    def fingerprint(self) -> Fingerprint:
        """Return digests of the names, of the classes, and of the sizes of some files."""
        sizes = file_sizes(map(self.path, some_of(len(self))))
        return Fingerprint(len(self), self._names.digest(), digest([self._labels.tobytes()]), sizes)


class FolderImages(LooseFiles):
    """Image files."""

    in_memory = False

    def __init__(self, root: Path, names: list[str], labels: list[int], data: Data) -> None:
        super().__init__(root, names, labels)
        self.resolution, self.channels = data.resolution, data.image_channels

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.path(index)
        return image_tensor(open_image(path), path, self.resolution, self.channels), self.label(index)


def build_folder(data: Data) -> FolderImages:
    """List the images below ``data.root``, in the order of their paths.

    With classes, each sub-folder of the root is a class, in alphabetical order, as in torchvision's ImageFolder; images
    may lie deeper in it. Without classes, all images below the root count. Names that begin with a dot are skipped.
    """
    root = data_directory("data.root", data.root, "give the directory with the images")
    try:
        folders = {folder.name: folder for folder in class_folders(root)} if data.num_classes else {}
        if folders or (data.num_classes and image_files(root)):
            paths, labels = by_class(data, folders, image_files)
        else:
            paths = image_files(root)
            labels = [0] * len(paths)
    except OSError as error:
        raise unreadable_root(data, error) from error
    if not paths:
        raise no_images(data, "a directory with files")
    above = os.path.join(root, "")
    return FolderImages(root, [path.removeprefix(above) for path in paths], labels, data)


def by_class(
    data: Data, folders: Mapping[str, Folder], images_of: Callable[[Folder], list[Image]]
) -> tuple[list[Image], list[int]]:
    """List the images of class folders, given by name in the order of their classes, and the class of each.

    Raises:
        UserError: There are not ``data.num_classes`` folders, or some contain no images; the message names them.
    """
    if len(folders) != data.num_classes:
        raise wrong_num_classes(data, len(folders), f"class folders{some_names(list(folders))}")
    files = {name: images_of(folder) for name, folder in folders.items()}
    if empty := [name for name, found in files.items() if not found]:
        problem = f"has class folders without images{some_names(empty)}"
        remedy = f"add {', '.join(IMAGE_EXTENSIONS)} files, or remove the folders and lower data.num_classes"
        raise UserError("data.root", data.root, problem, remedy)
    each = list(files.values())
    return [image for found in each for image in found], [label for label, found in enumerate(each) for _ in found]


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


def class_folders(root: Path) -> list[Path]:
    """Return the sub-folders in the order of their classes: alphabetical, without names that begin with a dot."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def is_image(name: str) -> bool:
    """Return whether a file counts as an image, by its name.

    Names with a leading dot do not: macOS leaves files such as ._cat.jpg beside cat.jpg, which are not images.
    """
    return name.lower().endswith(IMAGE_EXTENSIONS) and not name.startswith(".")


def image_files(folder: Path) -> list[str]:
    """Return the paths of all image files below a folder, sorted; links are followed, as in ImageFolder.

    Raises:
        UserError: A link points to one of its own parent directories, or links give a directory too many paths.
        OSError: A directory cannot be read.
    """

    def fail(error: OSError) -> None:  # by default os.walk skips a folder that cannot be read
        raise error

    found = []
    visits: Counter[tuple[int, int]] = Counter()
    above = {str(folder): frozenset([_identity(folder)])}  # of each directory to visit: itself and its parents
    for directory, below, names in os.walk(folder, onerror=fail, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        way = above.pop(directory)
        for inner in (os.path.join(directory, name) for name in below):
            if (identity := _identity(inner)) in way:
                raise UserError(inner, None, "must not link to one of its parent directories", "remove that link")
            above[inner] = way | {identity}
            visits[identity] += 1
            if visits[identity] > _MOST_VISITS:  # n directories with two links each to the next make 2**n paths
                problem = f"must be reachable by at most {_MOST_VISITS} paths"
                raise UserError(inner, None, problem, "remove links to it or to its parents")
        found += [os.path.join(directory, name) for name in names if is_image(name)]
    return sorted(found)


def _identity(directory: str | Path) -> tuple[int, int]:
    found = os.stat(directory)
    return found.st_dev, found.st_ino


def wrong_num_classes(data: Data, found: int, what: str) -> UserError:
    """Return the error that the data has ``found`` classes; ``what`` describes them."""
    remedy = f"set data.num_classes={found}" + (", or 0 to train without classes" if found else "")
    detail = f"{data.root} has {found} {what}"
    return UserError("data.num_classes", data.num_classes, f"must be {found} with this data", remedy, detail)


def no_images(data: Data, wanted: str) -> UserError:
    """Return the error that there are no images; ``wanted`` describes a source that has some."""
    return UserError("data.root", data.root, "contains no images", f"give {wanted} of {', '.join(IMAGE_EXTENSIONS)}")


def unreadable_root(data: Data, error: OSError) -> UserError:
    """Return the error that the file system refuses to read."""
    return UserError("data.root", data.root, f"cannot be read: {reason(error, data.root)}", "fix its permissions")


def some_names(names: Sequence[str]) -> str:
    """Return up to four names in parentheses, for the end of a sentence."""
    shown = ", ".join(names[:4])
    return f" ({shown}{', ...' if len(names) > 4 else ''})" if names else ""
