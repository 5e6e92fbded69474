"""Checkpoint tags on disk: finds, verifies and removes them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bigsgan.checkpoint.entries import ObjectCollectives, SingleProcess
from bigsgan.checkpoint.files import Moved, checksum, unnoticed
from bigsgan.config.sections import Checkpoints
from bigsgan.errors import UserError, reason
from bigsgan.runtime.collective_errors import by_rank_zero, compared, first_told
from bigsgan.runtime.paths import check_regular, parse_json, read_text

FORMAT = 2
MANIFEST = "manifest.json"
PARTIAL = ".partial"
"""Suffix of a directory that is being written."""

IMPORTED = "imported"
"""Key of a manifest's layout that names the source of imported weights."""

_NAME = re.compile("[0-9]+")
_DIVISION = ".division"
"""Suffix of the keys of a manifest's layout that give the bounds of stages."""

HASHING_THREADS = 8
_MOST_MANIFEST_BYTES = 1 << 26
_MOST_COUNT = 1 << 63
_MANIFEST_TYPES = {
    "format": int, "nimg": int, "world_size": int, "layout": dict, "recipe": dict, "metrics": dict, "numbers": dict,
    "kinds": dict, "files": dict, "holders": dict, "sha256": str,
}  # fmt: skip

Choice = TypeVar("Choice")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @property
    def nimg(self) -> int:
        """Images seen when it was saved."""
        return int(self.manifest["nimg"])

    @property
    def layout(self) -> dict[str, Any]:
        """Layout of the networks over the ranks that saved it."""
        return dict(self.manifest["layout"])

    @property
    def entries(self) -> set[str]:
        """Names of the saved entries."""
        return set(self.manifest["numbers"])

    @property
    def is_imported(self) -> bool:
        """Whether it holds imported weights, from which a run starts, instead of a run's state."""
        return IMPORTED in self.layout

    @property
    def is_regular(self) -> bool:
        """Whether it was due by its recipe's ``checkpoint_nimg``; a stop, or a script, saves others."""
        interval, batch = (self.manifest["recipe"].get(key) for key in ("checkpoint_nimg", "batch"))
        return not interval or not batch or self.nimg % interval < batch

    @property
    def divisions(self) -> dict[str, list[int]]:
        """Bounds of each network's pipeline stages, by network."""
        return {
            key.removesuffix(_DIVISION): bounds
            for key, bounds in self.layout.items()
            if key.endswith(_DIVISION) and bounds is not None
        }


def newest(directory: Path, passed_over: Collection[Path] = ()) -> Checkpoint | None:
    """Return the newest complete checkpoint in ``checkpoints`` of a run, or None if it has not saved any.

    Raises:
        UserError: All checkpoints are damaged, or the newest has the format of another version.
    """
    found = newest_or_none(directory, passed_over)
    if found is not None and (newer := newer_of_another_version(directory, found)):
        path, problem, remedy = newer
        raise UserError(str(path), None, problem, remedy)
    if found is None and (found_tags := _tags(directory)):
        remedy = "restore an intact copy, or remove that directory to start a new run"
        answer = "contains only damaged checkpoints", remedy
        raise UserError(str(directory), None, *(_of_other_versions(found_tags) or answer))
    return found


def newest_or_none(directory: Path, passed_over: Collection[Path] = (), bad: Collection[str] = ()) -> Checkpoint | None:
    """Return the newest complete checkpoint that is not in ``passed_over``, nor has a checksum in ``bad``, or None."""
    found = (c for c in complete(directory) if c.path not in passed_over and c.manifest["sha256"] not in bad)
    return next(found, None)


