"""Runs programs on new ranks, one beside each of the doctor's: what hangs or crashes there ends no later check.

The doctor's own ranks talk through their store alone then, and use no GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from bigsgan.doctor.checks import PATIENCE_SECONDS, Finding, Subject, failed, not_applicable, passed
from bigsgan.doctor.games import TINY
from bigsgan.doctor.registry import CHECKS
from bigsgan.doctor.saving import _shared_directory as shared_directory
from bigsgan.errors import counted
from bigsgan.runtime.gpus import nvidia_gpus, own_device

COMMAND = [sys.executable, "-m", "bigsgan"]
STARTING_SECONDS = 30.0
"""To import torch and deepspeed on all ranks, and to meet."""

ENDING_SECONDS = 60.0
"""Within which all ranks end after one has."""

_KEPT = re.compile(r"(SLURM_STEP_\w+|TORCHELASTIC_\w+)")
"""Variables of the doctor's launcher with which new ranks would meet where the doctor's do."""

_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_SIZE")
_NOISE = re.compile(r"\[(W|rank)|^\s*$|warning|Warning|frame #")
_POLL_SECONDS = 0.1
_LONGEST = 300

_SPEED_RECIPE = {
    "cpu": ["data={kind: digits, resolution: 16}", "generator.channels=8", "discriminator.channels=8"],
    "cuda": [
        "data={kind: synthetic, resolution: 128, num_images: 4096, num_classes: 1000, image_channels: 3}",
        "generator={channels: 64, attention: [64]}",
        "discriminator={channels: 64, attention: [64]}",
    ],
}
_SPEED_BATCH = {"cpu": 8, "cuda": 32}
"""Images of a rank's micro-batch."""


class Ended(NamedTuple):
    """A process that has ended, or had to be ended."""

    status: int | None  # None if it was too late
    said: str  # standard output
    errors: str  # standard error

    @property
    def last(self) -> str:
        """The last line of standard error, bigsgan's own if there is one."""
        lines = [line for line in self.errors.splitlines() if not _NOISE.search(line)] or [""]
        own = [line for line in lines if line.startswith("bigsgan")]
        return (own or lines)[-1][:_LONGEST]


def checks(subject: Subject, *names: str) -> Finding:
    """Run checks of the doctor on new ranks; the finding is the worst of theirs."""
    seconds = sum(each.seconds for each in CHECKS if each.name in names or each.group in names)
    words = [word for name in names for word in ("--only", name)]
    ended = on_new_ranks(subject, ["doctor", "--json", *words], STARTING_SECONDS + PATIENCE_SECONDS + 3 * seconds)
    return _finding(subject, ended)


def speed(subject: Subject) -> Finding:
    """Time updates of one recipe on all ranks together, and on each alone, all at once: a batch for each rank."""
    device = "cuda" if nvidia_gpus() and os.environ.get("DS_ACCELERATOR") != "cpu" else "cpu"
    with _in_shared_directory(subject) as directory:
        recipe = directory / "recipe.yaml"
        if subject.ranks.rank == 0:
            recipe.write_text(TINY)
        subject.ranks.gather(None)
        found: list[list[float]] = []
        for num in (1, subject.ranks.size):
            batch = [f"batch={num * _SPEED_BATCH[device]}", *_SPEED_RECIPE[device], f"out={directory / 'run'}"]
            words = ["doctor", "--json", "--only", "recipe.updates", "--config", str(recipe), *batch]
            ended = on_new_ranks(subject, words, STARTING_SECONDS + 240, meet=num > 1)
            finding = _finding(subject, ended, meet=num > 1)
            rates = subject.ranks.gather(finding.numbers.get("images_per_second"))
            if None in rates:  # else its memory was not as planned, which another check is about
                return finding if rates[subject.ranks.rank] is None else passed("see the other ranks", severity=-1e30)
            found.append(rates)
    by_rank, of_all = found[0], found[1][0]
    share = of_all / sum(by_rank)
    numbers = {
        "images_per_second_of_single_ranks": by_rank,
        "images_per_second": of_all,
        "share": share,
        "device": device,
    }
    text = f"{of_all:.3g} images/s on {len(by_rank)} ranks together, {share:.0%} of the sum of what each makes alone"
    return passed(f"{text} ({min(by_rank):.3g} to {max(by_rank):.3g})", numbers, -share)


