"""Checks the conditions that a recipe's data has."""

from __future__ import annotations

from typing import Any

from bigsgan.errors import UserError

_WITH_TOKENS = ("tar", "latents", "synthetic")
"""Kinds of data whose images may have tokens, besides code of the user's own."""

MOST_NUMBERS = 2**24
"""Of an image's tokens and mask, or of the tokens of several images that are held at once."""


def check_conditions(data: Any) -> None:
    """Refuse tokens where data cannot have them, and to drop conditions that cannot be null. ``data`` is a ``Data``.

    Raises:
        UserError: Something does not fit.
    """
    if data.conditions_are_tokens:
        size, field = data.condition_size, "data.condition_size"
        if not (data.is_outside or data.kind in _WITH_TOKENS):
            remedy = f"choose data with tokens ({', '.join(_WITH_TOKENS)}, or code of your own)"
            raise UserError(field, size, f"must be one number with data.kind={data.kind}", remedy)
        if data.num_classes:
            problem, remedy = f"must be 0 with data.condition_size={size}", "set data.num_classes=0"
            raise UserError("data.num_classes", data.num_classes, problem, remedy)
        if data.condition_width > MOST_NUMBERS:
            problem = f"must be T and W with T * (W + 1) up to {MOST_NUMBERS:,}"
            raise UserError(field, size, problem, "give fewer tokens")
    if data.condition_dropout and not (data.has_vectors or data.left_to_data):
        problem, remedy = "needs labels that can be null", "set data.missing_labels=accept, or remove it"
        raise UserError("data.condition_dropout", data.condition_dropout, problem, remedy)