def find(
    run: Path,
    nimg: int | None = None,
    passed_over: Collection[Path] = (),
    fields: tuple[str, str] = ("--run", "--nimg"),
) -> Checkpoint:
    """Return a run's newest complete checkpoint, or the one at ``nimg`` images, but never a tag in ``passed_over``.

    ``fields`` are the options or keys that gave the run directory and the images seen, for messages.

    Raises:
        UserError: There is no such checkpoint, or the newest one has the format of another version.
    """
    run_field, nimg_field = fields
    directory = run / "checkpoints"
    found = list(complete(directory))
    if not found:
        answer = "has no complete checkpoint", "give the `out` directory of a run that has saved one"
        raise UserError(run_field, str(run), *(_of_other_versions(_tags(directory)) or answer))
    left = [checkpoint for checkpoint in found if checkpoint.path not in passed_over]
    if not left:
        raise UserError(run_field, str(run), "contains only damaged checkpoints", "restore an intact copy")
    if nimg is None:
        if newer := newer_of_another_version(directory, left[0]):
            path, problem, _ = newer
            remedy = f"use that version, or give {nimg_field} to choose from {', '.join(str(c.nimg) for c in left)}"
            raise UserError(run_field, str(run), f"has the checkpoint {path.name}, which {problem}", remedy)
        return left[0]
    for checkpoint in left:
        if checkpoint.nimg == nimg:
            return checkpoint
    known = ", ".join(str(c.nimg) for c in left)
    if other := _of_other_versions([path for path in _tags(directory) if int(path.name) == nimg]):
        raise UserError(nimg_field, nimg, other[0], f"use that version, or choose from {known}")
    is_damaged = len(left) < len(found) and any(c.nimg == nimg for c in found)
    detail = "that checkpoint is damaged" if is_damaged else ""
    raise UserError(nimg_field, nimg, "must be a saved checkpoint", f"choose from {known}", detail)


def find_intact(
    run: Path,
    nimg: int | None = None,
    needed: Callable[[Checkpoint], Collection[str]] | None = None,
    ranks: ObjectCollectives | None = None,
) -> Checkpoint:
    """Like ``find``, but verify the files ``needed`` of a checkpoint, and skip damaged checkpoints.

    With ``ranks``, a collective: they share the work, and find the same checkpoint even while a run saves others.

    Raises:
        UserError: There is no intact checkpoint, or the one at ``nimg`` is damaged.
    """
    all_ranks = ranks or SingleProcess()

    def choose(passed_over: Collection[Path]) -> Checkpoint:
        return by_rank_zero(all_ranks, lambda: find(run, nimg, passed_over))

    def look(found: Checkpoint) -> str | None:
        return damage(found, all_ranks, None if needed is None else by_rank_zero(all_ranks, lambda: needed(found)))

    return first_intact(choose, lambda found: found, look)


def first_intact(
    choose: Callable[[Collection[Path]], Choice],
    checkpoint_of: Callable[[Choice], Checkpoint | None],
    look: Callable[[Checkpoint], str | None],
) -> Choice:
    """Choose until the chosen checkpoint is intact; skip damaged ones with a warning.

    Args:
        choose: Called with the tags skipped so far; must choose the same on all ranks.
        checkpoint_of: Returns the checkpoint of a choice; None if there is none to verify.
        look: Describes the damage, the same on all ranks, or returns None; see ``damage``.
    """
    passed_over: list[Path] = []
    while True:
        choice = choose(passed_over)
        found = checkpoint_of(choice)
        if found is None or (problem := look(found)) is None:
            return choice
        _log.warning("skipping %s: %s", found.path, problem)
        passed_over.append(found.path)


def damage(
    checkpoint: Checkpoint, ranks: ObjectCollectives, names: Collection[str] | None = None, moved: Moved = unnoticed
) -> str | None:
    """Compare every byte with the manifest's checksums; the ranks share the work. A collective.

    ``names`` are the files to check, the same on all ranks; None means all files.

    Returns:
        A description of the damage, the same on all ranks, or None.
    """
    own = sorted(checkpoint.manifest["files"] if names is None else names)[ranks.rank() :: ranks.world_size()]
    with ThreadPoolExecutor(HASHING_THREADS) as threads:  # hashing and reading release Python's lock
        found = next(filter(None, threads.map(partial(damage_of, checkpoint, moved=moved), own)), None)
        threads.shutdown(cancel_futures=True)
    return compared(ranks, found, first_told)


