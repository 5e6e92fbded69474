"""A rank of a run that fails where it is told to: `python tests/distributed/failing.py WHERE HOW WHO WORDS...`.

It takes itself for the only rank of its host. The other rank goes on; or, if WHO begins with "-", sleeps from there on,
as a rank does whose device waits for a message: no collective fails there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from unittest import mock

from bigsgan.__main__ import main
from bigsgan.adversarial import AdversarialStep
from bigsgan.errors import UserError
from bigsgan.runtime import comm, roster
from bigsgan.training import build, loop, opening
from bigsgan.training.measuring import Measuring

PLACES = {
    "joining": (comm, "initialize"),
    "first collective": (opening, "check_plans"),
    "build": (opening, "build_run"),
    "restore": (build, "_restore"),
    "samples": (loop, "_report_samples"),
    "evaluation": (Measuring, "__call__"),
    "update": (AdversarialStep, "__call__"),
    "save": (loop, "save"),
    "end": (loop.Run, "close"),
}


def fail(how: str) -> None:
    """End this rank as it is told."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise KeyError("planted")
    raise UserError("data.root", "images", "is planted", "plant nothing")


def plant(where: str, how: str, who: int, sleeps: bool) -> None:
    """Fail, or sleep, at the first call of what is done there."""
    owner, name = PLACES[where]
    original = getattr(owner, name)

    def planted(*arguments: object, **options: object) -> object:
        if int(os.environ["RANK"]) == who:
            print(f"{time.time()} fails", file=sys.stderr, flush=True)
            fail(how)
        if sleeps:
            time.sleep(600)
        return original(*arguments, **options)

    mock.patch.object(owner, name, planted).start()


if __name__ == "__main__":
    here = f"host{os.environ['RANK']}"
    mock.patch.object(roster, "_numbering", return_value=here).start()
    mock.patch("socket.gethostname", return_value=here).start()
    where, how, who, *words = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]  # deepspeed's
    plant(where, how, abs(int(who)), who.startswith("-"))
    sys.exit(main(["train", *words]))
