"""Protocols of checkpoints: entries of named flat values and numbers, and the collectives that saving needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

from bigsgan.errors import UserError

Result = TypeVar("Result")


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


class ObjectCollectives(Protocol):
    """The collectives on objects that saving and loading need; the module ``bigsgan.runtime.comm`` implements them."""

    def rank(self) -> int: ...  # noqa: D102
    def world_size(self) -> int: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
    def patient_barrier(self) -> Callable[[], None]: ...  # noqa: D102
    def any_rank(self, flag: bool, /) -> bool: ...  # noqa: D102
    def total(self, value: float, /) -> float: ...  # noqa: D102
    def from_rank_zero(self, value: Any, /) -> Any: ...  # noqa: D102
    def gather_objects(self, value: Any) -> list[Any] | None: ...  # noqa: D102


def by_rank_zero(ranks: ObjectCollectives, work: Callable[[], Result]) -> Result:
    """Do something on rank 0 alone; return its picklable result, or raise its UserError, on all ranks. A collective."""
    found: Result | UserError | None = None
    if ranks.rank() == 0:
        try:
            found = work()
        except UserError as error:
            found = error
    found = ranks.from_rank_zero(found)
    if isinstance(found, UserError):
        raise found
    return cast(Result, found)


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
