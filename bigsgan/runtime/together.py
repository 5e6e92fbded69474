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


def by_rank_zero(ranks: Ranks, work: Callable[[], Result]) -> Result:
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


def for_rank_zero(ranks: Ranks, work: Callable[[], Result]) -> Result | None:
    """Do something on rank 0 alone, and return its result there; a UserError is raised on all ranks. A collective."""
    found: list[Result] = []

    def keep() -> None:
        found.append(work())

    by_rank_zero(ranks, keep)
    return found[0] if found else None


def agree(ranks: Ranks, told: Told, refuse: Callable[[Sequence[Told]], UserError | None]) -> None:
    """Compare on rank 0 what each rank tells, by rank, and raise the resulting error on all ranks. A collective."""
    by_rank = ranks.gather_objects(told)

    def compare() -> None:
        if refused := refuse(by_rank or []):
            raise refused

    by_rank_zero(ranks, compare)


def by_each(ranks: Ranks, work: Callable[[], Result], undo: Callable[[Result], object] = lambda result: None) -> Result:
    """Do something on each rank; return this rank's result, or raise on all what the first rank refused. A collective.

    ``undo`` takes back this rank's result where another one refuses.
    """
    done: list[Result] = []
    refused = None
    try:
        done.append(work())
    except UserError as error:
        refused = error
    try:
        agree(ranks, refused, lambda each: next(filter(None, each), None))
    except UserError:
        for result in done:
            undo(result)
        raise
    return done[0]
