"""The doctor's smallest games, which tests play too."""

from bigsgan.doctor.games import FAMILIES, TINY, attend, awake, both, stages, tiny_plan, tiny_recipe, zero

__all__ = ["FAMILIES", "TINY", "attend", "awake", "both", "stages", "tiny_plan", "tiny_recipe", "zero"]
