"""A sweep file: one line of overrides for each task of a Slurm job array."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bigsgan.config.yaml_file import parse_override
from bigsgan.errors import UserError, counted, reason
from bigsgan.runtime.paths import read_text


class Task(list[str]):
    """The overrides of a task of a job array."""

    def __init__(self, overrides: Sequence[str] = (), line: str = "") -> None:
        """Take the overrides that stand in a ``line``.

        Raises:
            UserError: An override is malformed.
        """
        super().__init__(overrides)
        self._line = line
        try:
            self._sections = {parse_override(text)[0][0] for text in overrides}
        except UserError as error:
            raise self._named(error) from None

    @contextmanager
    def naming_line(self) -> Iterator[None]:
        """Add the line to messages about the sections that it changes."""
        try:
            yield
        except UserError as error:
            if error.field.partition(".")[0] not in self._sections:
                raise
            raise self._named(error) from None

    def _named(self, error: UserError) -> UserError:
        detail = f"{error.detail}; {self._line}" if error.detail else self._line
        return UserError(error.field, error.value, error.problem, error.remedy, detail)


def read_sweep(path: Path) -> list[Task]:
    """Return the overrides of each task, in order.

    Words are quoted as in a shell, without its expansions. A word that begins with ``#`` begins a comment. Lines
    without overrides do not count.

    Raises:
        UserError: The file cannot be read, a quotation does not end, an override is malformed, or there is none.
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
            tasks.append(Task(words, f"line {number} of {path}"))
    if not tasks:
        raise UserError("--sweep", str(path), "has no line of overrides", "write a line for each task")
    return tasks


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex would find comments inside words too, as in out=runs/a#b
    return list(itertools.takewhile(lambda word: not word.startswith("#"), lexer))


def own_overrides(path: Path, environment: Mapping[str, str]) -> Task:
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
        problem = f"has {counted(len(tasks), 'line')} of overrides, none for task {text}"
        raise UserError("--sweep", str(path), problem, remedy)
    return tasks[int(text) - 1]
