"""A training run in Python, and as `bigsgan train` has it: from its plan to its exit status."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from bigsgan import plugins
from bigsgan.config import Recipe, RunPlan
from bigsgan.config.metrics import FeatureNetwork
from bigsgan.config.run_directory import refuse_among_images, refuse_directory, refuse_foreign_metrics, refuse_unknown
from bigsgan.config.signature import typed
from bigsgan.engines.deepspeed import reports
from bigsgan.errors import UserError
from bigsgan.monitor import RankLog
from bigsgan.monitor.logs import current_log
from bigsgan.planner.balance import plan_balanced
from bigsgan.runtime import comm, launched, roster
from bigsgan.runtime.ending import exit_status
from bigsgan.training.build import open_inputs, samples_to_show
from bigsgan.training.callbacks import build_callbacks
from bigsgan.training.directory import check_writable
from bigsgan.training.lines import closing_lines, opening_line, stopping_line
from bigsgan.training.looking import evaluated, sampled, saved
from bigsgan.training.loop import Run, finished, training_loop
from bigsgan.training.opening import Opened, built, check_libraries, opened
from bigsgan.training.reports import Report
from bigsgan.training.script import Command, Script
from bigsgan.training.start import find_start
from bigsgan.training.stopping import LAUNCHER_ENDED, StopRequests

_log = logging.getLogger(__name__)


class Trainer:
    """One run, for a script or a notebook: on this process, or on every rank of a launcher, which all do the same.

    ::

        with bigsgan.Trainer(bigsgan.Recipe.read("digits", "out=runs/digits")) as trainer:
            for report in trainer:
                print(report.nimg, report.metrics["loss/generator"])
            images = trainer.sample(16)

    A run directory with checkpoints is resumed, as by `bigsgan train`. In a notebook, ``close`` stands for the end of
    the block. A signal that comes while it trains, such as Ctrl-C, lets it save, and ends the loop.

    On several ranks, a loop's body has to end within ``hang_timeout_seconds``, and an error ends the process: one rank
    prints its message. A process has one open trainer at a time.

    Attributes:
        plan: The recipe on these ranks.
        stopped_by: What stopped the run, such as SIGTERM; None if nothing did.
    """

    def __init__(
        self,
        recipe: Recipe | RunPlan,
        callbacks: Sequence[object] = (),
        *,
        allow_change: Collection[str] = (),
        nimg: int | None = None,
        around: Command | None = None,
    ) -> None:
        """Check a recipe for these ranks; nothing is written or built yet.

        Args:
            recipe: The recipe, or its plan.
            callbacks: Objects with some of the methods ``on_start``, ``on_report``, ``on_save`` and ``on_end``, which
                rank 0 calls besides the recipe's own.
            allow_change: Keys of the recipe that may differ from a checkpoint's, though they change its meaning.
            nimg: Go back to the checkpoint at so many images, as by `bigsgan train --nimg`.
            around: The command that trains; by default this is a script of the user's.

        Raises:
            UserError: The recipe cannot run on these ranks.
        """
        self._around = around or Script()
        self.plan = self._around.on_every_rank(lambda: _planned(recipe, callbacks, allow_change, nimg))
        self._given, self._allowed, self._asked = callbacks, allow_change, nimg
        self._stack = ExitStack()
        self._opened: Opened | None = None
        self._run: Run | None = None
        self._loop: Generator[Report, None, bool] | None = None
        self._has_ended = self._is_closed = False
        self._closed_nimg = 0
        self.stopped_by: str | None = None

    def __enter__(self) -> Trainer:
        self._around.on_every_rank(self._open)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._opened is not None:
            self._closed_nimg = self.nimg
        self._is_closed = True
        self._opened = self._run = self._loop = None
        self._stack.__exit__(*error)

    def close(self) -> None:
        """End the run: its directory is free for others, and its ranks have parted."""
        self.__exit__(None, None, None)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe, as these ranks have it."""
        return self.plan.recipe

    @property
    def nimg(self) -> int:
        """Images that the run has seen."""
        if self._is_closed:
            return self._closed_nimg
        return self._open().start.nimg if self._run is None else self._run.counters.nimg

    def build(self) -> Run:
        """Build data, networks, engines and state, and load the newest checkpoint; return the run's parts.

        Whatever needs them builds them, so that only who wants the parts themselves calls this.

        Raises:
            UserError: The run cannot start.
        """
        return self._around.on_every_rank(self._built)

    def __iter__(self) -> Iterator[Report]:
        """Train, and yield each report. A loop that was left goes on in the next one.

        Raises:
            UserError: See ``training_loop``.
        """
        while (report := self._around.on_every_rank(self._next)) is not None:
            yield report

    def train(self) -> Report:
        """Train to the end, or until a signal stops the run; return the last report.

        Raises:
            UserError: See ``training_loop``.
        """
        self._around.on_every_rank(self.to_end)
        if self._run is None:  # the run was complete before
            found = self._open().start.source
            return Report(self.nimg, {} if found is None else found.manifest["metrics"])
        return Report(self.nimg, self._run.reports.metrics_at(self.nimg))

    def save(self) -> Path:
        """Save a checkpoint of the run as it is, and return its directory. A collective.

        Raises:
            UserError: It cannot be saved, or a callback fails that is told of it.
        """
        return self._around.on_every_rank(lambda: saved(self._built()))

    def sample(
        self,
        num: int = 16,
        *,
        seed: int = 0,
        classes: Sequence[int] | None = None,
        conditions: Tensor | None = None,
        live: bool = False,
    ) -> Tensor:
        """Make images of the generator's EMA, of the latents that `bigsgan sample` takes with that seed. A collective.

        Batch norm has the statistics of the run's own sample grids.

        Args:
            num: Number of images.
            seed: Seed of the latents.
            classes: Classes of the images, in turn; by default all that the data has.
            conditions: Labels (M, K) of the images, in turn, where labels are vectors; by default some of the data.
            live: Take the weights being trained instead of their EMA.

        Returns:
            Images (num, C, H, W) in [-1, 1] on the host; none on ranks that do not hold the generator.

        Raises:
            UserError: The generator translates images, or a number is out of range.
        """
        return self._around.on_every_rank(lambda: sampled(self._built(), num, seed, classes, live, conditions))

    def evaluate(self, metrics: Sequence[str], features: FeatureNetwork | None = None) -> dict[str, float]:
        """Measure the EMA's samples as the run's own metrics do. A collective.

        Args:
            metrics: Names such as fid10k, or of code such as ``mypackage.metrics:Sharpness``.
            features: The feature network; by default the recipe's, or ``auto``.

        Returns:
            Numbers by name, such as ``metrics/fid10k``, which are recorded in ``evaluations.jsonl`` too.

        Raises:
            UserError: A metric is unknown, fails, or does not fit the data.
        """
        return self._around.on_every_rank(lambda: evaluated(self._built(), self.plan, metrics, features))

    def to_end(self) -> str | None:
        """Train to the end; return None if the run is complete, else what stopped it, the same on all ranks."""
        if not self._is_complete():
            loop = self._begun()
            with self._ending(), self._around.listening(), self._watching():
                complete = finished(loop)
            self._end(complete)
        return self.stopped_by

    def _next(self) -> Report | None:
        if self._is_complete():
            return None
        loop = self._begun()
        with self._ending(), self._around.listening(), self._watching():
            try:
                return next(loop)
            except StopIteration as end:
                complete = bool(end.value)
        self._end(complete)
        return None

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the run if the block fails."""
        try:
            yield
        except BaseException as error:
            plugins.note_origin(error)
            _log.info("stopped", exc_info=error)
            self.__exit__(*sys.exc_info())
            raise

    def _open(self) -> Opened:
        if self._is_closed:
            raise UserError("Trainer", None, "is closed", "make another one, which resumes the run")
        if self._opened is None:
            with self._ending():
                self._stack.enter_context(self._around.joined(*_memory_remedy(self.plan)))
                self._opened = self._stack.enter_context(opened(self.plan, self._allowed, self._asked))
                self._around.watchdog.rank_log = self._opened.rank_log
        return self._opened

    def _built(self) -> Run:
        if self._run is None:
            opened = self._open()
            with self._ending():
                self._run = self._stack.enter_context(built(self.plan, opened, self._given))
        return self._run

    def _is_complete(self) -> bool:
        """Return whether nothing is left to do; say so where the run was complete before."""
        if self._loop is None:
            start, measures = self._open().start, self.recipe.metrics is not None
            if (nimg := self.nimg) >= self.recipe.total_nimg and not (measures and start.owes_metrics):
                if comm.rank() == 0 and not self._has_ended:
                    print(f"{self.recipe.out} is complete at {nimg} images; raise total_nimg to continue")
                self._has_ended = True
        return self._has_ended

    def _begun(self) -> Generator[Report, None, bool]:
        """Return the training loop, which begins if it has not."""
        run = self._built()
        if self._loop is None:
            run.reporter.message(opening_line(run))  # the first report may take minutes
            with self._ending():
                run.callbacks.require("on_start", self.recipe, run.counters.nimg)
            self._loop = training_loop(run, self._around.requests)
        return self._loop

    def _end(self, complete: bool) -> None:
        run, out = self._built(), Path(self.recipe.out)
        run.close()
        self._has_ended = True
        self.stopped_by = stopped_by = None if complete else _stopped_by(self._around.requests)
        last = stopping_line(stopped_by, run.counters.nimg) if stopped_by else closing_lines(out, run)
        for text in filter(None, (reports.summary(), last)):
            run.reporter.message(text)
            _log.info("%s", text)  # where there is no terminal
        with self._ending():
            run.callbacks.require("on_end", run.counters.nimg, complete)

    def _watching(self) -> AbstractContextManager[None]:
        """Watch inside the block whether the run goes on."""
        return self._around.watchdog.judging(self.recipe.hang_timeout_seconds)


def train(
    recipe: Recipe, callbacks: Sequence[object] = (), *, allow_change: Collection[str] = (), nimg: int | None = None
) -> Report:
    """Train a recipe, or resume its run, as `bigsgan train` does; see ``Trainer`` for the arguments.

    Returns:
        The last report: it has seen ``recipe.total_nimg`` images or more, unless a signal stopped the run.

    Raises:
        UserError: The recipe cannot run here; see ``Trainer``.
    """
    with Trainer(recipe, callbacks, allow_change=allow_change, nimg=nimg) as trainer:
        return trainer.train()


@typed
def _planned(
    recipe: Recipe | RunPlan, callbacks: Sequence[object], allow_change: Collection[str], nimg: int | None
) -> RunPlan:
    """Plan a recipe on a launcher's ranks, as `bigsgan train` does before torch is imported."""
    if isinstance(recipe, RunPlan):
        return recipe
    out = Path(recipe.out)
    if not os.path.isdir(out / "checkpoints"):
        refuse_unknown(allow_change, recipe)
    refuse_directory(out, "out")
    refuse_foreign_metrics(out, recipe.monitor)
    refuse_among_images(out, recipe.data)
    plan, text = plan_balanced(recipe, launched.world_size())
    if text and launched.rank() == 0:
        print(text, file=sys.stderr)
    return plan


