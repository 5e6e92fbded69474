"""Checks of the host's limits for processes. No torch here."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from bigsgan.doctor.checks import Finding, Subject, failed, passed
from bigsgan.runtime.limits import files_wanted

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 256 << 20
"""Bytes of /dev/shm for each rank without a recipe: torch's loading processes and NCCL pass data through it."""

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def open_files(subject: Subject) -> Finding:
    """Check the soft limit of open files, which the start has raised as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = files_wanted(subject.ranks.size)
    numbers = {"soft": soft, "hard": hard, "least": least}
    if _below(soft, least):
        remedy = f"run `ulimit -n {least}` before the launcher"
        if _below(hard, least):
            remedy = f"ask the administrator for a `nofile` of {least} or more in limits.conf"
        return failed(f"{soft} files may be open at once, {least} are needed", remedy, numbers, -soft)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return passed(f"{shown} files may be open at once", numbers, -soft)


def shared_memory(subject: Subject) -> Finding:
    """Compare the free bytes of /dev/shm with what the ranks of this host pass through it."""
    try:
        found = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return failed(f"{SHARED_MEMORY} cannot be used: {error.strerror}", f"mount a tmpfs at {SHARED_MEMORY}")
    free, plan, each = found.free, subject.plan, LEAST_SHARED_BYTES
    if plan is not None:
        batch, has_teacher = plan.engines["discriminator"].micro_batch_size, plan.recipe.objective.teacher is not None
        each = plan.recipe.data.shared_bytes(batch, has_teacher)
    needed = len(subject.same_host()) * each
    numbers = {"free_bytes": free, "needed_bytes": needed, "total_bytes": found.total}
    text = f"{free >> 20} MiB of {SHARED_MEMORY} are free"
    if plan is None and len(subject.same_host()) == 1:
        return passed(f"{text}; what one rank needs of it depends on the recipe", numbers, -free)
    if free < needed:
        remedy = "give the container more (docker run --shm-size)"
        if plan is not None:
            remedy += ", or lower data.num_workers or data.prefetch"
        return failed(f"{text}, {-(-needed // 2**20)} MiB are needed", remedy, numbers, -free)
    return passed(text, numbers, -free)


def cores(subject: Subject) -> Finding:
    """Check that a host and its container have a core for each rank, and that ranks share all their cores or none."""
    own = sorted(os.sched_getaffinity(0))
    by_rank: list[list[int]] = subject.ranks.gather(own)
    here, me = subject.same_host(), subject.ranks.rank
    bound, quota = len(set().union(*(by_rank[rank] for rank in here))), _quota()
    num = min(bound, quota)
    numbers = {"cores": own, "cores_of_host": bound, "ranks_of_host": len(here)}
    numbers["quota"] = quota if quota < float("inf") else None
    if num < len(here):
        option = "--cpus, or limits.cpu in Kubernetes" if quota < bound else "--cpuset-cpus"
        remedy = f"start fewer ranks there, or give the job more cores (Slurm: --cpus-per-task; docker run {option})"
        return failed(
            f"{len(here)} rank{'s share' if len(here) > 1 else ' has'} {_cores(num)}", remedy, numbers, len(here) / num
        )
    for other in here:
        if other != me and set(by_rank[other]) & set(own) and by_rank[other] != own:
            both = sorted(set(by_rank[other]) & set(own))
            text = f"shares {_cores(len(both))} ({_ranges(both)}) with rank {other}, and has others alone"
            remedy = "bind ranks to separate cores, or none (Slurm: --cpu-bind=cores or --cpu-bind=none)"
            return failed(text, remedy, numbers, len(both))
    sharing = [rank for rank in here if rank != me and by_rank[rank] == own]
    whose = f"{len(sharing) + 1} ranks" if sharing else "this rank alone"
    return passed(f"{_cores(min(len(own), quota))} for {whose}", numbers, -len(own) / (1 + len(sharing)))


def _quota() -> float:
    """Cores that this process's container may use the time of; infinite without a limit (Linux, cgroup-v2, cpu.max)."""
    try:
        quota, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


def _ranges(numbers: Sequence[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _cores(num: float) -> str:
    return f"{num:g} core{'s' if num != 1 else ''}"


def _below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least
