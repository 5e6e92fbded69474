"""What is saved: named entries, each of named flat values and numbers; and what saving asks of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Part(NamedTuple):
    """A stretch of one flat value, which this rank writes.

    Attributes:
        kind: What of the value's owner it is: ``master`` for a parameter, ``exp_avg`` for its first moment, ``buffer``.
        name: Of the owner, such as a parameter's.
        offset: First element of the stretch in the flat value.
        values: Its elements, one-dimensional and live: not a copy.
        everywhere: All ranks have it, the same; one of them writes it.
    """

    kind: str
    name: str
    offset: int
    values: Tensor
    everywhere: bool = False


class SavedEntry(Protocol):
    """One named part of what a checkpoint holds."""

    def parts(self) -> list[Part]:
        """What this rank writes. Over all ranks, every element of every value stands in one part."""
        ...

    def numbers(self) -> dict[str, float]:
        """Numbers, the same on all ranks."""
        ...


class SavedValues(Protocol):
    """An entry as it was saved, by whatever ranks."""

    @property
    def numbers(self) -> Mapping[str, float]:
        """What ``SavedEntry.numbers`` gave."""
        ...

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of all parts, of all ranks."""
        ...

    def read(self, kind: str, name: str, offset: int, out: Tensor) -> None:
        """Fill the one-dimensional ``out`` with the elements from ``offset`` on, in place.

        Raises:
            UserError: They were not saved, or a file is damaged.
        """
        ...

    def has(self, kind: str, name: str) -> bool:
        """Whether any element of that value was saved."""
        ...


class StateEntry(SavedEntry, Protocol):
    """One named part of a run's state, which saves and loads itself; see training/state.py."""

    def load(self, saved: SavedValues) -> None:
        """Restore what ``parts`` and ``numbers`` gave, on this rank's own layout."""
        ...


class SharedState(ABC):
    """A StateEntry of tensors that are the same on all ranks."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors by name, live and contiguous."""

    def parts(self) -> list[Part]:
        """All of them; one rank writes."""
        return [Part("state", name, 0, tensor.view(-1), everywhere=True) for name, tensor in self.state().items()]

    def numbers(self) -> dict[str, float]:
        """Return none."""
        return {}

    def load(self, saved: SavedValues) -> None:
        """Restore all of them, in place."""
        for name, tensor in self.state().items():
            saved.read("state", name, 0, tensor.view(-1))


class Ranks(Protocol):
    """The collectives that saving and loading need; the module ``bigsgan.comm`` has them."""

    def rank(self) -> int: ...  # noqa: D102
    def world_size(self) -> int: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
    def patient_barrier(self) -> Callable[[], None]: ...  # noqa: D102
    def any_rank(self, flag: bool) -> bool: ...  # noqa: D102
    def total(self, value: float) -> float: ...  # noqa: D102
    def from_rank_zero(self, value: Any) -> Any: ...  # noqa: D102
    def gather_objects(self, value: Any) -> list[Any] | None: ...  # noqa: D102


class OneRank:
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
