"""Engines: one network each, laid out over all ranks or some. `build.py` makes them, and imports deepspeed."""

from bigsgan.engines.base import Engine, LossFunction, MicroBatch, Piece, Rates, Regularizer, Shard, Work
from bigsgan.engines.outcomes import Outcome, chosen
from bigsgan.engines.phases import Phase, Task

__all__ = [
    "Engine",
    "LossFunction",
    "MicroBatch",
    "Outcome",
    "Phase",
    "Piece",
    "Rates",
    "Regularizer",
    "Shard",
    "Task",
    "Work",
    "chosen",
]
