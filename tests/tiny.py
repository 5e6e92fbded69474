"""The doctor's smallest games, which tests play too."""

from bigsgan.doctor.games import TINY, TINY_GAMES, attend, awake, both, stages, tiny_plan, tiny_recipe, zero

__all__ = ["TINY", "TINY_GAMES", "attend", "awake", "both", "stages", "tiny_plan", "tiny_recipe", "zero"]
