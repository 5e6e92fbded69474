"""A return to an older checkpoint in a run's directory: files of later images are kept aside until the next save.

Only rank 0 calls these functions, while it holds the directory's lock. A kill between any two lines loses nothing:
the next start calls ``settle``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigsgan.checkpoint import returns
from bigsgan.config.run_directory import EVENT_FILES, RECORDS_FILE
from bigsgan.monitor import NOTICE
from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import parse_json, writing
from bigsgan.training.power import SNAPSHOTS
from bigsgan.training.start import Start

_REPORTS = ("metrics.jsonl", "metrics.csv", RECORDS_FILE)
_DIRECTORIES = {"samples": re.compile(r".*_([0-9]{12,})\.png"), SNAPSHOTS: re.compile("([0-9]{12,})")}
"""Names that end in the images seen, by directory."""

_log = logging.getLogger(__name__)


def settle(out: Path) -> None:
    """Finish a return after which a save is complete; undo one that was ended before. Nothing where there is none.

    Raises:
        UserError: The directory cannot be written.
    """
    directory = out / "checkpoints"
    mark = returns.read(directory)
    if mark is None:
        return
    if not returns.is_saved(directory, mark):
        undo(out)
        return
    try:
        returns.finish(directory, mark)
    except OSError as error:
        _log.warning("what the run left when it went back to %d images was not removed: %s", mark.nimg, error)


def begin(out: Path, start: Start) -> None:
    """Go back, if that is how the run starts: keep aside what the run wrote after ``start.nimg`` images.

    A start that does not ask for images forgets the last return.

    Raises:
        UserError: The directory cannot be written.
    """
    directory = out / "checkpoints"
    if not start.goes_back:
        if start.asked is None:
            with writing(directory):
                returns.forget(directory)
        return
    kept = directory / returns.LEFT
    with writing(directory):
        shutil.rmtree(kept, ignore_errors=True)
        files = {name: [path.name for path in _later(out / name, start.nimg)] for name in _DIRECTORIES}
        files[EVENT_FILES] = [path.name for path in out.glob(f"{EVENT_FILES}*")]
        returns.write(directory, returns.Return(start.nimg, dict(start.left), files))
        kept.mkdir()
        for name in _REPORTS:
            if (out / name).is_file():
                with replacing(kept / name) as copy:
                    shutil.copyfile(out / name, copy)
        for name in _DIRECTORIES:
            _move(files[name], out / name, kept / name)
        if (kept / RECORDS_FILE).exists():
            lines = (kept / RECORDS_FILE).read_bytes().splitlines(True)
            _write(out / RECORDS_FILE, [line for line in lines if _nimg(line) <= start.nimg])
    if start.left:
        others = ", ".join(str(int(name)) for name in sorted(start.left))
        text = "going back to %d images; the checkpoints at %s stay until the next save is complete"
        _log.log(NOTICE, text, start.nimg, others)


def undo(out: Path) -> None:
    """Put everything back that a return has moved, and forget it.

    Raises:
        UserError: The directory cannot be written.
    """
    directory = out / "checkpoints"
    kept, mark = directory / returns.LEFT, returns.read(directory)
    if mark is None or mark.saved:
        return
    with writing(directory):
        returns.put_back(directory)
        for name in _DIRECTORIES:
            for path in _later(out / name, mark.nimg):  # of training since
                if path.name not in mark.files.get(name, []):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            _move(mark.files.get(name, []), kept / name, out / name)
        for path in out.glob(f"{EVENT_FILES}*"):
            if path.name not in mark.files.get(EVENT_FILES, []):
                path.unlink()
        if (kept / RECORDS_FILE).exists():
            _merge(kept / RECORDS_FILE, out / RECORDS_FILE, mark.nimg)
        for name in _REPORTS:
            if (kept / name).exists():
                os.replace(kept / name, out / name)
        shutil.rmtree(kept, ignore_errors=True)
        returns.forget(directory)
    if mark.left:
        text = "the return to %d images ended before a save: the checkpoints after it count again"
        _log.log(NOTICE, text, mark.nimg)


def drop_measurements(out: Path, nimg: int) -> None:
    """Remove what training has measured after ``nimg`` images, at which it goes on.

    Raises:
        UserError: The file cannot be written.
    """
    path = out / RECORDS_FILE
    if not path.is_file():
        return
    with writing(path):
        lines = path.read_bytes().splitlines(True)
        kept = [line for line in lines if _nimg(line) <= nimg or _said(line, "by") != "train"]
        if len(kept) < len(lines):
            _write(path, kept)


def _later(directory: Path, nimg: int) -> Iterator[Path]:
    """Yield what a directory has of more than ``nimg`` images."""
    name = _DIRECTORIES[directory.name]
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        found = name.fullmatch(path.name)
        if found and int(found[1]) > nimg:
            yield path


def _move(names: list[str], source: Path, target: Path) -> None:
    """Move those of the files that are still there; they replace others of their names."""
    for path in (source / name for name in names):
        if not os.path.lexists(path):
            continue
        target.mkdir(parents=True, exist_ok=True)
        if (target / path.name).is_dir():
            shutil.rmtree(target / path.name)
        os.replace(path, target / path.name)


def _merge(kept: Path, now: Path, nimg: int) -> None:
    """Add records to the file that was kept aside which came since, of checkpoints of at most ``nimg`` images."""
    before = kept.read_bytes().splitlines(True)
    new = now.read_bytes().splitlines(True) if now.exists() else []
    _write(kept, before + [line for line in new if line not in before and _nimg(line) <= nimg])


def _write(path: Path, lines: list[bytes]) -> None:
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"".join(lines))


def _nimg(line: bytes) -> float:
    """Return the images seen of a record; 0 where it does not say so, as it then stays."""
    nimg = _said(line, "nimg")
    return nimg if isinstance(nimg, int | float) else 0


def _said(line: bytes, key: str) -> Any:
    """Return what a record says of a key; None where it says nothing."""
    try:
        return parse_json(line)[key]
    except (ValueError, TypeError, KeyError):
        return None
