"""A run that goes back to an older checkpoint, and the newer ones that it leaves.

    checkpoints/returned.json            the images of the older one, and the names and checksums of the newer ones
    checkpoints/left/                    the run's other files of later images

The newer ones stay in place until the next save is complete, which removes them. If a kill comes before it, they count
again: only the training loop, which is told of them, passes them over.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from bigsgan.checkpoint.tags import PARTIAL, Checkpoint, complete, remove
from bigsgan.errors import UserError, reason
from bigsgan.runtime.atomic import write_text
from bigsgan.runtime.paths import parse_json, read_text

MARK = "returned.json"
LEFT = "left"

_REPLACED = re.compile(rf"([0-9]+)\.damaged{re.escape(PARTIAL)}")
_MOST_MARK_BYTES = 1 << 26


class Return(NamedTuple):
    """What a run remembers of its last return."""

    nimg: int  # images of the checkpoint to which it went back
    left: dict[str, str]  # checksums of the manifests of newer checkpoints, by tag
    files: dict[str, list[str]]  # files of later images that were there, by directory
    saved: bool = False  # whether a save has been complete since


def read(directory: Path) -> Return | None:
    """Return the last return of the run with these ``checkpoints``, or None.

    Raises:
        UserError: Its file is damaged.
    """
    path = directory / MARK
    try:
        found = parse_json(read_text(path, _MOST_MARK_BYTES))
        return Return(int(found["nimg"]), dict(found["left"]), dict(found["files"]), bool(found["saved"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(str(path), None, f"cannot be read: {reason(error, path)}", "give another `out`") from None
    except (ValueError, KeyError, TypeError):
        remedy = "remove that file: the newest checkpoint counts again"
        raise UserError(str(path), None, "is damaged", remedy) from None


def write(directory: Path, mark: Return) -> None:
    """Remember a return.

    Raises:
        OSError: The file cannot be written.
    """
    write_text(directory / MARK, json.dumps(mark._asdict(), indent=1) + "\n")


def forget(directory: Path) -> None:
    """Forget a return; the checkpoints that it left, if they are there, count again."""
    (directory / MARK).unlink(missing_ok=True)


def is_saved(directory: Path, mark: Return) -> bool:
    """Return whether the run has saved a checkpoint since it went back."""
    return mark.saved or any(c.nimg > mark.nimg and not _is_left(c, mark) for c in complete(directory))


def left(directory: Path, mark: Return) -> list[Checkpoint]:
    """Return the checkpoints that the run has left and that are still there, newest first."""
    return [each for each in complete(directory) if _is_left(each, mark)] if mark.left else []


def put_back(directory: Path) -> None:
    """Put checkpoints back that a save was about to replace when it was killed."""
    for path in directory.glob(f"*{PARTIAL}"):
        found = _REPLACED.fullmatch(path.name)
        if found and not os.path.lexists(directory / found[1]):
            os.replace(path, directory / found[1])


def finish(directory: Path, mark: Return) -> None:
    """Remove what the run has left, once a save is complete.

    Raises:
        OSError: Something cannot be removed; it is passed over as before.
    """
    for each in left(directory, mark):
        remove(each.path)
    note_saved(directory)


def note_saved(directory: Path) -> None:
    """Note that a save is complete which has removed the checkpoints that the run left; remove its other files."""
    mark = read(directory)
    if mark is not None and not mark.saved:
        write(directory, Return(mark.nimg, {}, {}, saved=True))
    shutil.rmtree(directory / LEFT, ignore_errors=True)


def _is_left(checkpoint: Checkpoint, mark: Return) -> bool:
    return mark.left.get(checkpoint.path.name) == checkpoint.manifest["sha256"]
