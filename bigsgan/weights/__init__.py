"""Reads the weights of public implementations: their state dicts become ours, and sections of a recipe."""