def killed(subject: Subject) -> Finding:
    """Train on new ranks, kill the last after a checkpoint, time the others' end, and resume to the end."""
    with _in_shared_directory(subject) as directory:
        run, is_last = directory / "run", subject.ranks.rank == subject.ranks.size - 1
        recipe = directory / "recipe.yaml"
        if subject.ranks.rank == 0:
            recipe.write_text(TINY)
        subject.ranks.gather(None)
        batch = 8 * subject.ranks.size
        words = ["train", "--config", str(recipe), f"out={run}", f"batch={batch}", f"checkpoint_nimg={batch}"]
        with _started(subject, directory, words) as process:
            problem = _wait_for_checkpoint(process, run) if is_last else ""
            problem = subject.ranks.gather(problem)[-1]
            if is_last and not problem:
                process.send_signal(signal.SIGKILL)
            since = time.monotonic()
            ended = _waited(process, directory, subject.ranks.rank, ENDING_SECONDS if not problem else 0.0)
        seconds = time.monotonic() - since
        by_rank = subject.ranks.gather((ended.status, seconds, ended.last))
        if problem:
            return failed(problem, "see what the check nccl.zero finds, and the messages of this rank")
        late = [rank for rank, (status, _, _) in enumerate(by_rank) if status is None]
        numbers = {"seconds": [each for _, each, _ in by_rank], "statuses": [each for each, _, _ in by_rank]}
        numbers["said"] = [last for _, _, last in by_rank]
        remedy = "send this report: a rank that ends has to end the others"
        if late or any(status == 0 for status in numbers["statuses"]):
            left = f"{ENDING_SECONDS:.0f} s later, {counted(len(late), 'rank')} still ran"
            text = left if late else "a rank ended as if complete"
            return failed(text, remedy, numbers)
        total = 4 * batch + _newest(run)
        ended = on_new_ranks(subject, [*words, f"total_nimg={total}"], STARTING_SECONDS + 120)
        resumed = subject.ranks.gather((ended.status, ended.last, "Resuming from" in ended.errors))
        bad = [(rank, each) for rank, each in enumerate(resumed) if each[0] != 0]
        if bad or not resumed[0][2]:
            rank, (status, last, _) = bad[0] if bad else (0, resumed[0])
            return failed(f"it did not resume: rank {rank} ended with status {status}: {last}", remedy, numbers)
    slowest = max(numbers["seconds"])
    return passed(f"all ranks ended {slowest:.0f} s after one was killed, and the run resumed", numbers, slowest)


def on_new_ranks(subject: Subject, words: Sequence[str], limit: float, meet: bool = True) -> Ended:
    """Run `bigsgan` with ``words`` beside each rank, on ranks that meet, or ``meet=False``, each for itself."""
    with _in_shared_directory(subject) as directory, _started(subject, directory, words, meet) as process:
        ended = _waited(process, directory, subject.ranks.rank, limit)
        subject.ranks.gather(None)
    return ended