def damage_of(checkpoint: Checkpoint, name: str, moved: Moved) -> str | None:
    """Compare a file with its checksum. Return a description of damage, or None. To stop, ``moved`` may raise."""
    try:
        same = checksum(checkpoint.path / name, moved) == checkpoint.manifest["files"][name]["sha256"]
    except OSError as error:
        return f"{name} cannot be read: {reason(error)}"
    return None if same else f"the checksum of {name} differs from the manifest's"


def prune(directory: Path, section: Checkpoints, newest_nimg: int, bad: Collection[str] = ()) -> None:
    """Remove the checkpoints that the recipe does not ask to keep; one rank calls this.

    Those with a checksum in ``bad`` go. Others after ``newest_nimg``, the one just saved, stay: they are damaged, or
    belong to an earlier attempt.
    """
    found = []
    for each in complete(directory):
        if each.manifest["sha256"] in bad and each.nimg != newest_nimg:  # which may be the same once more
            remove(each.path)
        elif each.nimg <= newest_nimg:
            found.append(each)
    kept = {c.path for c in found[: section.keep]}
    if section.keep_every_nimg:
        kept |= _milestones(found, section.keep_every_nimg)
    if section.keep_best and (top := best(found, section.keep_best.metric, section.keep_best.goal == "max")):
        kept.add(top.path)
    for old in found:
        if old.path not in kept:
            remove(old.path)


def remove_newer(directory: Path, nimg: int) -> None:
    """Remove the tags of more than ``nimg`` images; one rank calls this.

    Raises:
        OSError: A tag cannot be removed.
    """
    for path in _tags(directory):
        if int(path.name) > nimg:
            remove(path)


def remove(path: Path) -> None:
    """Remove a tag; one rank calls this."""
    going = path.with_name(f"{path.name}.old{PARTIAL}")  # renamed, so that a kill does not leave half a tag
    os.replace(path, going)
    shutil.rmtree(going, ignore_errors=True)


