"""Names of code from outside the package in a recipe, checked without importing it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from bigsgan import plugins
from bigsgan.config.sections import Section


def outside_name(kind: str) -> Any:
    """Return the type of a name of code from outside: ``package.module:attribute``, or an entry point of this kind."""

    def check(name: str) -> str:
        if plugins.is_name(name) or (":" not in name and name in plugins.names(kind)):
            return name
        known = plugins.names(kind)
        also = f" or one of {', '.join(known)}" if known else ""
        texts = {"problem": f"must be {plugins.FORM}{also}", "remedy": f"write a name such as mypackage.{kind}:Name"}
        raise PydanticCustomError("unfit", "{problem}", texts)

    return Annotated[str, AfterValidator(check)]


class Callback(Section):
    """What is told of a run's reports and checkpoints, on rank 0. The name alone is short for ``{use: NAME}``."""

    use: outside_name("callbacks")  # type: ignore[valid-type]
    """``package.module:attribute``, a class or function that returns an object with some of [four
    methods](../how-to/train-from-python.md#one-call)."""
    arguments: dict[str, Any] = Field(default={})
    """Its arguments."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"use": given} if isinstance(given, str) else given
