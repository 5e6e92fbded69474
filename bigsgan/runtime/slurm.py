"""Translates the variables that Slurm's `srun` sets to those that torch.distributed reads."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bigsgan.errors import UserError, counted

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
"""All ports are below 32,768, where Linux's ports for outgoing connections begin."""

_MOST_DIGITS = 10


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch's launcher for a task that `srun` started, and LOCAL_SIZE as DeepSpeed's has it.

    Empty if another launcher has set RANK, or if this is not a task of `srun`, but for example a batch script.

    Raises:
        UserError: Variables are missing or not as Slurm sets them.
    """
    if environment.get("RANK") or not environment.get("SLURM_STEP_NUM_TASKS"):
        return {}
    node = int(_number(environment, "SLURM_NODEID"))
    num_tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if int(num_tasks) == 0:
        raise UserError("SLURM_STEP_NUM_TASKS", num_tasks, "must be at least 1", "start with `srun`")
    local_size = tasks_on_node(environment, node)
    rank = _number(environment, "SLURM_PROCID", int(num_tasks), "the number of tasks of the step")
    local_rank = _number(environment, "SLURM_LOCALID", local_size, "the number of its tasks on this node")
    num_sharing = local_size
    if _sees_own_device(environment, local_size):  # its device is number 0
        local_rank, num_sharing = "0", 1
    job = int(_number(environment, "SLURM_JOB_ID"))
    return {
        "RANK": rank,
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": str(num_sharing),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(_text(environment, "SLURM_STEP_NODELIST")),
        # Jobs that share a host have different numbers, and so different ports.
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + job % _NUM_PORTS),
    }


def first_host(nodelist: str) -> str:
    """Return the first name of a list such as ``gpu[007-010,012]-ib,login1``."""
    found = re.fullmatch(r"([^\[\],]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?(?:,.*)?", nodelist)
    if found is None:
        raise UserError("SLURM_STEP_NODELIST", nodelist, "must be a list of hosts", "set MASTER_ADDR to the first host")
    prefix, number, suffix = found.groups(default="")
    return prefix + number + suffix


def tasks_on_node(environment: Mapping[str, str], node: int) -> int:
    """Return the number of this step's tasks on one of its nodes, from a text such as ``8(x3),4``."""
    text = _text(environment, "SLURM_STEP_TASKS_PER_NODE")
    counts: list[tuple[int, int]] = []
    for part in text.split(","):
        found = re.fullmatch(r"0*([1-9][0-9]{0,4})(?:\(x0*([1-9][0-9]{0,5})\))?", part)
        if found is None:
            raise UserError("SLURM_STEP_TASKS_PER_NODE", text, "must be as Slurm sets it", "start with `srun`")
        counts.append((int(found[1]), int(found[2] or 1)))
    tasks, num_tasks = sum(count * nodes for count, nodes in counts), int(_number(environment, "SLURM_STEP_NUM_TASKS"))
    if tasks != num_tasks:
        problem = f"must be of {counted(num_tasks, 'task')}, as SLURM_STEP_NUM_TASKS is"
        raise UserError("SLURM_STEP_TASKS_PER_NODE", text, problem, "start with `srun`")
    first = 0
    for count, nodes in counts:
        first += nodes
        if node < first:
            return count
    problem = f"must be less than {first}, the number of nodes of the step"
    raise UserError("SLURM_NODEID", node, problem, "start with `srun`")


def _sees_own_device(environment: Mapping[str, str], local_size: int) -> bool:
    """Return whether Slurm shows each task a single GPU of its own.

    Each of --gpus-per-task, --ntasks-per-gpu and --gpu-bind does so, and --gpu-bind=none undoes it. No variable tells
    all of that, so this looks at what the task sees; without CUDA_VISIBLE_DEVICES it sees all GPUs.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    # If all tasks of the node share its only GPU, each sees a single one too.
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    return (
        bool(visible)
        and "," not in visible
        and on_node.isascii()
        and on_node.isdecimal()
        and int(on_node) >= local_size
    )


def _number(environment: Mapping[str, str], name: str, bound: int | None = None, what: str = "") -> str:
    """Return a whole number as text; ``bound``, which is ``what``, is the least that it must not be."""
    text = _text(environment, name)
    if not (text.isascii() and text.isdecimal()) or len(text) > _MOST_DIGITS:
        raise UserError(name, text, "must be a whole number", "start with `srun`")
    if bound is not None and int(text) >= bound:
        raise UserError(name, int(text), f"must be less than {bound}, {what}", "start with `srun`")
    return text


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise UserError(name, None, "must be set in a step of Slurm", "start with `srun`")
    return environment[name]
