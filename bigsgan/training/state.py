"""Everything that a run must find again, as named entries that save and load themselves, on any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigsgan.checkpoint import Part, SavedValues
from bigsgan.data.order import data_phase
from bigsgan.engines import Engine, Shard
from bigsgan.training.ema import ShardedAverage

Number = float | int

MASTER, BUFFER = "master", "buffer"
STEP = "optimizer.step"


class EngineState:
    """A network's masters, optimizer state, buffers, loss scale and counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parts(self) -> list[Part]:
        """Masters and the optimizer's tensors, by parameter, and the buffers."""
        found = list(_buffer_parts(self._engine, dict(self._engine.network.named_buffers())))
        for shard in self._engine.shards():
            found += _shard_parts(shard, MASTER, shard.master)
            for kind, value in shard.optimizer_state.items():
                if kind != "step" and isinstance(value, Tensor):
                    found += _shard_parts(shard, kind, value.view(-1))
        return found

    def numbers(self) -> dict[str, Number]:
        """Counters, loss scales, and how many updates the optimizer has made."""
        steps = [shard.optimizer_state["step"] for shard in self._engine.shards() if "step" in shard.optimizer_state]
        found: dict[str, Number] = dict(self._engine.scalars())
        if steps:
            found[STEP] = int(max(float(step) for step in steps))
        return found

    @torch.no_grad()
    def load(self, saved: SavedValues) -> None:
        """Restore masters, optimizer state, buffers and counters, and bring the parameters up to date."""
        load_buffers(saved, dict(self._engine.network.named_buffers()))
        kinds = sorted(saved.kinds - {MASTER, BUFFER})
        for i, shard in enumerate(self._engine.shards()):
            load_shard(saved, shard)
            state: dict[str, Any] = {}
            for kind in kinds:
                # What the optimizer never moved, as nothing gave it a gradient, was not saved.
                known = [piece for piece in shard.pieces if saved.has(kind, piece.name)]
                if known or not shard.pieces:
                    state[kind] = torch.zeros_like(shard.master)
                    load_shard(saved, shard._replace(pieces=known), kind, state[kind])
            if state and STEP in saved.numbers:
                state["step"] = saved.numbers[STEP]
            if state:
                self._engine.load_optimizer_state(i, state)
        self._engine.publish()
        self._engine.load_scalars({key: value for key, value in saved.numbers.items() if key != STEP})


class AverageState:
    """The generator's moving average."""

    def __init__(self, engine: Engine, average: ShardedAverage) -> None:
        self._engine, self._average = engine, average

    def parts(self) -> list[Part]:
        """The average, by parameter, and its buffers."""
        found = list(_buffer_parts(self._engine, self._average.buffers))
        for shard, values in zip(self._engine.shards(), self._average.shards, strict=True):
            found += _shard_parts(shard, MASTER, values)
        return found

    def numbers(self) -> dict[str, Number]:
        """Return none."""
        return {}

    @torch.no_grad()
    def load(self, saved: SavedValues) -> None:
        """Restore shards and buffers."""
        for shard, values in zip(self._engine.shards(), self._average.shards, strict=True):
            load_shard(saved, shard, MASTER, values)
        load_buffers(saved, self._average.buffers)


def _shard_parts(shard: Shard, kind: str, values: Tensor) -> Iterator[Part]:
    """The pieces of a flat tensor that lies as the shard's master does; of a copy, this rank's share of each."""
    replica, num_replicas = shard.copies
    for piece in shard.pieces:
        low, high = piece.numel * replica // num_replicas, piece.numel * (replica + 1) // num_replicas
        if low < high:
            stretch = values[piece.start + low : piece.start + high]
            yield Part(kind, piece.name, piece.offset + low, stretch)


def load_shard(saved: SavedValues, shard: Shard, kind: str = MASTER, out: Tensor | None = None) -> None:
    """Fill a shard's master, or what lies as it does, with saved values of one kind."""
    values = shard.master if out is None else out
    for piece in shard.pieces:
        saved.read(kind, piece.name, piece.offset, values[piece.start : piece.start + piece.numel])


def _buffer_parts(engine: Engine, buffers: dict[str, Tensor]) -> Iterator[Part]:
    """Buffers are the same on all replicas of a layer: the first one's are saved."""
    if engine.replica == 0:
        yield from (Part(BUFFER, name, 0, buffer.detach().reshape(-1)) for name, buffer in buffers.items())


def load_buffers(saved: SavedValues, buffers: dict[str, Tensor]) -> None:
    """Fill buffers, in place."""
    for name, buffer in buffers.items():
        flat = torch.empty_like(buffer).view(-1)
        saved.read(BUFFER, name, 0, flat)
        buffer.copy_(flat.view(buffer.shape))


@dataclass
class Counters:
    """How far the run is. Data position, latents and schedules are functions of these.

    Attributes:
        update: Generator updates made, applied or skipped.
        nimg: Images seen: ``batch`` for each of them.
        rollbacks: How often the run went back to a checkpoint because an update was not finite.
        skipped: Phases of the data that such updates read, which the run passes over; ascending.
    """

    update: int = 0
    nimg: int = 0
    rollbacks: int = 0
    skipped: tuple[int, ...] = ()

    def parts(self) -> list[Part]:
        """Return none."""
        return []

    def numbers(self) -> dict[str, Number]:
        """All counts, and each phase that is passed over."""
        counts = {"update": self.update, "nimg": self.nimg, "rollbacks": self.rollbacks}
        return {**counts, **{f"skipped.{i}": phase for i, phase in enumerate(self.skipped)}}

    def load(self, saved: SavedValues) -> None:
        """Restore all of them."""
        numbers = saved.numbers
        self.update, self.nimg = int(numbers["update"]), int(numbers["nimg"])
        self.rollbacks = int(numbers["rollbacks"])
        self.skipped = tuple(sorted(int(phase) for key, phase in numbers.items() if key.startswith("skipped.")))

    def skipped_with(self, update: int, d_steps: int) -> tuple[int, ...]:
        """``skipped`` and what update number ``update`` reads in its ``d_steps`` phases."""
        phases = range(update * d_steps, (update + 1) * d_steps)
        return tuple(sorted({*self.skipped, *(data_phase(phase, self.skipped) for phase in phases)}))
