"""Engines: one network each, laid out over all ranks."""

from bigsgan.engines.base import Engine, LossFunction, MicroBatch, Piece, Shard
from bigsgan.engines.build import build_engine

__all__ = ["Engine", "LossFunction", "MicroBatch", "Piece", "Shard", "build_engine"]
