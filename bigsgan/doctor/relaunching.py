"""The launcher's part of the command that starts the doctor again as it was started, on one host or several."""

from __future__ import annotations

from collections.abc import Mapping

HOSTFILE = "HOSTFILE"
"""Placeholder for the hostfile that a user gave to `deepspeed`, which does not tell ranks its name."""

_RENDEZVOUS = 29_400
"""torchrun's default port for the rendezvous of its agents (torch, distributed/run.py)."""


def launcher(environment: Mapping[str, str]) -> list[str]:
    """Words before ``bigsgan doctor``, from a rank's variables and ``launcher_variables`` of ``runtime.slurm``.

    There are none for a single process.
    """
    if environment.get("TORCHELASTIC_RUN_ID"):
        return _torchrun(environment)
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        words = ["srun", "--ntasks", environment["SLURM_STEP_NUM_TASKS"]]
        nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
        return [*words, "--nodes", nodes] if nodes != "1" else words
    return _deepspeed(environment)


def _torchrun(environment: Mapping[str, str]) -> list[str]:
    """torchrun, started by hand on each host, or by srun, which starts an agent on each."""
    nodes, here = environment.get("GROUP_WORLD_SIZE", "1"), environment.get("LOCAL_WORLD_SIZE", "1")
    words = ["torchrun", "--nproc_per_node", here, "--no-python", "--"]
    if nodes != "1":
        meeting = f"{environment['MASTER_ADDR']}:{_RENDEZVOUS}"
        words[1:1] = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting]
        if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            words[:0] = ["srun", "--nodes", nodes, "--ntasks", nodes]
    return words


def _deepspeed(environment: Mapping[str, str]) -> list[str]:
    num_ranks = environment.get("WORLD_SIZE") or "1"
    if num_ranks == "1":
        return []
    # LOCAL_SIZE is 1 where each rank sees a device of its own (runtime/gpus.py).
    is_one_host = environment.get("CROSS_SIZE", "1" if environment.get("LOCAL_SIZE") == num_ranks else "") == "1"
    if is_one_host:
        return ["deepspeed", "--num_gpus", num_ranks, "--no_python"]
    words = ["deepspeed", "--hostfile", HOSTFILE, "--master_addr", environment.get("MASTER_ADDR", "localhost")]
    return [*words, "--no_python"]
