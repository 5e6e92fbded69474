"""The state of a run as named entries, which can be saved and loaded in any layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigsgan.checkpoint import BUFFER, MASTER, STEP, SavedValues, StateShard, saved_buffers
from bigsgan.data.order import Stretch, phase_start
from bigsgan.engines import Engine, Shard
from bigsgan.models.frozen import frozen_parts
from bigsgan.training.ema import ShardedEMA
from bigsgan.training.power import BEGUN, power_kind, saved_widths

Number = float | int

MOST_WRITERS = 8
"""Ranks that write what each replica holds whole."""

_BOUNDS = ("first", "end")


class EngineState:
    """A network's master weights, optimizer state, buffers, loss scale and counters."""

    def __init__(self, engine: Engine, share: Callable[[Any], Any] = lambda numbers: numbers) -> None:
        """Describe an engine's state. ``share`` gives every rank the numbers of the ranks that hold the network."""
        self._engine, self._share = engine, share

    def parts(self) -> list[StateShard]:
        """Return master weights and the optimizer's tensors, by parameter, and the buffers."""
        found = list(_buffer_parts(self._engine, saved_buffers(self._engine.network)))
        for shard in self._engine.shards():
            found += _shard_parts(shard, MASTER, shard.master)
            for kind, value in shard.optimizer_state.items():
                if kind != "step" and isinstance(value, Tensor):
                    found += _shard_parts(shard, kind, value.view(-1))
        return found

    def numbers(self) -> dict[str, Number]:
        """Return counters, the loss scale, and the number of updates the optimizer has made. Every rank calls this."""
        steps = [shard.optimizer_state["step"] for shard in self._engine.shards() if "step" in shard.optimizer_state]
        found: dict[str, Number] = dict(self._engine.scalars())
        if steps:
            found[STEP] = int(max(float(step) for step in steps))
        shared: dict[str, Number] = self._share(found)
        return shared

    @torch.no_grad()
    def load(self, saved: SavedValues) -> None:
        """Restore master weights, optimizer state, buffers and counters, and bring the parameters up to date."""
        saved.read_into(BUFFER, saved_buffers(self._engine.network))
        load_frozen(saved, self._engine)
        for shard in self._engine.shards():
            load_shard(saved, shard)
        load_optimizer(saved, self._engine)
        self._engine.publish()
        self._engine.load_scalars({key: value for key, value in saved.numbers.items() if key != STEP})


class EMAState:
    """The EMA of the generator's weights, and the power function averages. Each is one kind of values."""

    def __init__(self, engine: Engine, ema: ShardedEMA) -> None:
        self._engine, self._ema = engine, ema

    def parts(self) -> list[StateShard]:
        """Return the EMA, by parameter, and its buffers."""
        found = list(_buffer_parts(self._engine, self._ema.buffers))
        for shard, values in zip(self._engine.shards(), self._ema.shards, strict=True):
            found += _shard_parts(shard, MASTER, values)
        return found + self._power_parts()

    def numbers(self) -> dict[str, Number]:
        """Return when the power function averages began, if there are any."""
        begun = self._ema.power.begun_nimg
        return {} if begun is None else {BEGUN: begun}

    @torch.no_grad()
    def load(self, saved: SavedValues) -> None:
        """Restore shards and buffers. If other widths were saved, all power function averages begin anew."""
        for shard, values in zip(self._engine.shards(), self._ema.shards, strict=True):
            load_shard(saved, shard, MASTER, values)
        saved.read_into(BUFFER, self._ema.buffers)
        power = self._ema.power
        if saved_widths(saved.kinds) != set(power.shards) or BEGUN not in saved.numbers:
            power.begun_nimg = None
            return
        power.begun_nimg = int(saved.numbers[BEGUN])
        for width, averages in power.shards.items():
            for shard, values in zip(self._engine.shards(), averages, strict=True):
                load_shard(saved, shard, power_kind(width), values)

    def snapshot(self, dtype: torch.dtype) -> list[StateShard]:
        """Return the power function averages by parameter, converted to ``dtype``, and the EMA's buffers."""
        found = list(_buffer_parts(self._engine, self._ema.buffers))
        for part in self._power_parts():
            # Values are converted on the host, as the device may have no room.
            values = part.values if dtype == torch.float32 else _narrowed(part.values.cpu(), dtype)
            found.append(part._replace(values=values))
        return found

    def _power_parts(self) -> list[StateShard]:
        found: list[StateShard] = []
        for width, averages in self._ema.power.shards.items():
            for shard, values in zip(self._engine.shards(), averages, strict=True):
                found += _shard_parts(shard, power_kind(width), values)
        return found


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert; what is too large becomes the largest number, and infinite numbers stay, as they tell of a lost run."""
    most = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-most, most), values).to(dtype)


def _shard_parts(shard: Shard, kind: str, values: Tensor) -> Iterator[StateShard]:
    """Yield the pieces of a flat tensor with the shard's layout; of a replicated shard, this rank's share of each.

    Only the first replicas write some of it, as a rank that resumes reads all of it.
    """
    replica, num_writers = shard.copies[0], min(shard.copies[1], MOST_WRITERS)
    for piece in shard.pieces:
        low, high = piece.numel * replica // num_writers, piece.numel * (replica + 1) // num_writers
        if low < high <= piece.numel:
            stretch = values[piece.start + low : piece.start + high]
            yield StateShard(kind, piece.name, piece.offset + low, stretch)


def load_shard(saved: SavedValues, shard: Shard, kind: str = MASTER, out: Tensor | None = None) -> None:
    """Fill a shard's master weights, or ``out`` of the same layout, with saved values of one kind."""
    values = shard.master if out is None else out
    for piece in shard.pieces:
        saved.read(kind, piece.name, piece.offset, values[piece.start : piece.start + piece.numel])


