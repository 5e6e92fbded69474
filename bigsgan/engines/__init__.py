"""Engines: one network each, laid out over all ranks. `build.py` makes them, and imports deepspeed."""

from bigsgan.engines.base import Engine, LossFunction, MicroBatch, Piece, Shard

__all__ = ["Engine", "LossFunction", "MicroBatch", "Piece", "Shard"]
