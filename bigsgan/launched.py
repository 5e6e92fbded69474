"""What a launcher has told this process in its environment, checked before anything heavy is imported."""

from __future__ import annotations

import os

from bigsgan.errors import UserError


def world_size() -> int:
    """Return the number of ranks that were started."""
    return number("WORLD_SIZE", default=1, least=1)


def rank() -> int:
    """Return this process's rank."""
    return number("RANK", default=0, least=0)


def number(name: str, default: int, least: int) -> int:
    """Return a number that launchers set.

    Raises:
        UserError: It is no integer, or below ``least``.
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise UserError(name, text, "is set in the environment and is no number of that kind", f"run `unset {name}`")
    return int(text)


def check_launcher() -> None:
    """Refuse an environment that only looks like a launcher's.

    Raises:
        UserError: With the variable that is missing or does not fit.
    """
    check_rank()
    if not os.environ.get("RANK"):
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            remedy = "start with deepspeed or torchrun, or run `unset RANK`"
            raise UserError(name, None, "is not set in the environment and RANK is", remedy)
    for name, least in (("LOCAL_RANK", 0), ("LOCAL_SIZE", 1), ("LOCAL_WORLD_SIZE", 1), ("MASTER_PORT", 1)):
        number(name, default=least, least=least)


def check_rank() -> None:
    """Refuse a rank that does not fit the number of ranks.

    Raises:
        UserError: With the variable that is missing or does not fit.
    """
    if not os.environ.get("RANK") and world_size() > 1:
        remedy = "start with deepspeed or torchrun, or run `unset WORLD_SIZE`"
        raise UserError("WORLD_SIZE", world_size(), "is set in the environment and RANK is not", remedy)
    if rank() >= world_size():
        problem = f"is set in the environment and WORLD_SIZE is {world_size()}"
        raise UserError("RANK", rank(), problem, "run `unset RANK`")
