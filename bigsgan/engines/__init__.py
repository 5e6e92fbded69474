"""Engines: one network each, laid out over all ranks. `build.py` makes them, and imports deepspeed."""

from bigsgan.engines.base import Engine, LossFunction, Piece, Rates, Regularizer, Shard
from bigsgan.engines.outcomes import Outcome, chosen
from bigsgan.engines.sequences import Kept, MicroBatch, MicroBatches, OnDemand

__all__ = [
    "Engine",
    "Kept",
    "LossFunction",
    "MicroBatch",
    "MicroBatches",
    "OnDemand",
    "Outcome",
    "Piece",
    "Rates",
    "Regularizer",
    "Shard",
    "chosen",
]
