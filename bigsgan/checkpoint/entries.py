"""Protocols of checkpoints: entries of named flat values and numbers, and the collectives that saving needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class StateShard(NamedTuple):
    """The shard of one flat value that this rank writes.

    Attributes:
        kind: ``master`` for a parameter, ``exp_avg`` for its first moment, ``buffer``, and so on.
        name: Name of the parameter or buffer.
        offset: First element of the shard in the flat value.
        values: Its elements, one-dimensional and live: not a copy.
        everywhere: Whether all ranks have the same values; then one of them writes.
    """

    kind: str
    name: str
    offset: int
    values: Tensor
    everywhere: bool = False


class SavedEntry(Protocol):
    """One named entry of a checkpoint."""

    def parts(self) -> list[StateShard]:
        """Return this rank's shards. Over all ranks, every element of every value is in exactly one shard."""
        ...

    def numbers(self) -> dict[str, float]:
        """Return numbers, the same on all ranks."""
        ...


class SavedValues(Protocol):
    """An entry of a saved checkpoint, for any layout of the saving ranks."""

    @property
    def numbers(self) -> Mapping[str, float]:
        """The numbers that ``SavedEntry.numbers`` returned."""
        ...

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of all shards, of all ranks."""
        ...

    def read(self, kind: str, name: str, offset: int, out: Tensor) -> None:
        """Fill the one-dimensional ``out`` with the elements from ``offset`` on, in place.

        Raises:
            UserError: They were not saved, or a file is damaged.
        """
        ...

    def has(self, kind: str, name: str) -> bool:
        """Return whether any element of that value was saved."""
        ...


class StateEntry(SavedEntry, Protocol):
    """One named entry of a run's state, which can be saved and loaded; see training/state.py."""

    def load(self, saved: SavedValues) -> None:
        """Restore the values of ``parts`` and ``numbers``, in this rank's own layout."""
        ...


class SharedState(ABC):
    """A StateEntry of tensors that are the same on all ranks."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors by name, live and contiguous."""

    def parts(self) -> list[StateShard]:
        """Return all of them; one rank writes."""
        return [StateShard("state", name, 0, tensor.view(-1), everywhere=True) for name, tensor in self.state().items()]

    def numbers(self) -> dict[str, float]:
        """Return none."""
        return {}

    def load(self, saved: SavedValues) -> None:
        """Restore all of them in place."""
        for name, tensor in self.state().items():
            saved.read("state", name, 0, tensor.view(-1))


class ObjectCollectives(Protocol):
    """The collectives on objects that saving and loading need; the module ``bigsgan.comm`` implements them."""

    def rank(self) -> int: ...  # noqa: D102
    def world_size(self) -> int: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
    def patient_barrier(self) -> Callable[[], None]: ...  # noqa: D102
    def any_rank(self, flag: bool) -> bool: ...  # noqa: D102
    def total(self, value: float) -> float: ...  # noqa: D102
    def from_rank_zero(self, value: Any) -> Any: ...  # noqa: D102
    def gather_objects(self, value: Any) -> list[Any] | None: ...  # noqa: D102


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

    def any_rank(self, flag: bool) -> bool:  # noqa: D102
        return flag

    def total(self, value: float) -> float:  # noqa: D102
        return value

    def from_rank_zero(self, value: Any) -> Any:  # noqa: D102
        return value

    def gather_objects(self, value: Any) -> list[Any] | None:  # noqa: D102
        return [value]
