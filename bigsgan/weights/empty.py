"""Our networks without values, for comparing their names and shapes with published weights, and calls as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigsgan.config.families import FAMILIES
from bigsgan.images.size import Size
from bigsgan.models.build import maker
from bigsgan.models.network import LayerStack


def empty_network(network: str, section: Mapping[str, Any], data: Mapping[str, int]) -> LayerStack:
    """The ``generator`` or ``discriminator`` of a recipe with this section and this ``data``, on the meta device."""
    own = FAMILIES[section["family"]][network == "discriminator"](**section)
    with torch.device("meta"):
        return LayerStack(maker(own)(own, **sized(data)))


def sized(data: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of a family's functions for the ``data`` that weights tell, whose images are square."""
    return {"size": Size.of(data["resolution"]), **{key: data[key] for key in data if key != "resolution"}}


def call(arguments: Mapping[str, Any]) -> str:
    """Return arguments as they stand in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