def main(
    plan: RunPlan,
    requests: StopRequests,
    allowed: Collection[str] = (),
    stopped_status: int = 0,
    nimg: int | None = None,
) -> int:
    """Train, and return the process's exit status. Every rank calls this.

    The status is 0 if the run is complete, 2 after the message of a UserError, 1 if the launcher's end stopped it.

    Args:
        plan: The run's plan.
        requests: Requests to stop. Until the ranks have joined, they may end the process at once.
        allowed: Keys of the recipe that may differ from a checkpoint's, though they change its meaning.
        stopped_status: The status if a signal stopped the run before its end.
        nimg: Images of the checkpoint to go back to.
    """
    around = Command(requests)

    def work() -> int:
        with requests.listening(), around.meeting(*_memory_remedy(plan)):
            requests.joined()
            with Trainer(plan, allow_change=allowed, nimg=nimg, around=around) as trainer:
                stopped_by = trainer.to_end()
            requests.end_undisturbed()
        comm.leave()
        return {None: 0, LAUNCHER_ENDED: 1}.get(stopped_by, stopped_status)

    status = exit_status(work)
    if log := current_log():
        log.close()  # the process may run another command
    roster.know(())
    for stream in filter(None, (sys.stdout, sys.stderr)):  # either may be closed
        try:
            stream.flush()
        except OSError:  # Python would flush again at its end, fail, and replace the status by 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def check(plan: RunPlan, allowed: Collection[str], nimg: int | None = None) -> None:
    """Check everything that a start checks before it builds networks, on this rank alone; leave nothing.

    Raises:
        UserError: The start would be refused.
    """
    out = Path(plan.recipe.out)
    check_libraries(plan.recipe)
    check_writable(out)
    build_callbacks(plan.recipe)
    inputs = open_inputs(plan, out, find_start(plan, out, allowed, False, nimg), RankLog(out, 0, print))
    if plan.recipe.data.kind != "latents":  # which would have to be decoded
        samples_to_show(plan.recipe, inputs.shown, comm.device())


