"""Whole runs on a pool's ranks: from a recipe to the last line, with what a test does to them on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from bigsgan.adversarial import AdversarialStep
from bigsgan.config import NETWORKS
from bigsgan.errors import UserError
from bigsgan.monitor.logs import current_log
from bigsgan.runtime import comm
from bigsgan.trainer import Trainer
from bigsgan.training.script import Command
from bigsgan.training.stopping import StopRequests
from tests.tiny import tiny_plan, zero

BATCH = 8
MEASURED = ("images_per_second", "data_wait", "checkpoint/", "memory/", "metrics/seconds")
"""Names, and beginnings of names, of what differs from run to run."""


def run_whole(
    directory: str,
    overrides: dict[str, object],
    stop_in: int | None = None,
    after: Callable[[int], None] | None = None,
    out: str = "",
    nimg: int | None = None,
) -> str:
    """Train the tiny recipe in ``out`` or directory/run; return what stopped it, ``done``, or its error's message.

    ``after`` is called on rank 0 with the number of each update that was made. With ``nimg`` the run goes back.
    """
    for rank in range(comm.world_size()):
        if rank == comm.rank():  # one after the other, as each writes the recipe
            settings = [f"{key}={value}" for key, value in overrides.items()]
            plan = tiny_plan(Path(directory), comm.world_size(), settings, dict.fromkeys(NETWORKS, zero(1)))
            plan = replace(plan, recipe=plan.recipe.model_copy(update={"out": out or plan.recipe.out}))
        comm.barrier()
    make, requests = AdversarialStep.__call__, StopRequests(launched=False)

    def noted(step: Any, update: int, scheduled: Any) -> None:
        make(step, update, scheduled)
        if comm.rank() == 0:
            if update == stop_in:
                requests.signal = "SIGTERM"
            if after is not None:
                after(update)

    try:
        patched = mock.patch.object(AdversarialStep, "__call__", noted)
        with patched, Trainer(plan, nimg=nimg, around=Command(requests)) as trainer:
            return trainer.to_end() or "done"
    except UserError as error:
        return str(error)
    finally:
        if log := current_log():
            log.close()


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's reports, without what is measured."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in found]
