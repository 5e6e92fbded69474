"""The training loop's interface to all outputs: progress, metrics, images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bigsgan.config.run_directory import is_own_table
from bigsgan.config.yaml_file import dump_yaml
from bigsgan.errors import UserError
from bigsgan.images.grids import image_grid, save_png
from bigsgan.monitor.progress import Progress
from bigsgan.monitor.sinks import CSV, JsonLines, Rows, Sink, TensorBoard
from bigsgan.monitor.wandb_run import WandbRun
from bigsgan.runtime.paths import writing

_log = logging.getLogger(__name__)


class Reporter:
    """Reports metrics and images to metrics.jsonl, samples/, the terminal and the recipe's monitors; on rank 0 only.

    Every rank may call every method; on other ranks they show and write nothing.
    """

    def __init__(
        self,
        out: Path,
        rank: int,
        total_nimg: int,
        resume_nimg: int,
        monitor: Collection[str] = ("tensorboard",),
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files of the run directory; make the directory if it is missing.

        Earlier reports after ``resume_nimg`` images are dropped. ``recipe`` is the resolved recipe, for monitors that
        can show it.

        Raises:
            UserError: The run directory cannot be written. Later, this is only a warning.
        """
        self._samples, self._total_nimg = out / "samples", total_nimg
        self._sinks: list[Sink] = []  # none, and no progress, on other ranks than 0
        self._progress: Progress | None = None
        if rank == 0:
            with writing(out):
                self._samples.mkdir(parents=True, exist_ok=True)
            self._sinks = _build_sinks(out, resume_nimg, monitor, recipe or {})
            self._progress = Progress(total_nimg, resume_nimg)

    def rewind(self, nimg: int) -> None:
        """Remove reports after ``nimg`` images, and continue from there."""
        if self._progress is not None:
            self._progress.close()
            self._each(lambda sink: sink.rewind(nimg))
            self._progress = Progress(self._total_nimg, nimg)

    @property
    def are_displaced(self) -> bool:
        """Whether a path of reports leads elsewhere than when they were opened; False on other ranks than 0."""
        return any(sink.is_displaced for sink in self._sinks if isinstance(sink, Rows))

    @property
    def are_replaced(self) -> bool:
        """Whether such a path leads to other reports now."""
        return any(sink.is_replaced for sink in self._sinks if isinstance(sink, Rows))

    def restore(self) -> None:
        """Write all reports again whose files were removed; images are lost.

        Raises:
            UserError: They cannot be written.
        """
        boards = [sink for sink in self._sinks if isinstance(sink, TensorBoard) and not sink.is_there]
        for sink in self._sinks:
            sink.restore()
        for rows in self._sinks:
            if isinstance(rows, JsonLines):
                for report in rows.reports():
                    for board in boards:
                        board.add_scalars(*report)

    def report(self, nimg: int, metrics: Mapping[str, float]) -> None:
        """Write and show the metrics of the images up to ``nimg``."""
        self._each(lambda sink: sink.add_scalars(metrics, nimg))
        if self._progress is not None:
            self._progress.update(nimg, metrics)

    def measured(self, nimg: int, metrics: Mapping[str, float]) -> None:
        """Write and print quality metrics of the state at ``nimg`` images."""
        self._each(lambda sink: sink.add_scalars(metrics, nimg))
        shown = "  ".join(f"{name.partition('/')[2]} {value:.4g}" for name, value in metrics.items())
        self.message(f"nimg {nimg}/{self._total_nimg}  {shown}")

    def images(self, tag: str, images: Tensor, columns: int, nimg: int) -> None:
        """Write images (n, C, H, W) in [-1, 1] as one grid to samples/ and all monitors."""
        if not self._sinks:
            return
        grid, path = image_grid(images, columns), self._samples / f"{tag.replace('/', '_')}_{nimg:012d}.png"
        try:
            with writing(path):
                self._samples.mkdir(parents=True, exist_ok=True)  # it may have been removed
            save_png(grid, path)
            self._each(lambda sink: sink.add_image(tag, grid, path, nimg))
        except UserError as error:
            _warn(error)

    def message(self, text: str) -> None:
        """Print a text without breaking the progress bar."""
        if self._progress is not None:
            self._progress.write(text)

    def close(self) -> None:
        """Write all pending reports and close the files; ``message`` still prints."""
        if self._progress is not None:
            self._progress.close()
        self._each(lambda sink: sink.close())

    def _each(self, work: Callable[[Sink], None]) -> None:
        """Do something with every sink. On a full disk all of them refuse, so that there is only one warning."""
        refused = []
        for sink in self._sinks:
            try:
                work(sink)
            except UserError as error:
                refused.append(error)
        if refused:
            _warn(refused[0])


def _build_sinks(out: Path, resume_nimg: int, monitor: Collection[str], recipe: Mapping[str, Any]) -> list[Sink]:
    sinks: list[Sink] = [JsonLines(out / "metrics.jsonl", resume_nimg)]
    table = out / "metrics.csv"
    if "csv" in monitor:
        sinks.append(CSV(table, resume_nimg))
    elif table.is_file() and is_own_table(table):  # remove rows after resume_nimg, from a trajectory that the run left
        CSV(table, resume_nimg).close()
    if "tensorboard" in monitor:
        board = TensorBoard(out, resume_nimg)
        board.add_charts()
        board.add_text("recipe", f"```yaml\n{dump_yaml(dict(recipe))}```", resume_nimg)
        sinks.append(board)
    if "wandb" in monitor:
        sinks.append(WandbRun(out, recipe))
    return sinks


def _warn(error: UserError) -> None:
    """Warn that something cannot be written: a full disk does not end a run before its last checkpoint."""
    _log.warning("%s; training continues", error)