def _stopped_by(requests: StopRequests) -> str:
    """Return what stopped the run, which one rank may know; a signal outranks a launcher's end. A collective."""
    reasons = [reason for reason in comm.gather_objects(requests.reason) or [] if reason]
    chosen: str = comm.from_rank_zero(min(reasons, key=lambda reason: reason == LAUNCHER_ENDED, default=None))
    return chosen


def _memory_remedy(plan: RunPlan) -> tuple[str, str]:
    """Return texts about where memory is not enough, and about the remedy."""
    sizes = ", ".join(f"{plan.engines[n].micro_batch_size} ({n})" for n in plan.recipe.networks)
    networks = plan.recipe.networks
    staged = any(plan.placement(network).num_stages > 1 for network in networks)
    keeps = staged and plan.recipe.has_discriminator and plan.recipe.pipeline.generator_phase == "keep"
    return (
        f"on rank {comm.rank()} with {sizes} images a micro-batch",
        ("set pipeline.generator_phase=recompute; or set " if keeps else "set ")
        + " and ".join(f"engines.{network}.activation_checkpointing=true" for network in networks)
        + f"; or start a new `out` with more micro-batches (accumulation={2 * plan.recipe.accumulation}) or "
        + ("more pipeline stages" if staged else "a higher ZeRO stage (ds_configs/zero3.json)"),
    )
