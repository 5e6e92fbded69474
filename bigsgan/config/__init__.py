"""Recipes: reading, checking and printing them, without importing torch or deepspeed."""

from bigsgan.config.recipe import Recipe, load_recipe, parse_recipe
from bigsgan.config.run_plan import RunPlan, plan_run
from bigsgan.config.sections import NETWORKS, both_engines

__all__ = ["NETWORKS", "Recipe", "RunPlan", "both_engines", "load_recipe", "parse_recipe", "plan_run"]
