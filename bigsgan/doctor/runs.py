"""Tiny runs that the doctor makes on the ranks, built as `bigsgan train` builds a run, and their whole state."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigsgan.bench.product import EngineLoop, build_engine_loop
from bigsgan.checkpoint import Checkpoint, saved_buffers
from bigsgan.config import Recipe
from bigsgan.doctor.games import awake, both, tiny_plan, tiny_recipe
from bigsgan.doctor.smooth_activations import smooth
from bigsgan.engines import Shard
from bigsgan.engines.deepspeed.leftovers import leaving_nothing
from bigsgan.models.frozen import frozen_parts
from bigsgan.runtime import comm
from bigsgan.runtime.tf32 import tf32
from bigsgan.training.loop import Run

SEED = 2


class DifferError(Exception):
    """Values that should be the same differ, or differ between ranks."""


@dataclass(frozen=True)
class Game:
    """A tiny run."""

    name: str  # name in messages
    overrides: Sequence[str] = ()  # overrides of the tiny recipe
    ds: Mapping[str, Any] = field(default_factory=lambda: both(0))  # DeepSpeed contents by network
    num_updates: int = 1  # number of updates that are compared

    def options(self, num_ranks: int) -> list[str]:
        """Overrides, with a batch that so many ranks can divide into two micro-batches of pairs."""
        batch = 4 * num_ranks * -(-8 // (4 * num_ranks))
        return [f"batch={batch}", *self.overrides, f"seed={SEED}"]

    def recipe(self, directory: Path, num_ranks: int) -> Recipe:
        """The game's recipe on so many ranks; its file is written to ``directory``."""
        return tiny_recipe(directory, *self.options(num_ranks))


@contextmanager
def exact(is_smooth: bool = True) -> Iterator[None]:
    """Inside the block TF32 is off, ``awake`` holds, and networks have no kinks if ``is_smooth``.

    One thread computes: it is enough for tiny networks, and several would slow other processes.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tf32(allowed=False), awake(), smooth() if is_smooth else nullcontext():
            yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def _quiet() -> Iterator[None]:
    """Log only errors inside the block: remarks about a tiny run help nobody."""
    log = logging.getLogger("bigsgan")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def running(game: Game, found: Checkpoint | None = None) -> Iterator[EngineLoop]:
    """Build a game's run, from a checkpoint if one is given, and remove it after the block. Every rank calls this."""
    with leaving_nothing(), _quiet(), tempfile.TemporaryDirectory(prefix="bigsgan-doctor-") as name:
        plan = tiny_plan(Path(name), comm.world_size(), game.options(comm.world_size()), dict(game.ds))
        with closing(build_engine_loop(plan, found)) as loop:
            yield loop


def played(game: Game) -> list[dict[str, Any]]:
    """Play a game: this rank's ``snapshot`` before the first and after each update. Every rank calls this."""
    with running(game) as loop:
        states = [snapshot(loop.run)]
        for _ in range(game.num_updates):
            loop()
            states.append(snapshot(loop.run))
        return [on_host(state) for state in states]


def masters(run: Run) -> Iterator[tuple[str, Shard, torch.Tensor]]:
    """Yield this rank's shards of the master weights and of the EMA as entry, shard and tensor."""
    for entry, engine in run.step.executor.engines.items():
        for shard in engine.shards():
            yield entry, shard, shard.master
    for shard, values in zip(run.step.generator.shards(), run.ema.shards, strict=True):
        yield "average", shard, values


def buffers(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Buffers on this rank, by entry."""
    found = {entry: saved_buffers(engine.network) for entry, engine in run.step.executor.engines.items()}
    return {**found, "average": run.ema.buffers}


def snapshot(run: Run) -> dict[str, Any]:
    """Copies of this rank's pieces of every parameter, and of all buffers: entry -> name -> [(offset, values)].

    A buffer is one piece, in its shape. Copies stay on their device; nothing here waits for it.
    """
    result: dict[str, Any] = {
        entry: {name: [(0, buffer.clone())] for name, buffer in named.items()} for entry, named in buffers(run).items()
    }
    for entry in result:
        frozen = frozen_parts(run.step.generator.network if entry == "average" else getattr(run.step, entry).network)
        result[entry] |= {name: [(part.offset, part.own.clone())] for name, part in frozen.items() if len(part.own)}
    for entry, shard, tensor in masters(run):
        for piece in shard.pieces:
            values = tensor[piece.start : piece.start + piece.numel]
            result[entry].setdefault(piece.name, []).append((piece.offset, values.clone()))
    return result


def on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot with numpy arrays instead of tensors, float32 instead of bf16."""
    return {
        entry: {name: [(offset, _array(values)) for offset, values in pieces] for name, pieces in named.items()}
        for entry, named in state.items()
    }


def _array(values: Tensor) -> np.ndarray:
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Assemble whole tensors from all ranks' ``snapshot``, on the host.

    Raises:
        DifferError: The bits of a buffer, or of elements that several ranks hold, differ between ranks.
    """
    merged: dict[str, dict[str, torch.Tensor]] = {}
    for entry in states[0]:
        merged[entry] = {}
        for name in sorted({name for state in states for name in state[entry]}):
            pieces: dict[int, tuple[int, np.ndarray]] = {}
            for rank, state in enumerate(states):
                for offset, values in state[entry].get(name, ()):
                    first, own = pieces.setdefault(offset, (rank, values))
                    if own.shape != values.shape or own.tobytes() != values.tobytes():
                        raise DifferError(f"{entry}.{name} differs between ranks {first} and {rank}")
            arrays = [pieces[offset][1] for offset in sorted(pieces)]
            merged[entry][name] = torch.from_numpy(np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
    return merged
