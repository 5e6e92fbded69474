"""What ranks of a pool do; results go back to the test as plain tensors on rank 0's pipe."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bigsgan import comm
from bigsgan.adversarial import LearningRates
from bigsgan.monitor import RankLog
from bigsgan.train import build_run
from bigsgan.training.loop import Run
from bigsgan.training.schedules import average_decay
from tests.tiny import tiny_plan

logging.getLogger("bigsgan").setLevel(logging.ERROR)


def build(overrides: list[str], ds: dict[str, Any], found: Any = None) -> Run:
    """A run of the tiny recipe on this pool's ranks, put together as the product does."""
    directory = Path(tempfile.mkdtemp())
    plan = tiny_plan(directory, comm.world_size(), overrides, ds)
    return build_run(plan, directory, found, RankLog(directory / "log", comm.rank(), print))


def update(run: Run, num_updates: int) -> None:
    """Make updates as the training loop does, without its reports."""
    for _ in range(num_updates):
        recipe = run.recipe
        run.step(run.counters.update, LearningRates(recipe.optimizer.generator.lr, recipe.optimizer.discriminator.lr))
        run.counters.update += 1
        run.counters.nimg += recipe.batch
        if run.step.generator.applied:
            run.average.update(average_decay(recipe.ema, recipe.batch, run.counters.nimg))


def destroy(run: Run) -> None:
    run.reporter.close()
    run.step.generator.destroy()
    run.step.discriminator.destroy()


def local_state(run: Run) -> dict[str, Any]:
    """This rank's pieces of every parameter, and all buffers: entry -> name -> [(offset, values)]."""
    result = {}
    for entry in ("generator", "discriminator", "average"):
        tensors, layout = run.entries[entry].tensors(), run.entries[entry].layout()
        found: dict[str, Any] = {}
        for key, pieces in layout.items():
            for piece in pieces:
                values = tensors[key].flatten()[piece.start : piece.start + piece.numel]
                found.setdefault(piece.name, []).append((piece.offset, values.cpu().numpy().copy()))
        for key, value in tensors.items():
            if key.startswith("buffer."):
                found[key.removeprefix("buffer.")] = value.cpu().numpy().copy()
        result[entry] = found
    return result


def merge(states: list[dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Whole tensors from all ranks' ``local_state``; buffers must agree between ranks, bit for bit."""
    merged: dict[str, dict[str, torch.Tensor]] = {}
    for entry, first in states[0].items():
        merged[entry] = {}
        for name in {name for state in states for name in state[entry]}:
            parts = [state[entry][name] for state in states if name in state[entry]]
            if isinstance(parts[0], np.ndarray):
                assert all(np.array_equal(parts[0], other) for other in parts), f"{entry}.{name} differs between ranks"
                merged[entry][name] = torch.from_numpy(parts[0])
                continue
            pieces = {offset: values for part in parts for offset, values in part}
            flat = np.concatenate([pieces[offset] for offset in sorted(pieces)])
            merged[entry][name] = torch.from_numpy(flat)
        assert first
    return merged


def train(overrides: list[str], ds: dict[str, Any], num_updates: int) -> dict[str, Any]:
    run = build(overrides, ds)
    update(run, num_updates)
    state = local_state(run)
    destroy(run)
    return state
