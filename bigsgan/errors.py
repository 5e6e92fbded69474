"""The one exception that a user is meant to read, and how ranks end that print it and that do not."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
FORWARDING_SECONDS = 0.5
"""How long a rank that printed a message lives on, so that its launcher forwards it."""

_SILENT_RANKS_WAIT_SECONDS = 30.0
_LONGEST_VALUE, _LONGEST_FIELD, _LONGEST_TEXT = 120, 400, 1000
_MOST_DIGITS = 9


class UserError(Exception):
    """Something that the user can mend: bad input, a missing file, a full disk.

    The command line ends with exit status 2 and prints this exception's text, one line, without a traceback.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        """Build ``field: value problem; remedy``.

        Args:
            field: What to mend: a dotted recipe key, a path, or a command-line flag.
            value: The value that was found. ``None`` leaves it out of the text.
            problem: What is wrong with it, as the end of a sentence that begins with the value.
            remedy: What to do about it, as an imperative sentence.
        """
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        shown = "" if value is None else f"{_shown(value)} "
        problem, remedy = (_shorten(part, _LONGEST_TEXT) for part in (problem, remedy))
        text = f"{_shorten(field, _LONGEST_FIELD)}: {shown}{problem}; {remedy}"
        text = " ".join(line.strip() for line in text.splitlines())  # libraries' own texts have many lines
        super().__init__("".join(map(_printable, text)))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, object, str, str]]:
        """Travel between ranks: an exception would be made anew from its text alone."""
        return UserError, (self.field, self.value, self.problem, self.remedy)


def speak(error: UserError) -> None:
    """Print the message; of several ranks, live on until the launcher has forwarded it: srun drops what comes late."""
    with suppress(OSError):  # a full disk behind it; the status says that something is wrong
        print(f"bigsgan: {error}", file=sys.stderr, flush=True)
    if (os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        time.sleep(FORWARDING_SECONDS)


def rank_so_far() -> int:
    """Return this process's rank as far as its environment says, also where that was not checked yet."""
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "")  # srun's tasks, before they have the others'
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def wait_to_be_ended() -> None:
    """Sleep while the rank that speaks prints: launchers end all ranks as soon as one has exited.

    Whoever ends this one finds the same status: Slurm records the highest of its tasks', and 143 for one that SIGTERM
    ended.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_BAD_INPUT))
    time.sleep(_SILENT_RANKS_WAIT_SECONDS)


def _shown(value: object) -> str:
    # Cut before its repr is made, which may be many times as long.
    return _shorten(repr(value[: _LONGEST_VALUE + 1] if isinstance(value, str | bytes) else value))


def _printable(letter: str) -> str:
    """A letter as it is, or escaped: names of files may hold what moves a terminal's cursor, or no UTF-8 at all."""
    return letter if letter.isprintable() else repr(letter)[1:-1]


def _shorten(text: str, longest: int = _LONGEST_VALUE) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."
