"""Checks of a run's health, from the files in its directory: checkpoints and reports."""

from __future__ import annotations

import logging
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigsgan.checkpoint import tags
from bigsgan.config import NETWORKS, Recipe
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.doctor.checks import Finding, Subject, failed, not_applicable, passed
from bigsgan.monitor.logs import keeping_notices
from bigsgan.runtime.locking import is_held
from bigsgan.runtime.memory import size
from bigsgan.runtime.paths import parse_json
from bigsgan.table import span
from bigsgan.training.alarms import Alarms

LATEST = 20
"""Number of latest reports that describe a run's present state."""

VERIFYING_SECONDS = 40.0
"""How long rank 0 reads the newest checkpoint; it verifies a larger one in part."""

MOST_SKIPPED = 0.1
"""Largest share of updates that fp16 may skip; float32 and bf16 may skip none."""

LOST_SCALE = 2.0**-8
LATE = 10
"""A running run is late after this many times the usual time between reports."""


def checkpoints(subject: Subject) -> Finding:
    """Check that all tags are complete, and that the newest one's files have the checksums of its manifest."""
    directory = subject.run_directory() / "checkpoints"
    with keeping_notices() as records:
        found = list(tags.complete(directory))
    partial = sorted(path.name for path in directory.glob(f"*{tags.PARTIAL}"))
    damaged = [record.getMessage() for record in records if _is_about_a_file(record)]
    numbers: dict[str, Any] = {"complete": [c.nimg for c in found], "damaged": damaged, "partial": partial}
    remedy = "remove that directory, or restore an intact copy; a run resumes from the newest that is intact"
    if damaged:
        return failed(damaged[0].removeprefix("skipping "), remedy, numbers, len(damaged))
    if not found:
        return not_applicable("no checkpoint yet", numbers)
    newest = found[0]
    num_bytes = sum(int(file["bytes"]) for file in newest.manifest["files"].values())
    text = f"{len(found)} complete, the newest of {newest.nimg} images and {size(num_bytes)}"
    if subject.ranks.rank:
        return passed(text, numbers, severity=-1)
    damage, verified = _verified(newest)
    numbers["verified_bytes"] = verified
    if damage and newest.path.exists():  # a running run may have removed it meanwhile
        return failed(f"{newest.path}: {damage}", remedy, numbers)
    return passed(f"{text}, {size(verified)} of them verified", numbers)


class _OutOfTimeError(Exception):
    """The time to read checkpoints is over."""


def _verified(checkpoint: tags.Checkpoint) -> tuple[str, int]:
    """Describe the first damage, if any, and count the bytes of files found intact within ``VERIFYING_SECONDS``."""
    until = time.monotonic() + VERIFYING_SECONDS

    def in_time(num_bytes: int) -> None:
        if time.monotonic() > until:
            raise _OutOfTimeError

    def look(name: str) -> tuple[str, int]:
        try:
            damage = tags.damage_of(checkpoint, name, in_time)
        except _OutOfTimeError:
            return "", 0
        return (damage, 0) if damage else ("", int(checkpoint.manifest["files"][name]["bytes"]))

    with ThreadPoolExecutor(tags.HASHING_THREADS) as threads:
        found = list(threads.map(look, sorted(checkpoint.manifest["files"])))
    return next((damage for damage, _ in found if damage), ""), sum(verified for _, verified in found)


def alarms(subject: Subject) -> Finding:
    """Check that the latest reports raise no alarm of training failure, recomputed with all reports before them."""
    rows = reports(subject.run_directory())
    if not rows:
        return not_applicable("no report yet")
    watch, raised = Alarms(), dict[str, tuple[int, str]]()
    for i, row in enumerate(rows):
        known = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        for name, text in watch.examine(known).items():
            if i >= len(rows) - LATEST:
                raised[name] = row["nimg"], text
    if raised:
        name, (nimg, text) = list(raised.items())[-1]
        seen, _, remedy = text.partition(": ")
        numbers = {"alarms": {name: {"nimg": nimg, "text": text} for name, (nimg, text) in raised.items()}}
        return failed(f"{name} at {nimg} images: {seen}", remedy, numbers, len(raised))
    return passed(f"no alarm in the latest {min(LATEST, len(rows))} reports")


