"""A network's training passes: its own methods, or compiled ones that share its parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from bigsgan.models.dual import Dual
from bigsgan.models.network import LayerStack


class Passes(NamedTuple):
    """Methods of ``LayerStack``."""

    forward: Callable[..., Tensor]
    fold: Callable[..., tuple[Tensor, ...]]
    with_predictions: Callable[..., tuple[Tensor, Tensor]]
    fold_dual: Callable[[Dual, int], Dual]
    with_predictions_dual: Callable[[Dual, int, int], tuple[Dual, Tensor]]  # never compiled


def training_passes(network: LayerStack, unit: str, cuda_graphs: bool = False, gathers: bool = False) -> Passes:
    """Return a network's passes, compiled unless the ``unit`` is ``none``; see compiling.py."""
    fast: tuple[Any, ...] = network, network.fold, network.with_predictions, network.fold_dual
    if unit != "none":
        compiling: Any = importlib.import_module("bigsgan.engines.compiling")  # and torch's compiler: seconds
        fast = compiling.passes(network, unit, cuda_graphs, gathers)
    forward, fold, with_predictions, fold_dual = fast
    return Passes(forward, fold, with_predictions, fold_dual, network.with_predictions_dual)
