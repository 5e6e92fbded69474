"""A sweep file: one line of overrides for each task of a Slurm job array."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import read_text


def read_sweep(path: Path) -> list[list[str]]:
    """Return the overrides of each task, in order.

    Words are quoted as in a shell, without its expansions. A word that begins with ``#`` begins a comment. Lines
    without overrides do not count.

    Raises:
        UserError: The file cannot be read, a quotation does not end, or no line has overrides.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise UserError("--sweep", str(path), f"cannot be read: {reason(error, path)}", "give a text file") from None
    tasks = []
    for number, line in enumerate(lines, start=1):
        try:
            words = _split(line)
        except ValueError as error:
            raise UserError("--sweep", f"{path}:{number}", f"cannot be split: {error}", "close the quotes") from None
        if words:
            tasks.append(words)
    if not tasks:
        raise UserError("--sweep", str(path), "has no line of overrides", "write a line for each task")
    return tasks


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex would find comments inside words too, as in out=runs/a#b
    return list(itertools.takewhile(lambda word: not word.startswith("#"), lexer))


def own_overrides(path: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the overrides of this task of a job array, whose number, from 1 on, is in the environment.

    Raises:
        UserError: This is not a task of an array, or the file is invalid or has no line for this task.
    """
    tasks = read_sweep(path)
    text = environment.get("SLURM_ARRAY_TASK_ID", "")
    remedy = f"submit with `sbatch --array 1-{len(tasks)}`"
    if not text:
        raise UserError("--sweep", None, "needs a task of a job array", remedy)
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= len(tasks):
        raise UserError("--sweep", str(path), f"has {len(tasks)} lines of overrides, none for task {text}", remedy)
    return tasks[int(text) - 1]
