"""The `bigsgan` command, also as `python -m bigsgan`: takes note of signals before the imports, which take time."""

import importlib
import signal
import sys
from collections.abc import Sequence

from bigsgan.runtime.signals import Noted, is_training


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status, as ``bigsgan.cli.main`` does."""
    words = sys.argv[1:] if arguments is None else arguments
    noted = Noted() if is_training(words) else None
    try:
        return int(importlib.import_module("bigsgan.cli").main(words, noted))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
