"""The `bigsgan` command.

What may ask a run to stop is noted before anything else, as imports take their time. Recipes are checked before torch
and deepspeed are imported: a mistake is answered at once, and with every rank doing the same check, one speaks. What
takes time is therefore imported by name: the parser here, the modules behind the commands once the input is known to
be good.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from bigsgan.errors import EXIT_BAD_INPUT, UserError, rank_so_far, speak, wait_to_be_ended
from bigsgan.signals import STOPPING
from bigsgan.training.stopping import StopRequests


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 for bad input."""
    words = sys.argv[1:] if arguments is None else arguments
    trains = list(words[:1]) == ["train"]
    launched = bool(os.environ.get("RANK") or os.environ.get("SLURM_STEP_NUM_TASKS"))
    requests = StopRequests(launched, STOPPING if trains else ())
    try:
        with requests.listening():
            options = importlib.import_module("bigsgan.commands.choosing").parse(words)
            options.requests = requests
            return int(options.run(options))
    except UserError as error:
        _speak_once(error)
        return EXIT_BAD_INPUT


def _speak_once(error: UserError) -> None:
    """Print on rank 0, while the others wait to be ended.

    A rank that is still alive after that met something that rank 0 did not, such as a file missing on its host alone.
    """
    if rank_so_far() > 0:
        wait_to_be_ended()
    speak(error)
