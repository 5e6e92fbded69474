"""How long torch has been compiling. The compiler itself, which takes seconds to import, is not imported here."""

from __future__ import annotations

import time
from typing import Any


class CompileClock:
    """Runs while torch compiles; ``begin`` and ``end`` are callbacks of torch's compiler."""

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self, arguments: Any = None) -> None:
        """Note that a compilation begins."""
        self._since = time.monotonic()

    def end(self, arguments: Any = None) -> None:
        """Note that it ends."""
        self._since = None

    def seconds(self) -> float:
        """How long the current compilation has lasted; 0 if there is none. Any thread may ask."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


CLOCK = CompileClock()
"""Of this process."""
