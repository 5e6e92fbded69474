"""Checks that a checkpoint has the same bits when another layout reads it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigsgan import checkpoint
from bigsgan.config.sections import Checkpoints
from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.doctor.games import both, stages
from bigsgan.doctor.runs import Game, exact, running
from bigsgan.doctor.storage import directory_of
from bigsgan.errors import reason
from bigsgan.runtime import comm
from bigsgan.training.loop import Run

_ADAM = [  # with and without a first moment
    "optimizer.generator={kind: adam, lr: 1e-3, betas: [0.5, 0.9]}",
    "optimizer.discriminator={kind: adam, lr: 1e-3}",
    "objective.lecam={weight: 0.3, decay: 0.5}",
]


def checkpoints(subject: Subject) -> Finding:
    """Save at ZeRO 1, read at ZeRO 3, save again, read in stages if the number of ranks is even, and compare bits."""
    layouts: list[tuple[str, list[str], Any]] = [("ZeRO 1", [], both(1)), ("ZeRO 3", [], both(3))]
    if comm.world_size() % 2 == 0:
        layouts.append(("stages", stages(2, 2), both(0)))
    directory = _shared_directory(subject)
    try:
        before: dict[str, bytes] = {}
        found, differs = None, ""
        done: list[str] = []
        with exact():
            for name, options, ds in layouts:
                with running(Game(name, [*_ADAM, *options], ds), found) as loop:
                    now = _whole(loop.run)
                    if before and not differs:
                        differs = _difference(before, now, f"read in layout {name}, saved in {done[-1]}")
                    loop()
                    before = _whole(loop.run)
                    save(loop.run, directory)
                done.append(name)
                comm.barrier()
                found = checkpoint.newest(directory)
        damaged = checkpoint.damage(found, comm) if found is not None else "no checkpoint was found"
        comm.barrier()
    finally:
        if comm.rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
    numbers = {"layouts": done, "values": len(before), "differs": differs, "bound": 0}
    if differs or damaged:
        remedy = "look at the disk and the file system of `out` (dmesg, fsck); keep no checkpoint of this machine"
        return failed(differs or str(damaged), remedy, numbers)
    return passed(f"{len(before)} values are the same bits in {', '.join(done)}", numbers)


def _shared_directory(subject: Subject) -> Path:
    """Make a directory where a run would write; if rank 0 cannot make it, all ranks raise OSError together."""
    made = problem = ""
    if subject.ranks.rank == 0:
        parent = directory_of(subject.out)
        try:
            made = tempfile.mkdtemp(prefix=".doctor-", dir=parent)
        except OSError as error:
            problem = f"{parent} cannot be written: {reason(error)}"
    made, problem = subject.ranks.gather((made, problem))[0]
    if problem:
        raise OSError(problem)
    return Path(made)


def save(run: Run, directory: Path) -> None:
    """Save one tag, which is complete when this returns. Every rank calls this.

    Raises:
        OSError: The tag could not be written; the log says why.
    """
    saver = checkpoint.Saver(directory, comm, Checkpoints())
    description = checkpoint.Description(run.recipe.model_dump(), run.layout, {})
    if not (saver.save(run.counters.nimg, run.entries, description) and saver.finish()):
        raise OSError(f"a checkpoint could not be written to {directory}")


def saved_parts(run: Run) -> dict[str, Any]:
    """Return the parts that this rank writes into a checkpoint, value -> [(offset, elements)], and all numbers."""
    found: dict[str, Any] = {}
    for name, entry in run.entries.items():
        for part in entry.parts():
            if comm.rank() == 0 or not part.everywhere:
                elements = part.values.detach().cpu().numpy().copy()
                found.setdefault(f"{name}/{part.kind}/{part.name}", []).append((part.offset, elements))
    numbers = {f"{name}.{key}": value for name, entry in run.entries.items() for key, value in entry.numbers().items()}
    return {"parts": found, "numbers": numbers}


def whole_values(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Assemble whole values from all ranks' ``saved_parts``.

    Raises:
        ValueError: An element is missing, or there twice.
    """
    merged = {}
    for value in {name for rank in by_rank for name in rank["parts"]}:
        stretches = sorted(
            (stretch for rank in by_rank for stretch in rank["parts"].get(value, [])), key=lambda stretch: stretch[0]
        )
        reached = 0
        for offset, elements in stretches:
            if offset != reached:
                raise ValueError(f"{value}: element {min(offset, reached)} stands twice or is missing")
            reached += elements.size
        merged[value] = np.concatenate([elements for _, elements in stretches])
    return merged


def _whole(run: Run) -> dict[str, bytes]:
    """Bytes of all saved values by name, on all ranks."""
    gathered = comm.gather_objects(saved_parts(run))
    whole: dict[str, bytes] = {}
    if gathered is not None:
        whole = {name: values.tobytes() for name, values in whole_values(gathered).items()}
        whole |= {name: repr(value).encode() for name, value in gathered[0]["numbers"].items()}
    return dict(comm.from_rank_zero(whole))


def _difference(before: Mapping[str, bytes], now: Mapping[str, bytes], where: str) -> str:
    if before.keys() != now.keys():
        return f"{sorted(before.keys() ^ now.keys())[0]} is missing: {where}"
    bad = [name for name in sorted(before) if before[name] != now[name]]
    if not bad:
        return ""
    pairs = zip(before[bad[0]], now[bad[0]], strict=False)
    bits = sum(bin(a ^ b).count("1") for a, b in pairs)
    return f"{bad[0]} differs in {bits} bit{'s' if bits > 1 else ''}: {where}"