def skips(subject: Subject) -> Finding:
    """Check the share of skipped updates in the latest reports, and the loss scale of fp16."""
    rows, recipe = reports(run := subject.run_directory())[-LATEST:], read_saved_recipe(run)
    shares = {network: _skipped(rows, network, recipe) for network in NETWORKS}
    scales = {n: [row[f"loss_scale/{n}"] for row in rows if row.get(f"loss_scale/{n}")] for n in NETWORKS}
    if not rows:
        return not_applicable("no report yet")
    numbers = {"skipped_share": shares, "loss_scale": scales}
    for network, share in shares.items():
        is_scaled = any(scale != 1 for scale in scales[network])
        if share > (MOST_SKIPPED if is_scaled else 0):
            remedy = f"lower optimizer.{network}.lr, or set clip_norm; see logs/ for the layer that was not finite"
            text = f"{share:.1%} of the {network}'s latest updates were skipped"
            return failed(text, remedy, numbers, share)
        if scales[network] and scales[network][-1] <= max(scales[network]) * LOST_SCALE:
            text = f"the {network}'s loss scale fell from {max(scales[network]):g} to {scales[network][-1]:g}"
            return failed(text, f"lower optimizer.{network}.lr, or use bf16", numbers)
    return passed(f"{max(shares.values()):.1%} of the latest updates were skipped", numbers)


def age(subject: Subject) -> Finding:
    """Check the age of the newest report if a process has the run open; a run that has ended or stopped passes."""
    run = subject.run_directory()
    is_running = subject.ranks.gather(is_held(run / ".lock") if subject.ranks.rank == 0 else None)[0]
    rows, recipe = reports(run), read_saved_recipe(run)
    if not rows:
        return not_applicable("no report yet")
    seconds = time.time() - os.stat(run / "metrics.jsonl").st_mtime
    rates = [row["images_per_second"] for row in rows if row.get("images_per_second")]
    usual = recipe.report_nimg / statistics.median(rates[-LATEST:]) if rates else 0.0
    most = max(recipe.hang_timeout_seconds, LATE * usual)
    nimg = rows[-1]["nimg"]
    numbers = {"nimg": nimg, "age_seconds": seconds, "usual_seconds": usual, "is_running": is_running}
    if is_running is None:
        return not_applicable(f"{run / '.lock'} does not tell whether a process has the run open", numbers)
    if is_running and seconds > most:
        text = f"the newest report is {span(seconds)} old, they usually take {span(usual)}"
        remedy = "look at logs/ of all ranks: one may hang, compile, or wait for a file system"
        return failed(text, remedy, numbers, seconds)
    state = "runs" if is_running else "is complete" if nimg >= recipe.total_nimg else "is stopped"
    return passed(f"{state} at {nimg} of {recipe.total_nimg} images, newest report {span(seconds)} ago", numbers)


def _is_about_a_file(record: logging.LogRecord) -> bool:
    """Whether a message's first argument is a path that still exists: a running run removes old checkpoints."""
    return bool(record.args) and isinstance(record.args, tuple) and os.path.exists(str(record.args[0]))


def reports(run: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl, without lines that are not rows."""
    rows = []
    with suppress(OSError):
        for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                if isinstance(row := parse_json(line), dict) and isinstance(row.get("nimg"), int):
                    rows.append(row)
    return rows


def _skipped(rows: list[dict[str, Any]], network: str, recipe: Recipe) -> float:
    """Share of a network's updates that were skipped over some reports."""
    known = [(row["nimg"], row[f"skipped/{network}"]) for row in rows if row.get(f"skipped/{network}") is not None]
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return 0.0
    updates = (known[-1][0] - known[0][0]) / recipe.batch
    updates *= recipe.updates_of(network)
    return max(0.0, float(known[-1][1] - known[0][1])) / updates
