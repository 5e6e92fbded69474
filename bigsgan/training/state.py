"""Everything that a run must find again, as named entries that save and load themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigsgan.engines import Engine, Piece
from bigsgan.training.ema import ShardedAverage

Number = float | int


class EngineState:
    """A network's masters, optimizer state, buffers, loss scale and counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def tensors(self) -> dict[str, Tensor]:
        """Masters and the optimizer's tensors of each shard, and the buffers."""
        found = {f"buffer.{name}": buffer for name, buffer in self._engine.network.named_buffers()}
        for i, shard in enumerate(self._engine.shards()):
            found[f"shard.{i}.master"] = shard.master
            for key, value in shard.optimizer_state.items():
                if isinstance(value, Tensor):
                    found[f"shard.{i}.{key}"] = value
        return found

    def numbers(self) -> dict[str, Number]:
        """Counters, loss scales, and what the optimizer keeps as plain numbers."""
        found: dict[str, Number] = dict(self._engine.scalars())
        for i, shard in enumerate(self._engine.shards()):
            for key, value in shard.optimizer_state.items():
                if isinstance(value, (int, float)):
                    found[f"shard.{i}.{key}"] = value
        return found

    def layout(self) -> dict[str, list[Piece]]:
        """Pieces of each shard's master; the optimizer's tensors of that shard lie the same way."""
        return {f"shard.{i}.master": shard.pieces for i, shard in enumerate(self._engine.shards())}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Number]) -> None:
        """Restore masters, optimizer state, buffers and counters, and bring the parameters up to date."""
        for name, buffer in self._engine.network.named_buffers():
            buffer.copy_(tensors[f"buffer.{name}"])
        for i, shard in enumerate(self._engine.shards()):
            prefix = f"shard.{i}."
            shard.master.copy_(tensors[f"{prefix}master"])
            saved: dict[str, Any] = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            del saved["master"]
            state: dict[str, Any] = {key: value.to(shard.master.device, copy=True) for key, value in saved.items()}
            state.update({k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)})
            if state:
                self._engine.load_optimizer_state(i, state)
        self._engine.publish()
        self._engine.load_scalars({key: value for key, value in numbers.items() if not key.startswith("shard.")})


class AverageState:
    """The generator's moving average."""

    def __init__(self, engine: Engine, average: ShardedAverage) -> None:
        self._engine, self._average = engine, average

    def tensors(self) -> dict[str, Tensor]:
        """The average's shards and buffers."""
        found = {f"shard.{i}.master": shard for i, shard in enumerate(self._average.shards)}
        found.update({f"buffer.{name}": buffer for name, buffer in self._average.buffers.items()})
        return found

    def numbers(self) -> dict[str, Number]:
        """Return none."""
        return {}

    def layout(self) -> dict[str, list[Piece]]:
        """Lie as the engine's masters do."""
        return {f"shard.{i}.master": shard.pieces for i, shard in enumerate(self._engine.shards())}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Number]) -> None:
        """Restore shards and buffers."""
        for i, shard in enumerate(self._average.shards):
            shard.copy_(tensors[f"shard.{i}.master"])
        for name, buffer in self._average.buffers.items():
            buffer.copy_(tensors[f"buffer.{name}"])


@dataclass
class Counters:
    """How far the run is. Data position, latents and schedules are functions of these.

    Attributes:
        update: Generator updates made, applied or skipped.
        nimg: Images seen: ``batch`` for each of them.
    """

    update: int = 0
    nimg: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Return none."""
        return {}

    def numbers(self) -> dict[str, Number]:
        """Both counts."""
        return {"update": self.update, "nimg": self.nimg}

    def layout(self) -> dict[str, list[Piece]]:
        """Return none."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Number]) -> None:
        """Restore both counts."""
        self.update, self.nimg = int(numbers["update"]), int(numbers["nimg"])
