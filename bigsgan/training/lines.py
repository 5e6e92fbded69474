"""What a run says when it begins and ends."""

from __future__ import annotations

from pathlib import Path

from bigsgan import shipped
from bigsgan.config.run_directory import RECIPE_FILE
from bigsgan.errors import counted
from bigsgan.runtime import comm
from bigsgan.training.loop import Run


def opening_line(run: Run) -> str:
    """Say from where to where a run trains."""
    num, recipe = comm.world_size(), run.recipe
    ranks = f"{counted(num, 'rank')} on {comm.device().type}"
    return f"training: images {run.counters.nimg} to {recipe.total_nimg}, {ranks}, a report every {recipe.report_nimg}"


def stopping_line(reason: str, nimg: int) -> str:
    """Say what stopped a run."""
    where = f"at {nimg} images, which are saved" if nimg else "before the first update"
    return f"stopped by {reason} {where}; the same command resumes"


def closing_lines(out: Path, run: Run) -> str:
    """Say where the files of a complete run are."""
    nimg, has_board = run.counters.nimg, "tensorboard" in run.recipe.monitor
    return "\n".join(
        [
            f"done: {nimg} images",
            f"  samples      {out / 'samples'}",
            f"  checkpoint   {out / 'checkpoints' / f'{nimg:012d}'}",
            f"  reports      {out / 'metrics.jsonl'}",
            *([f"look at it:    tensorboard --logdir {out.parent}"] if has_board else []),
            f"continue:      {shipped.train_command()} --config {out / RECIPE_FILE} total_nimg={2 * nimg}",
        ]
    )
