"""Checkpoints: one directory holds everything a run must find again, complete or not at all.

    checkpoints/000000016384/            named after the images seen
        rank00000.safetensors            that rank's tensors; its metadata says what lies where in each shard
        manifest.json                    numbers, sizes, layout; written last
    checkpoints/latest                   text file: the newest directory's name

A directory is written under another name and renamed once every rank has finished, so a killed save leaves nothing
that looks like a checkpoint. What it does leave, the next save removes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bigsgan.atomic import fsync, write_text
from bigsgan.errors import UserError

FORMAT = 1
_MANIFEST = "manifest.json"
_MANIFEST_KEYS = {"format", "nimg", "world_size", "layout", "numbers", "files"}
_PARTIAL = ".partial"
_log = logging.getLogger(__name__)


IMPORTED = "imported"
"""Key of a manifest's layout that names the source of imported weights."""


class SavedEntry(Protocol):
    """One named part of what a checkpoint holds."""

    def tensors(self) -> dict[str, Tensor]:
        """This rank's tensors."""
        ...

    def numbers(self) -> dict[str, float]:
        """Numbers, the same on all ranks."""
        ...

    def layout(self) -> dict[str, list[Any]]:
        """For each flat tensor of ``tensors``, the pieces of parameters that lie in it (engines.base.Piece)."""
        ...


class StateEntry(SavedEntry, Protocol):
    """One named part of a run's state, which saves and loads itself; see training/state.py."""

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Restore what ``tensors`` and ``numbers`` gave."""
        ...


class Ranks(Protocol):
    """The collectives that saving and loading need; the module ``bigsgan.comm`` has them."""

    def rank(self) -> int: ...  # noqa: D102
    def world_size(self) -> int: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
    def any_rank(self, flag: bool) -> bool: ...  # noqa: D102
    def total(self, value: float) -> float: ...  # noqa: D102


class OneRank:
    """The collectives of a single process, without a process group."""

    def rank(self) -> int:  # noqa: D102
        return 0

    def world_size(self) -> int:  # noqa: D102
        return 1

    def barrier(self) -> None:  # noqa: D102
        pass

    def any_rank(self, flag: bool) -> bool:  # noqa: D102
        return flag

    def total(self, value: float) -> float:  # noqa: D102
        return value


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @property
    def nimg(self) -> int:
        """Images seen when it was saved."""
        return int(self.manifest["nimg"])


def save(directory: Path, nimg: int, entries: Mapping[str, SavedEntry], layout: dict[str, Any], ranks: Ranks) -> bool:
    """Save all entries under one tag; every rank calls this.

    Args:
        directory: ``checkpoints`` of the run.
        nimg: Images seen.
        entries: The state, by name.
        layout: What a resumed run must share: kept in the manifest.
        ranks: The collectives.

    Returns:
        False if a rank lacked disk space or could not write; the older checkpoints are untouched.
    """
    tag = f"{nimg:012d}"
    partial = directory / f"{tag}{_PARTIAL}"
    is_first = ranks.rank() == 0

    def begin() -> None:
        if is_first:
            for left in directory.glob(f"*{_PARTIAL}"):  # by a save that was killed; before the space is counted
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True, exist_ok=True)

    def finish() -> None:
        if is_first:
            _write_manifest(partial, nimg, entries, layout, ranks.world_size())
            shutil.rmtree(directory / tag, ignore_errors=True)
            os.replace(partial, directory / tag)
            fsync(directory)
            write_text(directory / "latest", tag + "\n")

    def check() -> None:
        _check_space(partial, ranks, entries)

    for phase in (begin, check, lambda: _write_rank(partial, ranks, entries), finish):
        failed = False
        try:
            phase()
        except (OSError, SafetensorError, UserError) as error:
            failed = True
            _log.warning("checkpoint at %d images was not saved: %s", nimg, error)
        if ranks.any_rank(failed):  # waits for all ranks too
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
            ranks.barrier()
            return False
    return True


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints; one rank calls this."""
    for old in list(_complete(directory))[keep:]:
        shutil.rmtree(old.path, ignore_errors=True)


