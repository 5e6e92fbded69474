"""What one rank does for all, and a refusal that all ranks hear alike, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from bigsgan.errors import UserError

Result = TypeVar("Result")
Told = TypeVar("Told")


class Ranks(Protocol):
    """The collectives that this needs; the module ``bigsgan.runtime.comm`` implements them."""

    def rank(self) -> int: ...  # noqa: D102
    def from_rank_zero(self, value: Any, /) -> Any: ...  # noqa: D102
    def gather_objects(self, value: Any) -> list[Any] | None: ...  # noqa: D102


def attempted(work: Callable[[], Result]) -> Result | UserError:
    """Do something, and return its result, or the UserError that it raises."""
    try:
        return work()
    except UserError as error:
        return error


def by_rank_zero(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Do something on rank 0 alone; return its picklable result, or raise its UserError, on all ranks. A collective."""
    found = ranks.from_rank_zero(attempted(work) if ranks.rank() == 0 else None)
    if isinstance(found, UserError):
        raise found
    return cast(Result, found)


def for_rank_zero(ranks: Ranks, work: Callable[[], Result]) -> Result | None:
    """Do something on rank 0 alone, and return its result there; a UserError is raised on all ranks. A collective."""
    result: Result | None = None

    def keep() -> None:
        nonlocal result
        result = work()

    by_rank_zero(ranks, keep)
    return result


def compared(ranks: Ranks, told: Told, compare: Callable[[Sequence[Told]], Result]) -> Result:
    """Compare on rank 0 what each rank tells, by rank; return the picklable result on all ranks. A collective.

    A UserError that results is raised on all ranks.
    """
    by_rank = ranks.gather_objects(told)
    return by_rank_zero(ranks, lambda: compare(by_rank or []))


def by_each(ranks: Ranks, work: Callable[[], Result], undo: Callable[[Result], object] = lambda result: None) -> Result:
    """Do something on each rank; return this rank's result, or raise on all what the first rank refused. A collective.

    ``undo`` takes back this rank's result where another one refuses.
    """
    done = attempted(work)
    try:
        compared(ranks, done if isinstance(done, UserError) else None, first_told)
    except UserError:
        if not isinstance(done, UserError):
            undo(done)
        raise
    assert not isinstance(done, UserError), "a rank has refused"
    return done


def first_told(each: Sequence[Told | None]) -> Told | None:
    """Return what the first rank tells that has something to tell; None if no rank has."""
    return next(filter(None, each), None)
