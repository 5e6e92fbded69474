"""Protocols of checkpoints: entries of named flat values and numbers, and the collectives that saving needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from bigsgan.runtime.collective_errors import Ranks

MASTER, BUFFER = "master", "buffer"
"""Kinds of values: an optimizer's float32 weights, and buffers."""

STEP = "optimizer.step"
"""The number in an entry that counts the optimizer's updates."""


class StateShard(NamedTuple):
    """The shard of one flat value that this rank writes."""

    kind: str  # `master` for a parameter, `exp_avg` for its first moment, `buffer`, and so on
    name: str  # name of the parameter or buffer
    offset: int  # first element of the shard in the flat value
    values: Tensor  # its elements, one-dimensional and live: not a copy
    everywhere: bool = False  # whether all ranks have the same values; then one of them writes


def saved_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Buffers by name that a checkpoint holds: not those that are computed from a recipe, which are not persistent."""
    persistent = network.state_dict().keys()
    return {name: buffer for name, buffer in network.named_buffers() if name in persistent}


class SavedEntry(Protocol):
    """One named entry of a checkpoint."""

    def parts(self) -> list[StateShard]:
        """Return this rank's shards. Over all ranks, every element of every value is in exactly one shard."""

    def numbers(self) -> dict[str, float]:
        """Return numbers, the same on all ranks."""


class ObjectCollectives(Ranks, Protocol):
    """The collectives on objects that saving and loading need; the module ``bigsgan.runtime.comm`` implements them."""

    def world_size(self) -> int: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
    def patient_barrier(self) -> Callable[[], None]: ...  # noqa: D102
    def any_rank(self, flag: bool, /) -> bool: ...  # noqa: D102
    def total(self, value: float, /) -> float: ...  # noqa: D102


class SingleProcess:
    """The collectives of a single process, without a process group."""

    def rank(self) -> int:  # noqa: D102
        return 0

    def world_size(self) -> int:  # noqa: D102
        return 1

    def barrier(self) -> None:  # noqa: D102
        pass

    def patient_barrier(self) -> Callable[[], None]:  # noqa: D102
        return self.barrier

    def _own(self, value: Any, /) -> Any:
        return value

    any_rank = total = from_rank_zero = _own

    def gather_objects(self, value: Any) -> list[Any] | None:  # noqa: D102
        return [value]