@torch.no_grad()
def load_optimizer(saved: SavedValues, engine: Engine) -> None:
    """Restore the optimizer's state, if any was saved."""
    kinds = sorted(saved.kinds - {MASTER, BUFFER})
    for i, shard in enumerate(engine.shards()):
        state: dict[str, Any] = {}
        for kind in kinds:
            # A parameter that never had a gradient has no optimizer state, so that none was saved.
            known = [piece for piece in shard.pieces if saved.has(kind, piece.name)]
            if known or not shard.pieces:
                state[kind] = torch.zeros_like(shard.master)
                load_shard(saved, shard._replace(pieces=known), kind, state[kind])
        if state and STEP in saved.numbers:
            state["step"] = saved.numbers[STEP]
        if state:
            engine.load_optimizer_state(i, state)


def load_frozen(saved: SavedValues, engine: Engine, names: Collection[str] | None = None) -> None:
    """Fill this rank's parts of frozen tensors: of all, or of those in ``names``."""
    for name, part in frozen_parts(engine.network).items():
        if names is None or name in names:
            saved.read(BUFFER, name, part.offset, part.own)


def _buffer_parts(engine: Engine, buffers: dict[str, Tensor]) -> Iterator[StateShard]:
    """Yield the buffers on the first replica alone, as all replicas of a layer have the same, and parts of others."""
    if engine.replica == 0:
        yield from (StateShard(BUFFER, name, 0, buffer.detach().reshape(-1)) for name, buffer in buffers.items())
    for name, part in frozen_parts(engine.network).items():
        if len(part.own) and (engine.replica == 0 or not part.is_whole):
            yield StateShard(BUFFER, name, part.offset, part.own)


@dataclass
class Counters:
    """How far the run is. Latents and schedules are functions of these."""

    d_steps: int = 1  # the recipe's discriminator steps in an update, each of which reads a batch of real images
    update: int = 0  # generator updates made, applied or skipped
    nimg: int = 0  # images seen: `batch` for each update
    rollbacks: int = 0  # how often the run went back to a checkpoint because an update was not finite
    position: int = 0  # position in the data's order: real images that were read or passed over
    # intervals of that order, ascending, which the run passes over because non-finite updates read them
    skipped: tuple[Stretch, ...] = ()

    @property
    def start(self) -> tuple[int, tuple[Stretch, ...]]:
        """Where to resume in the data's order, and what to pass over, as ``RealImages`` takes it."""
        return self.position, self.skipped

    def count(self, batch: int) -> None:
        """Count an update on ``batch`` images."""
        self.update += 1
        self.nimg += batch
        for _ in range(self.d_steps):
            self.position = phase_start(self.position, batch, self.skipped) + batch

    def parts(self) -> list[StateShard]:
        """Return none."""
        return []

    def numbers(self) -> dict[str, Number]:
        """Return all counts, and the skipped intervals."""
        counts = {name: getattr(self, name) for name in ("update", "nimg", "rollbacks", "position")}
        for i, stretch in enumerate(self.skipped):
            counts |= {f"skipped.{i}.{bound}": value for bound, value in zip(_BOUNDS, stretch, strict=True)}
        return counts

    def load(self, saved: SavedValues) -> None:
        """Restore all counts, and the skipped intervals."""
        numbers = saved.numbers
        self.update, self.nimg = int(numbers["update"]), int(numbers["nimg"])
        self.rollbacks = int(numbers["rollbacks"])
        keys = [key for key in numbers if key.startswith("skipped.")]
        self.position = int(numbers["position"])
        firsts, ends = (sorted(int(numbers[key]) for key in keys if key.endswith(bound)) for bound in _BOUNDS)
        self.skipped = tuple(zip(firsts, ends, strict=True))

    def skipped_with(self, read: Stretch) -> tuple[Stretch, ...]:
        """Return ``skipped`` with another interval, which replaces those that lie inside it."""
        kept = [each for each in self.skipped if not read[0] <= each[0] <= each[1] <= read[1]]
        return tuple(sorted([*kept, read]))