def newest(directory: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, or None where nothing was saved.

    Raises:
        UserError: There are checkpoints and all of them are damaged.
    """
    found = next(_complete(directory), None)
    if found is None and _tags(directory):
        remedy = "put an undamaged copy back, or remove that directory to start anew"
        raise UserError(str(directory), None, "holds damaged checkpoints only", remedy)
    return found


def find(run: Path, nimg: int | None = None) -> Checkpoint:
    """Return a run's newest checkpoint, or the one at ``nimg`` images.

    Raises:
        UserError: There is none.
    """
    found = list(_complete(run / "checkpoints"))
    if not found:
        raise UserError(
            "--run", str(run), "holds no complete checkpoint", "give the `out` directory of a run that has saved"
        )
    if nimg is None:
        return found[0]
    for checkpoint in found:
        if checkpoint.nimg == nimg:
            return checkpoint
    known = ", ".join(str(c.nimg) for c in found)
    raise UserError("--nimg", nimg, "is no saved checkpoint", f"choose from {known}")


def saved_divisions(checkpoint: Checkpoint, layout: dict[str, Any]) -> dict[str, list[int]]:
    """How networks are divided into pipeline stages, by network, which a run that goes on has to keep.

    Args:
        checkpoint: Where from.
        layout: Of the run, as far as it is known before its engines are built.

    Raises:
        UserError: The layout differs.
    """
    _refuse_other_layout(checkpoint, layout)
    ending = ".division"
    return {
        key.removesuffix(ending): bounds
        for key, bounds in checkpoint.manifest["layout"].items()
        if key.endswith(ending) and bounds is not None
    }


def load(checkpoint: Checkpoint, entries: Mapping[str, StateEntry], layout: dict[str, Any], ranks: Ranks) -> None:
    """Restore all entries on the layout that they were saved on; every rank calls this.

    Raises:
        UserError: The layout differs, or a file is damaged.
    """
    _refuse_other_layout(checkpoint, layout)
    path = checkpoint.path / _rank_file(ranks.rank())
    with _opened(path) as file:
        names = list(file.keys())
        if file.metadata().get("layout") != _layout_text(entries):
            raise UserError(
                str(path),
                None,
                "holds weights in another order or division than this run's DeepSpeed files make",
                "resume with the files that the run directory keeps (ds_generator.json and ds_discriminator.json)",
            )
        for entry_name, entry in entries.items():
            prefix = f"{entry_name}."
            tensors = {n.removeprefix(prefix): file.get_tensor(n) for n in names if n.startswith(prefix)}
            entry.load(tensors, checkpoint.manifest["numbers"][entry_name])


def read_parameters(checkpoint: Checkpoint, entry: str, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Put the whole float32 parameters and buffers of an entry together in one process, whatever layout saved them.

    Args:
        checkpoint: Where from.
        entry: ``generator``, ``discriminator`` or ``average``.
        shapes: Shape of each parameter.

    Raises:
        UserError: A file is damaged, or does not hold every element.
    """
    flat = {name: torch.empty(shape.numel()) for name, shape in shapes.items()}
    missing = {name: shape.numel() for name, shape in shapes.items()}
    buffers: dict[str, Tensor] = {}
    for rank in range(checkpoint.manifest["world_size"]):
        path = checkpoint.path / _rank_file(rank)
        with _opened(path) as file:
            layout = json.loads(file.metadata()["layout"])[entry]
            for shard, pieces in layout.items():
                values = file.get_slice(f"{entry}.{shard}")
                for name, offset, numel, start in pieces:
                    if name not in shapes or offset + numel > shapes[name].numel():
                        raise ValueError(f"{name} has {offset + numel} elements or more, not as in its recipe")
                    flat[name][offset : offset + numel] = values[start : start + numel]
                    missing[name] -= numel
            prefix = f"{entry}.buffer."
            names = {n.removeprefix(prefix) for n in file.keys() if n.startswith(prefix)} - buffers.keys()  # noqa: SIM118
            buffers.update({name: file.get_tensor(prefix + name) for name in names})
        if all(left <= 0 for left in missing.values()):
            break  # at stage 0 every rank holds everything
    for name, left in missing.items():
        if left > 0:
            problem = f"lacks {left} elements of {name}, which its recipe has"
            raise UserError(str(checkpoint.path), None, problem, "use another checkpoint (--nimg)")
    return {**{name: values.view(shapes[name]) for name, values in flat.items()}, **buffers}


def _refuse_other_layout(checkpoint: Checkpoint, layout: dict[str, Any]) -> None:
    saved = checkpoint.manifest["layout"]
    for key, value in layout.items():
        if saved.get(key) != value:
            raise UserError(
                f"{checkpoint.path}: {key}",
                value,
                f"was {saved.get(key)!r} when the checkpoint was saved",
                f"resume with {saved.get(key)!r}, or start another run with another `out`",
            )


def _layout_text(entries: Mapping[str, SavedEntry]) -> str:
    return json.dumps({name: entry.layout() for name, entry in entries.items()})


def _check_space(partial: Path, ranks: Ranks, entries: Mapping[str, SavedEntry]) -> None:
    """Compare what all ranks will write into one directory with the space there."""
    needed = ranks.total(sum(t.numel() * t.element_size() for t in _tensors(entries).values()))
    free = shutil.disk_usage(partial).free
    if free < needed * 1.05:
        raise UserError(
            str(partial),
            None,
            f"has {free / 2**30:.1f} GiB free and the ranks write {needed / 2**30:.1f} GiB",
            "free some space, or lower keep_checkpoints",
        )


def _write_rank(partial: Path, ranks: Ranks, entries: Mapping[str, SavedEntry]) -> None:
    path = partial / _rank_file(ranks.rank())
    tensors = {name: tensor.detach().contiguous() for name, tensor in _tensors(entries).items()}
    save_file(tensors, path, metadata={"format": str(FORMAT), "layout": _layout_text(entries)})
    fsync(path)


def _tensors(entries: Mapping[str, SavedEntry]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, entry in entries.items() for key, value in entry.tensors().items()}


def _write_manifest(
    partial: Path, nimg: int, entries: Mapping[str, SavedEntry], layout: dict[str, Any], world_size: int
) -> None:
    manifest = {
        "format": FORMAT,
        "nimg": nimg,
        "world_size": world_size,
        "layout": layout,
        "numbers": {name: entry.numbers() for name, entry in entries.items()},
        "files": {path.name: path.stat().st_size for path in sorted(partial.glob("*.safetensors"))},
    }
    write_text(partial / _MANIFEST, json.dumps(manifest, indent=1))
    fsync(partial)


def _complete(directory: Path) -> Iterator[Checkpoint]:
    """Complete checkpoints, newest first; what is not complete is passed over and logged."""
    for path in _tags(directory):
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
            sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
            fits = sizes == manifest["files"] and manifest["format"] == FORMAT and int(path.name) == manifest["nimg"]
            complete = fits and manifest.keys() >= _MANIFEST_KEYS
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("passing over %s, which is not complete (%s)", path, error)
            continue
        if not complete:
            _log.warning("passing over %s, whose files are not those that its manifest describes", path)
            continue
        yield Checkpoint(path, manifest)


def is_imported(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds imported weights, from which a run begins, and not a run's state."""
    return IMPORTED in checkpoint.manifest["layout"]


def _tags(directory: Path) -> list[Path]:
    """Directories of finished saves, newest first."""
    try:
        return sorted((path for path in directory.iterdir() if path.name.isdigit()), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(str(directory), None, f"cannot be read ({error})", "give another `out`") from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a rank's file, and blame it for what is missing or wrong in it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        remedy = "remove that checkpoint's directory to use an older one"
        raise UserError(str(path), None, f"is damaged ({type(error).__name__}: {error})", remedy) from error


def _rank_file(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"
