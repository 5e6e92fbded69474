"""Reports to one run of Weights & Biases (W&B), online or offline, by its library, which is an extra."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from bigsgan.errors import UserError
from bigsgan.runtime.atomic import write_text
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import writing

FINISH_SECONDS = 60.0
"""How long the end of a run waits for uploads unless WANDB_FINISH_TIMEOUT is set. W&B itself sets no limit."""

FLUSH_SECONDS = 1.0
"""Interval at which W&B's process writes to its file (wandb 0.31: 15 s), as it ends at once if training is killed."""

_ALARM = "alarm/"

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


def check_wandb() -> None:
    """Check that W&B can be used: its library is installed, its settings are valid, and it has an API key if online.

    Raises:
        UserError: One of these is missing or invalid.
    """
    field, value = "monitor", "wandb"
    require("wandb", field, value)
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        remedy = "install it again, or remove it from monitor"
        raise UserError(field, value, "needs the library of Weights & Biases", remedy, str(error)) from None
    try:
        online = wandb.setup().settings.mode not in ("offline", "disabled")
        logged_in = not online or wandb.login(prompt=False, verify=False)
    except (ValueError, wandb.Error) as error:
        detail = " ".join(str(error).partition("[type=")[0].split())
        raise UserError(field, value, "is refused by its library", "correct the WANDB_ variables", detail) from None
    if not logged_in:
        remedy = "run `wandb login`, or set WANDB_MODE=offline"
        raise UserError(field, value, "needs an API key of Weights & Biases", remedy)


class WandbRun:
    """Sends reports to a W&B run, which stays the same when the run directory is resumed.

    W&B refuses a step that is not larger than the last one. So a report has the step ``nimg``, or the next free step
    for a second report at the same ``nimg`` or after a rollback; curves are drawn over the metric ``nimg``. The id and
    the last step are kept in wandb/run.json, because an offline run cannot ask W&B for them.

    After an error of W&B there is one warning, and no more reports; training continues. If the disk is full for the
    file of the last step, there is one warning too, and reports continue.
    """

    def __init__(self, out: Path, recipe: Mapping[str, Any]) -> None:
        self._state = out / "wandb" / "run.json"
        self._step, self._warned = -1, False
        self._alarms: set[str] = set()
        self._run: Any = self._attempt(lambda: self._start(out, recipe))

    def add_scalars(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Add the metrics of a report."""
        if self._run is not None:
            self._attempt(lambda: self._add(metrics, nimg))
            self._attempt(lambda: self._alert(metrics, nimg))

    def add_image(self, tag: str, image: Tensor, path: Path, nimg: int) -> None:
        """Add the PNG file at ``path``; W&B copies it."""
        if self._run is not None:
            picture = importlib.import_module("wandb").Image
            self._attempt(lambda: self._add({tag: picture(str(path))}, nimg))

    def rewind(self, nimg: int) -> None:
        """Do nothing: W&B keeps its reports, and later ones have larger steps."""

    def restore(self) -> None:
        """Do nothing: W&B's process holds its own files."""

    def close(self) -> None:
        """Wait for uploads, for a limited time, and end the W&B run; it can be resumed."""
        run, self._run = self._run, None
        if run is not None:
            self._attempt(run.finish)
            _end()

    def _start(self, out: Path, recipe: Mapping[str, Any]) -> Any:
        wandb = importlib.import_module("wandb")
        kept = json.loads(self._state.read_text()) if self._state.exists() else {}
        found = wandb.setup().settings
        if found.mode == "disabled":
            return None
        settings = wandb.Settings(
            project=found.project or "bigsgan",
            run_name=found.run_name or out.absolute().name,
            root_dir=os.environ.get("WANDB_DIR") or str(out),
            console=os.environ.get("WANDB_CONSOLE") or "off",  # a progress bar is not a log
            finish_timeout=found.finish_timeout or FINISH_SECONDS,
            x_transaction_log_flush_interval=FLUSH_SECONDS,
        )
        resume = None if found.mode == "offline" else "allow"  # offline, W&B warns of "allow"
        run = wandb.init(id=kept.get("id"), resume=resume, settings=settings)
        run.config.update(recipe, allow_val_change=True)
        run.define_metric("*", step_metric="nimg")
        self._step = max(kept.get("step", -1), run.starting_step - 1)
        self._keep(run.id)
        return run

    def _add(self, values: Mapping[str, Any], nimg: int) -> None:
        self._step = max(nimg, self._step + 1)
        self._keep(self._run.id)
        self._run.log({"nimg": nimg, **values}, step=self._step, commit=True)

    def _alert(self, metrics: Mapping[str, float], nimg: int) -> None:
        """Let W&B send a message for each alarm that was not in the previous report."""
        if self._run is None or not any(name.startswith("loss/") for name in metrics):  # quality metrics have no alarms
            return
        alarms = {name for name in metrics if name.startswith(_ALARM)}
        for name in sorted(alarms - self._alarms):
            text = f"at {nimg} images; the log of rank 0 says what to try"
            self._run.alert(title=name.removeprefix(_ALARM), text=text, level="WARN")
        self._alarms = alarms

    def _keep(self, run_id: str) -> None:
        try:
            with writing(self._state):
                self._state.parent.mkdir(exist_ok=True)
                write_text(self._state, json.dumps({"id": run_id, "step": self._step}) + "\n")
        except UserError as error:
            if not self._warned:
                _log.warning("%s; reports to Weights & Biases continue", error)
            self._warned = True

    def _attempt(self, work: Callable[[], _Result]) -> _Result | None:
        try:
            return work()
        except Exception as error:  # whatever W&B raises
            self._run = None
            _log.warning(
                "Weights & Biases: %s; training continues without it", " ".join((str(error) or repr(error)).split())
            )
            _end()
            return None


def _end() -> None:
    """End W&B's process: ``finish`` returns before it has written everything, and Python would show a traceback."""
    with suppress(Exception):
        importlib.import_module("wandb").teardown()
