"""The list of checks, in the order in which they run: those that need only the host come first."""

from __future__ import annotations

from collections.abc import Sequence

from bigsgan.doctor.checks import Check, Need
from bigsgan.errors import UserError

_NEW: tuple[Need, ...] = ("ranks", "only")
"""Checks on new ranks, for a report of several GPUs: what hangs or crashes in one ends no later one."""


def _anew(name: str, proves: str, *others: str) -> Check:
    """A check that runs others on new ranks."""
    return Check(f"nccl.{name}", proves, 40, "new_ranks:checks", _NEW, others)


CHECKS = (
    Check("environment.files", "enough files can be open at once", 0.1, "host:open_files"),
    Check("environment.shared", "/dev/shm holds what processes pass through it", 0.1, "host:shared_memory"),
    Check("environment.cores", "ranks have cores, and do not get in each other's way", 0.1, "host:cores"),
    Check("environment.paths", "all ranks see the data, and what rank 0 writes", 0.2, "storage:paths"),
    Check("environment.locks", "a lock in `out` keeps a second process out", 0.2, "storage:locks"),
    Check("environment.alike", "all ranks have the same packages and recipe", 0.2, "same_hosts:same_files", ("ranks",)),
    Check("environment.versions", "Python, torch and deepspeed are supported", 0.1, "versions:versions"),
    Check("environment.devices", "each rank has a GPU that computes, with its memory free", 2, "devices:devices"),
    Check("environment.compilers", "what the recipe compiles can be compiled", 3, "recipes:compilers", ("config",)),
    Check("environment.room", "checkpoints of the recipe fit on the disk", 1, "recipes:room", ("config",)),
    Check("arithmetic.float64", "gradients in float32 agree with float64", 5, "arithmetic:float64", ("group",)),
    Check("arithmetic.updates", "each game's update is plain PyTorch's", 13, "arithmetic:updates", ("group",)),
    Check("arithmetic.half", "bf16 and fp16 round, and not more than they may", 4, "arithmetic:half", ("group",)),
    Check(
        "arithmetic.half_of_families",
        "bf16 rounds in no game without a codebook more than it may",
        20,
        "arithmetic:half_of_families",
        ("group",),
    ),
    Check("arithmetic.optimizers", "optimizers follow their equations", 1, "optimizers:optimizers", ("group",)),
    Check("arithmetic.tensor_cores", "tensor cores lose nothing", 10, "arithmetic:tensor_cores", ("gpu", "group")),
    Check("arithmetic.kernels", "fused kernels are torch's operations", 15, "kernels:feature_maps", ("gpu", "group")),
    Check("arithmetic.draws", "a GPU draws what a CPU draws", 3, "kernels:random_numbers", ("gpu", "group")),
    Check("arithmetic.compiled", "compiled networks train the same", 200, "arithmetic:compiled", ("group", "only")),
    Check("layouts.collectives", "sums, copies and gathers are right", 2, "collectives:collectives", ("group",)),
    Check("layouts.repeats", "repeated work gives the same bits", 8, "collectives:repeats", ("group",)),
    Check("layouts.rates", "how fast ranks talk, by size", 3, "collectives:rates", ("ranks", "group")),
    Check("layouts.zero", "updates at ZeRO 0 to 3 agree with plain PyTorch", 10, "layouts:zero_stages", ("group",)),
    Check(
        "layouts.penalties",
        "updates with each form of penalty agree with plain PyTorch",
        10,
        "layouts:penalties",
        ("group",),
    ),
    Check(
        "layouts.hand_overs",
        "updates that share, keep or remake images agree with plain PyTorch",
        5,
        "layouts:hand_overs",
        ("group",),
    ),
    Check(
        "layouts.offload", "updates with state on the host agree with plain PyTorch", 4, "layouts:offload", ("group",)
    ),
    Check(
        "layouts.pipelines",
        "updates in pipeline stages agree with plain PyTorch",
        7,
        "layouts:pipelines",
        ("ranks", "group"),
    ),
    Check(
        "layouts.separate_ranks",
        "updates with ranks for each network agree with plain PyTorch",
        4,
        "layouts:separate_ranks",
        ("ranks", "group"),
    ),
    Check("layouts.checkpoints", "another layout reads what one has saved", 6, "saving:checkpoints", ("group",)),
    Check("recipe.updates", "updates take the planned memory", 60, "updates:updates", ("config", "group")),
    Check(
        "recipe.compiled",
        "updates that compile take the planned memory",
        600,
        "updates:compiled_updates",
        ("config", "group"),
    ),
    Check("nccl.links", "what links the GPUs and hosts have", 5, "topology:facts", _NEW),
    _anew("machine", "GPUs, versions and limits fit", "environment"),
    _anew(
        "collectives", "collectives give what they should, again and again", "layouts.collectives", "layouts.repeats"
    ),
    _anew("zero", "ZeRO 0 to 3 agree with plain PyTorch", "layouts.zero"),
    _anew("pipelines", "pipeline stages agree with it", "layouts.pipelines"),
    _anew("separate_ranks", "separate ranks agree with it", "layouts.separate_ranks"),
    _anew("penalties", "exact penalties agree with it", "layouts.penalties"),
    _anew("checkpoints", "another layout reads what one saves", "layouts.checkpoints"),
    Check("nccl.killed", "all end when a rank is killed, and the run resumes", 90, "new_ranks:killed", _NEW),
    _anew("rates", "how fast ranks talk", "layouts.rates"),
    Check("nccl.speed", "how an update's speed grows with the ranks", 90, "new_ranks:speed", _NEW),
    Check("run.checkpoints", "checkpoints are complete, and the newest intact", 10, "health:checkpoints", ("run",)),
    Check("run.alarms", "the latest reports show no training failure", 0.1, "health:alarms", ("run",)),
    Check("run.skips", "few updates are skipped, and the loss scale holds", 0.1, "health:skips", ("run",)),
    Check("run.age", "a running run still reports", 0.1, "health:age", ("run",)),
)


def chosen(only: Sequence[str], examines_run: bool, lists: bool = False) -> list[Check]:
    """Choose the checks that a command line asks for.

    Args:
        only: Names of checks or groups; none stands for all checks of a run with ``examines_run``, else for all others.
            A check with "only" needs its whole name, or that of a group with such checks alone.
        examines_run: Whether ``--run`` is given.
        lists: Whether the checks are only listed: then no names stand for all checks.

    Raises:
        UserError: A name stands for no check.
    """
    known = {name for check in CHECKS for name in (check.name, check.group)}
    for word in only:
        if word not in known:
            problem = "must be the name of a check, or the part before its point"
            raise UserError("--only", word, problem, "see `bigsgan doctor --list`")
    if lists and not only:
        return list(CHECKS)
    short = {check.group for check in CHECKS if "only" not in check.needs}
    named = set(only) - short
    asked = [c for c in CHECKS if lists or "only" not in c.needs or c.name in only or c.group in named]
    if only:
        return [check for check in asked if check.name in only or check.group in only]
    return [check for check in asked if ("run" in check.needs) == examines_run]
