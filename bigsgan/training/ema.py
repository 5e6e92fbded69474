"""The EMA of the generator's weights, on the engine's own float32 shards.

4 bytes a parameter divided by the ranks that share it, and no communication: each rank averages its own shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bigsgan.checkpoint import saved_buffers
from bigsgan.engines import Engine
from bigsgan.metrics.outside import MetricError
from bigsgan.models.frozen import without_frozen
from bigsgan.runtime import comm
from bigsgan.training.power import power_decay

SWAP_ELEMENTS = 1 << 24
"""Elements swapped at a time, so that swapping needs 64 MiB and not a third copy of the weights."""


class PowerEMA:
    """Power function averages of an engine's parameters (Karras et al. 2024, arXiv 2312.02696, section 3.1).

    After n updates the average of exponent gamma is the mean of the parameters after updates k = 1 to n, weighted by
    k^(gamma + 1) - (k - 1)^(gamma + 1).

    Attributes:
        shards: By width, one flat tensor for each of the engine's shards, in their order.
        begun_nimg: Images seen before the averages' first update; None until then.
    """

    def __init__(self, engine: Engine, widths: Sequence[float]) -> None:
        self._engine = engine
        self.shards = {width: [shard.master.clone() for shard in engine.shards()] for width in widths}
        self.begun_nimg: int | None = None

    @torch.no_grad()
    def update(self, nimg: int, batch: int) -> None:
        """Add the parameters after an update to ``nimg`` images. Skipped updates count too, as time passes in them."""
        if not self.shards:
            return
        if self.begun_nimg is None:
            self.begun_nimg = nimg - batch
        masters = [shard.master for shard in self._engine.shards()]
        for width, averages in self.shards.items() if masters else ():  # torch refuses an empty list
            torch._foreach_lerp_(averages, masters, 1 - power_decay(width, nimg - self.begun_nimg, batch))


class ShardedEMA:
    """Exponential moving average (EMA) of an engine's parameters, with copies of its buffers other than frozen ones.

    Attributes:
        shards: One flat tensor for each of the engine's shards, in their order.
        buffers: One tensor for each of the network's buffers that are saved, by name.
        power: Further averages, from which samples are made after training.
    """

    def __init__(self, engine: Engine, widths: Sequence[float] = ()) -> None:
        """Begin with copies of the weights; ``widths`` are those of the averages in ``power``."""
        self._engine = engine
        self.power = PowerEMA(engine, widths)
        self.shards = [shard.master.clone() for shard in engine.shards()]
        saved = saved_buffers(engine.network)
        self._live_buffers = without_frozen(engine.network, saved)
        self.buffers = saved | {name: buffer.clone() for name, buffer in self._live_buffers.items()}

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set the EMA to decay * EMA + (1 - decay) * parameters, and copy the buffers."""
        if self.shards:  # torch refuses an empty list
            torch._foreach_lerp_(self.shards, [shard.master for shard in self._engine.shards()], 1 - decay)
        if self._live_buffers:
            copies = [self.buffers[name] for name in self._live_buffers]
            torch._foreach_copy_(copies, list(self._live_buffers.values()))

    @torch.no_grad()
    def reset_network(self) -> None:
        """Set the network's parameters to the EMA; a collective."""
        for shard, ema in zip(self._engine.shards(), self.shards, strict=True):
            shard.master.copy_(ema)
        self._engine.publish()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the network compute with the EMA inside the block, and restore everything bit for bit after it.

        Buffers may change inside the block (standing statistics), but these changes are dropped after it. After an
        error of one of several ranks, which ends the run, nothing is restored: that needs collectives.
        """
        live = {name: buffer.clone() for name, buffer in self._live_buffers.items()}
        self._swap()
        self._set_buffers(self.buffers)
        try:
            yield
        except BaseException as error:
            if comm.world_size() == 1 or isinstance(error, MetricError):  # which all ranks raise
                self._restore(live)
            raise
        self._restore(live)

    def _restore(self, live: dict[str, Tensor]) -> None:
        self._swap()
        self._set_buffers(live)

    @torch.no_grad()
    def _swap(self) -> None:
        for shard, ema in zip(self._engine.shards(), self.shards, strict=True):
            for mine, theirs in zip(ema.split(SWAP_ELEMENTS), shard.master.split(SWAP_ELEMENTS), strict=True):
                held = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(held)
        self._engine.publish()

    @torch.no_grad()
    def _set_buffers(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self._live_buffers.items():
            buffer.copy_(values[name])