def _milestones(found: list[Checkpoint], every: int) -> set[Path]:
    """Return the first tag at or after each multiple of ``every`` images, one of the run's interval if there is one."""
    first = {}
    for checkpoint in sorted(found, key=lambda c: (c.is_regular, -c.nimg)):  # a later one replaces an earlier one
        first[checkpoint.nimg // every] = checkpoint.path
    return {path for reached, path in first.items() if reached}


def best(found: list[Checkpoint], metric: str, highest: bool) -> Checkpoint | None:
    """Return the checkpoint with the best value of a metric, of those found, newest first."""
    # Oldest first, as one that a stop saves has the value that was reported with another.
    known = [c for c in reversed(found) if math.isfinite(c.manifest["metrics"].get(metric, math.nan))]
    return (max if highest else min)(known, key=lambda c: float(c.manifest["metrics"][metric]), default=None)


def complete(directory: Path) -> Iterator[Checkpoint]:
    """Yield complete checkpoints, newest first; skip and log incomplete ones."""
    for path in _tags(directory):
        try:
            manifest = _read_manifest(path)
            if manifest["format"] != FORMAT:
                text = "skipping %s: it has format %s of another version, this version reads format %d"
                _log.warning(text, path, manifest["format"], FORMAT)
                continue
            for name in manifest["files"]:
                check_regular(path / name)
            sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
            described = {name: file["bytes"] for name, file in manifest["files"].items()}
            fits = sizes == described and int(path.name) == manifest["nimg"]
            fits &= sealed(manifest)["sha256"] == manifest["sha256"]
            is_complete = fits and _is_well_formed(manifest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("skipping %s: it is not complete: %s", path, error)
            continue
        if not is_complete:
            _log.warning("skipping %s: its files differ from its manifest", path)
            continue
        yield Checkpoint(path, manifest)


def _read_manifest(path: Path) -> Any:
    return parse_json(read_text(path / MANIFEST, _MOST_MANIFEST_BYTES))


def _is_well_formed(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest's values have the types that the rest of the program expects."""
    if not all(type(manifest.get(key)) is kind for key, kind in _MANIFEST_TYPES.items()):
        return False
    divisions = [bounds for key, bounds in manifest["layout"].items() if key.endswith(_DIVISION)]
    return (
        all("/" not in name for name in manifest["files"])
        and all(
            isinstance(value, dict) and all(map(_is_number, value.values())) for value in manifest["numbers"].values()
        )
        and _are_counts(manifest["numbers"].get("counters", {}), manifest["nimg"])
        and all(isinstance(value, list) for value in manifest["kinds"].values())
        and _are_numbers(manifest["holders"], len(manifest["files"]))
        and all(isinstance(value, int | float | None) for value in manifest["metrics"].values())
        and all(type(bound) is int for bounds in divisions if bounds is not None for bound in bounds)
    )


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST_COUNT)


def _are_numbers(holders: Mapping[str, Any], num_files: int) -> bool:
    """Return whether texts such as "0-7 9" have numbers of files alone."""
    found = {number for text in holders.values() for number in re.split("[ -]", text)}
    return all(number.isdecimal() and int(number) < num_files for number in found)


def _are_counts(counts: Mapping[str, Any], nimg: int) -> bool:
    """Return whether counters are natural numbers, fit ``nimg``, and have both bounds of each skipped interval."""
    bounded = [[key.rpartition(".")[0] for key in counts if key.endswith(end)] for end in (".first", ".end")]
    natural = all(type(value) is int and value >= 0 for value in counts.values())
    return natural and counts.get("nimg", nimg) == nimg and sorted(bounded[0]) == sorted(bounded[1])


def _of_other_versions(paths: list[Path]) -> tuple[str, str] | None:
    """Return problem and remedy if another version of bigsgan can read some of the tags; otherwise None."""
    found = [other_format(path) for path in paths]
    others = {number for number in found if number is not None}
    if not others:
        return None
    version = "an older" if max(others) < FORMAT else "a newer" if min(others) > FORMAT else "another"
    version += " version"
    format_ = f"format {' and '.join(map(str, sorted(others)))} of {version}, this version reads format {FORMAT}"
    if others.issuperset(found):
        return f"has {format_}", "finish the run with that version, or start a new `out`"
    problem = f"contains damaged checkpoints, and others with {format_}"
    return problem, "restore an intact copy, finish the run with that version, or start a new `out`"


def newer_of_another_version(directory: Path, found: Checkpoint) -> tuple[Path, str, str] | None:
    """Return the newest tag that another version saved after ``found``, with problem and remedy."""
    answers = ((path, _of_other_versions([path])) for path in _tags(directory) if int(path.name) > found.nimg)
    return next(((path, *answer) for path, answer in answers if answer), None)


def other_format(path: Path) -> int | None:
    """Return the format of a tag of another version of bigsgan; None if it is this version's or unreadable."""
    try:
        number = _read_manifest(path)["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and number != FORMAT else None


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with the checksum of its own content."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return one line for each key of a layout that differs."""
    return [
        f"{key}: {saved.get(key)!r} -> {given.get(key)!r}"
        for key in sorted(saved.keys() | given.keys())
        if saved.get(key) != given.get(key)
    ]


def _tags(directory: Path) -> list[Path]:
    """Return the directories of finished saves, newest first."""
    try:
        return [directory / n for n in sorted(filter(_NAME.fullmatch, os.listdir(directory)), key=int)][::-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        problem = f"cannot be read: {reason(error, directory)}"
        raise UserError(str(directory), None, problem, "give another `out`") from None
