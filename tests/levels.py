"""Tests of networks that make and judge images at several levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bigsgan.config.data import Data
from bigsgan.config.families.transformers import TransformerNetwork
from bigsgan.images.size import Size
from bigsgan.models.network import LayerStack


def built(
    make: Callable[..., list[nn.Module]],
    config: type[TransformerNetwork],
    side: int,
    channels: int,
    num_classes: int,
    **section: Any,
) -> LayerStack:
    """A network of a recipe's section, which fits images of ``side`` pixels."""
    checked = config.model_validate(section)
    checked.check(Data(resolution=side))
    return LayerStack(make(checked, Size.of(side), channels, num_classes))
