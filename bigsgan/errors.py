"""The one exception that a user is meant to read."""

from __future__ import annotations

EXIT_BAD_INPUT = 2


class UserError(Exception):
    """Something that the user can mend: bad input, a missing file, a full disk.

    The command line ends with exit status 2 and prints this exception's text, once, without a traceback.
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
        shown = "" if value is None else f"{value!r} "
        super().__init__(f"{field}: {shown}{problem}; {remedy}")
