"""Tells a user's callbacks of a run's reports, checkpoints, beginning and end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from bigsgan import plugins
from bigsgan.config import Recipe, signature
from bigsgan.errors import UserError
from bigsgan.runtime import comm
from bigsgan.runtime.collective_errors import attempted, for_rank_zero

HOOKS = ("on_start", "on_report", "on_save", "on_end")
"""The methods that a callback may have: ``on_start(recipe, nimg)`` before the first update, ``on_report(nimg,
metrics)``, ``on_save(nimg, path)`` with a complete checkpoint, ``on_end(nimg, complete)`` after the last update."""

_log = logging.getLogger(__name__)


class Callbacks:
    """The callbacks of a run, which only rank 0 calls; every rank calls the methods here."""

    def __init__(self, found: Sequence[object] = (), hooks: frozenset[str] = frozenset()) -> None:
        """Take the callbacks of this rank, and the ``hooks`` that some callback of rank 0 has."""
        self._found, self._hooks = found, hooks

    def has(self, hook: str) -> bool:
        """Return whether a callback has this method; the same on all ranks."""
        return hook in self._hooks

    def tell(self, hook: str, *arguments: Any) -> UserError | None:
        """Call a method of all callbacks that have it; return what the first that fails raised. A collective."""
        if not self.has(hook):
            return None
        told = attempted(lambda: self._call(hook, arguments)) if comm.rank() == 0 else None
        error: UserError | None = comm.from_rank_zero(told)
        return error

    def require(self, hook: str, *arguments: Any) -> None:
        """Call a method of all callbacks that have it; raise what the first that fails raised. A collective."""
        if error := self.tell(hook, *arguments):
            raise error

    def _call(self, hook: str, arguments: Sequence[Any]) -> None:
        for each in self._found:
            if hasattr(each, hook):
                work = partial(getattr(each, hook), *arguments)
                try:
                    plugins.called("callbacks", name_of(each), work, f" in {hook}")
                except UserError as error:
                    _log.info("a callback failed", exc_info=error)
                    raise


def build_callbacks(recipe: Recipe, given: Sequence[object] = ()) -> Callbacks:
    """Build a recipe's callbacks on rank 0, and add those ``given`` there in Python. A collective.

    Raises:
        UserError: One cannot be built, or has none of the methods that would be called.
    """

    def build() -> list[object]:
        named = enumerate(recipe.callbacks)
        found = [signature.build(f"callbacks.{i}.use", each.use, "callbacks", each.arguments, {}) for i, each in named]
        for each in [*found, *given]:
            if not any(hasattr(each, hook) for hook in HOOKS):
                problem, remedy = f"has none of the methods {', '.join(HOOKS)}", "give it one of them"
                raise UserError("callbacks", name_of(each), problem, remedy)
        return [*found, *given]

    found = for_rank_zero(comm, build) or []
    hooks = frozenset(hook for hook in HOOKS if any(hasattr(each, hook) for each in found))
    return Callbacks(found, comm.from_rank_zero(hooks))


def name_of(callback: object) -> str:
    """Return the name of a callback's class, as a recipe writes it."""
    return f"{type(callback).__module__}:{type(callback).__qualname__}"