@contextmanager
def _started(
    subject: Subject, directory: Path, words: Sequence[str], meet: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """Start this rank's process; what is left of it at the end of the block is killed."""
    env = {name: value for name, value in os.environ.items() if not _KEPT.fullmatch(name)}
    cores = _own_cores(subject)
    port = subject.ranks.gather(_free_port() if subject.ranks.rank == 0 else 0)[0]
    if meet:
        env.update(MASTER_PORT=str(port), RANK=str(subject.ranks.rank), WORLD_SIZE=str(subject.ranks.size))
    else:
        own = own_device(env)  # of which the number alone is for a process without others
        env.update({name: value for name, value in own.items() if name.startswith("CUDA_")})
        for name in (*_OF_A_RANK, *(["LOCAL_RANK"] if own else [])):
            env.pop(name, None)
    said, errors = (directory / f"{name}{subject.ranks.rank}" for name in ("said", "errors"))
    with said.open("wb") as output, errors.open("wb") as messages:
        process = subprocess.Popen([*COMMAND, *words], env=env, stdout=output, stderr=messages, start_new_session=True)
    if not meet:  # it would take all cores, where the others do so too
        os.sched_setaffinity(process.pid, cores)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _waited(process: subprocess.Popen[bytes], directory: Path, rank: int, limit: float) -> Ended:
    """Wait for this rank's process, and kill it after ``limit`` seconds."""
    status: int | None = None
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(limit)
    if status is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said, errors = ((directory / f"{name}{rank}").read_text(errors="replace") for name in ("said", "errors"))
    return Ended(status, said, errors)


def _finding(subject: Subject, ended: Ended, meet: bool = True) -> Finding:
    """Return what a doctor found; on all ranks alike if they met, else that of this rank."""
    by_rank = subject.ranks.gather((ended, _record(ended.said)))
    record = by_rank[0 if meet else subject.ranks.rank][1]
    if record is None:
        where = [rank for rank, (each, _) in enumerate(by_rank) if each.status != 0]
        rank = where[0] if where else 0
        status, last = by_rank[rank][0].status, by_rank[rank][0].last
        how = "did not end in time" if status is None else f"ended with status {status}"
        said = next((each.last for each, _ in by_rank if each.last.startswith("bigsgan")), last)
        return failed(f"rank {rank} {how}: {said}", "run the check alone, with NCCL_DEBUG=INFO", {"statuses": where})
    found = [each for each in record["checks"] if each["status"] != "not applicable"] or record["checks"]
    worst = next((each for each in found if each["status"] == "fail"), found[0])
    numbers: dict[str, Any] = {each["name"]: each["ranks"] for each in record["checks"]}
    if len(record["checks"]) == 1:
        own = min(subject.ranks.rank, len(worst["ranks"]) - 1)
        numbers = worst["ranks"][own]["numbers"]
    said = worst["said"] if len(found) == 1 or worst["status"] == "fail" else "; ".join(each["said"] for each in found)
    finding = {"pass": passed, "not applicable": not_applicable}.get(worst["status"])
    return finding(said, numbers) if finding else failed(said, worst["remedy"], numbers)


def _record(said: str) -> Any:
    with suppress(ValueError):
        return json.loads(said)
    return None


def _wait_for_checkpoint(process: subprocess.Popen[bytes], run: Path) -> str:
    """Wait until the run has saved; return a problem, or an empty text."""
    until = time.monotonic() + STARTING_SECONDS + 150
    while not _newest(run):
        if process.poll() is not None:
            return f"training ended with status {process.returncode} before its first checkpoint"
        if time.monotonic() > until:
            return "training made no checkpoint in time"
        time.sleep(_POLL_SECONDS)
    return ""


def _newest(run: Path) -> int:
    """Images of the newest complete checkpoint; 0 without one."""
    return max((int(path.name) for path in (run / "checkpoints").glob("*[0-9]") if path.name.isdecimal()), default=0)


@contextmanager
def _in_shared_directory(subject: Subject) -> Iterator[Path]:
    directory = shared_directory(subject)
    try:
        yield directory
    finally:
        if subject.ranks.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)


def _own_cores(subject: Subject) -> list[int]:
    """Return this rank's part of its host's cores, or those that it is bound to."""
    here, by_rank = subject.same_host(), subject.ranks.gather(sorted(os.sched_getaffinity(0)))
    own = list(by_rank[subject.ranks.rank])
    if any(by_rank[rank] != own for rank in here):
        return own
    each, place = max(1, len(own) // len(here)), here.index(subject.ranks.rank)
    return own[place * each : (place + 1) * each] or own


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
