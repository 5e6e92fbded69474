"""The launcher's environment variables, checked before torch is imported."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bigsgan.errors import UserError
from bigsgan.runtime.limits import allow_open_files
from bigsgan.runtime.slurm import launcher_variables

_MOST = 2**31 - 1
_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
"""The names that DeepSpeed 0.19 knows (accelerator/real_accelerator.py); on others it fails with an assertion."""

_PLACE = "environment variables"
_NAME_SECONDS = 10.0
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets."""

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables that only a launcher sets: torchrun, deepspeed, srun, and those of MPI."""

_OF_A_SITE = ("DS_ACCELERATOR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_OF_A_TASK = ("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_PROCID")

_REQUIRED = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK")


def forget_empty() -> None:
    """Unset variables that are set to nothing, as by ``RANK= bigsgan``: torch and DeepSpeed read them as numbers."""
    for name in (*VARIABLES, "DS_ACCELERATOR"):
        if os.environ.get(name) == "":
            del os.environ[name]


def has_launcher() -> bool:
    """Return whether a launcher has started this process; else its variables were set by hand, or by a cluster."""
    return any(map(os.environ.get, LAUNCHERS))


def is_own_mistake(field: str) -> bool:
    """Return whether a message about ``field`` is of this process alone: nobody but its user has set that variable."""
    by_hand = field in (*VARIABLES, *_OF_A_SITE) and not has_launcher()
    return by_hand or field.startswith("SLURM_STEP_") or field in _OF_A_TASK


def take_from_slurm() -> None:
    """Set the launcher's variables if `srun` started this task.

    Raises:
        UserError: Slurm's variables are missing or not as it sets them.
    """
    os.environ.update(launcher_variables(os.environ))


def world_size() -> int:
    """Return the number of ranks that were started."""
    return number("WORLD_SIZE", default=1, least=1)


def rank() -> int:
    """Return this process's rank."""
    return number("RANK", default=0, least=0)


def local_size(environment: Mapping[str, str]) -> int:
    """Return the number of ranks on this host, which launchers name differently; 1 without a launcher."""
    return int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or 1)


def num_sharing(environment: Mapping[str, str]) -> int:
    """Return among how many ranks the devices that this one sees are divided: 1 if it sees its own alone."""
    return int(environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE") or 1)


def meeting_place() -> tuple[str, int]:
    """Return the address and port of the store that all ranks meet at."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def keeps_store(rank: int) -> bool:
    """Return whether a rank keeps that store: rank 0 does, unless torchrun keeps its own."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def number(name: str, default: int, least: int, most: int = _MOST) -> int:
    """Return the number in a launcher's variable.

    Raises:
        UserError: It is not an integer from ``least`` to ``most``.
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(_MOST)) or not least <= int(text) <= most:
        problem = f"must be a whole number from {least} to {most}"
        raise UserError(name, text, problem, f"run `unset {name}`", "an environment variable")
    return int(text)


def check_launcher() -> None:
    """Refuse an environment that is not a complete launcher's, or with which ranks cannot connect.

    Raises:
        UserError: A variable is missing or does not fit.
    """
    check_rank()
    check_accelerator()
    _check_interfaces()
    allow_open_files(world_size())
    number("MASTER_PORT", default=1, least=1, most=65_535)
    if not os.environ.get("RANK"):
        return
    for name in _REQUIRED:
        if not os.environ.get(name):
            remedy = "start with deepspeed or torchrun, or run `unset RANK`"
            raise UserError(name, None, "must be set in the environment, as RANK is", remedy)
    _check_first_host()


def check_accelerator() -> None:
    """Refuse a DS_ACCELERATOR that DeepSpeed does not know.

    Raises:
        UserError: It is another name.
    """
    name = os.environ.get("DS_ACCELERATOR")
    if name and name not in _ACCELERATORS:
        problem = f"must be one of {', '.join(_ACCELERATORS)}"
        raise UserError("DS_ACCELERATOR", name, problem, "run `unset DS_ACCELERATOR`", "an environment variable")


def _check_interfaces() -> None:
    own = [name for _, name in socket.if_nameindex()]
    for variable, fits in (("GLOO_SOCKET_IFNAME", _gloo_finds), ("NCCL_SOCKET_IFNAME", _nccl_finds)):
        text = os.environ.get(variable, "")
        if text and not fits(text, own):
            problem = f"must be a network interface of {socket.gethostname()} ({', '.join(own)})"
            remedy = f"name one of them, or run `unset {variable}`"
            raise UserError(variable, text, problem, remedy, "an environment variable")


def _gloo_finds(text: str, own: Sequence[str]) -> bool:
    return all(name in own for name in text.split(","))


def _nccl_finds(text: str, own: Sequence[str]) -> bool:
    """Whether NCCL finds one. ``text`` has beginnings of names; after ``=`` whole names, after ``^`` exclusions."""
    if text.startswith("^") or os.environ.get("DS_ACCELERATOR") == "cpu" or not list(Path("/dev").glob("nvidia[0-9]*")):
        return True
    names = [name.partition(":")[0] for name in text.removeprefix("=").split(",")]
    return any(other == name if text[0] == "=" else other.startswith(name) for name in names for other in own)


def _check_first_host() -> None:
    """Refuse a host name that does not exist; torch would look it up again and again."""
    host, until = os.environ["MASTER_ADDR"], time.monotonic() + _NAME_SECONDS
    while not os.environ.get("KUBERNETES_SERVICE_HOST"):  # there a pod's name exists only once the pod has started
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN and time.monotonic() < until:
                time.sleep(1)
                continue
            problem = f"must be a host that {socket.gethostname()} can resolve"
            raise UserError("MASTER_ADDR", host, problem, "give the name or address of rank 0's host") from None


def check_rank() -> None:
    """Refuse a rank that does not fit the number of ranks, of all and of its host.

    Raises:
        UserError: A variable is missing or does not fit.
    """
    if not os.environ.get("RANK") and world_size() > 1:
        remedy = "start with deepspeed or torchrun, or run `unset WORLD_SIZE`"
        raise UserError("WORLD_SIZE", world_size(), "must be unset without RANK", remedy, _PLACE)
    if rank() >= world_size():
        problem = f"must be less than WORLD_SIZE ({world_size()})"
        raise UserError("RANK", rank(), problem, "run `unset RANK`", _PLACE)
    started, own = bool(os.environ.get("RANK")), number("LOCAL_RANK", default=0, least=0)
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        most = number(name, default=_MOST, least=1, most=world_size() if started else _MOST)
        if started and own >= most:
            raise UserError("LOCAL_RANK", own, f"must be less than {name} ({most})", "run `unset RANK`", _PLACE)


def unfit_meeting_place(host: str, port: int, error: RuntimeError) -> UserError:
    """Return the message, from torch's error, for an address and port at which rank 0 cannot listen."""
    own = socket.gethostname()
    if "EADDRINUSE" in str(error) or "EACCES" in str(error):
        problem = f"cannot be used on {own}: another program uses it, or it is reserved for root"
        return UserError("MASTER_PORT", port, problem, "give another, as with --master_port")
    problem = f"must be an address of rank 0's host, {own}"
    return UserError("MASTER_ADDR", host, problem, "give the name or address of rank 0's host")
