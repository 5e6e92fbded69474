"""Lists the images that `bigsgan data prepare` converts."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from bigsgan.data.datasets import class_folders, data_directory, image_files, is_image, some_names
from bigsgan.errors import UserError, reason


class Source(NamedTuple):
    """The images that `bigsgan data prepare` converts, in the order of their paths."""

    root: Path
    classes: list[str]  # names of the class folders; empty if the images have no classes
    paths: list[str]
    labels: list[int]

    def digest(self) -> str:
        """Return the hash of paths, sizes and modification times, which changes when a file does."""
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                found = os.stat(path)
                state = f"{found.st_size} {found.st_mtime_ns}"
            except OSError:  # a broken link: an unreadable image
                state = "unreadable"
            digest.update(os.fsencode(path.removeprefix(f"{self.root}/")) + f"\0{state}\n".encode())
        return digest.hexdigest()


def list_source(root: Path) -> Source:
    """Find the images of a directory.

    Raises:
        UserError: It is not a directory of images, or of class folders with images.
    """
    data_directory("SRC", str(root), "give the directory with the images")
    try:
        loose = sorted(str(entry) for entry in root.iterdir() if is_image(entry.name) and not entry.is_dir())
        files = {folder.name: image_files(folder) for folder in class_folders(root)}
    except OSError as error:
        raise UserError("SRC", str(root), f"cannot be read: {reason(error, root)}", "fix its permissions") from error
    filled, empty = [name for name in files if files[name]], [name for name in files if not files[name]]
    if not filled and not loose:
        remedy = "give a directory with images, or with a folder for each class"
        raise UserError("SRC", str(root), "contains no images", remedy)
    if not filled:
        return Source(root, [], loose, [0] * len(loose))
    if loose:
        problem = f"contains images beside its class folders{some_names([Path(path).name for path in loose])}"
        raise UserError("SRC", str(root), problem, "move them into the folder of their class, or elsewhere")
    if empty:
        problem = f"has class folders without images{some_names(empty)}"
        raise UserError("SRC", str(root), problem, "fill or remove them")
    for name in filled:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # Python's escapes of bytes that are not UTF-8
            raise UserError("SRC", str(root), f"has a class folder whose name is not UTF-8, {name!r}", "rename it")
    labels = [label for label, name in enumerate(filled) for _ in files[name]]
    return Source(root, filled, [path for name in filled for path in files[name]], labels)
