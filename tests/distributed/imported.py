"""What ranks of a pool do with a run directory that an import made."""

from pathlib import Path
from typing import Any

import torch

from bigsgan import checkpoint
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.monitor import RankLog
from bigsgan.runtime import comm
from bigsgan.training.build import build_run
from bigsgan.training.initial_weights import InitialWeights
from bigsgan.training.loop import Run
from bigsgan.training.start import Start
from tests.distributed.scenarios import destroy, local_state, named_parts, update
from tests.tiny import tiny_plan

SECOND = "exp_avg_sq"


def train_on(directory: str, ds: dict[str, Any], overrides: list[str], num_updates: int) -> dict[str, Any]:
    """Begin in an import's directory, and make updates: state, second moments and updates before and after."""
    run_directory = Path(directory)
    scratch = run_directory / f"ds{comm.rank()}"
    scratch.mkdir(exist_ok=True)
    plan = tiny_plan(scratch, comm.world_size(), overrides, ds, run_directory / "config.yaml")
    initial = InitialWeights(read_saved_recipe(run_directory), checkpoint.find(run_directory), live=True, own=True)
    run = build_run(plan, scratch, Start(initial=initial), RankLog(scratch / "log", comm.rank(), print))
    found: dict[str, Any] = {"nimg": run.counters.nimg, "update": run.counters.update}
    found |= {"before": local_state(run), "moments before": _moments(run)}
    found["steps"] = {entry: _steps(run, entry) for entry in ("generator", "discriminator")}
    update(run, num_updates)
    found |= {"after": local_state(run), "moments after": _moments(run)}
    destroy(run)
    return found


def _moments(run: Run) -> dict[str, Any]:
    return {
        entry: named_parts(run, entry, [shard.optimizer_state[SECOND] for shard in getattr(run.step, entry).shards()])
        if all(SECOND in shard.optimizer_state for shard in getattr(run.step, entry).shards())
        else {}
        for entry in ("generator", "discriminator")
    }


def _steps(run: Run, entry: str) -> list[float]:
    states = [shard.optimizer_state for shard in getattr(run.step, entry).shards()]
    return [float(torch.as_tensor(state["step"])) for state in states if "step" in state]
