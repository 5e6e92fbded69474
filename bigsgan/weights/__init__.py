"""Reads weights of public implementations: converts state dicts, and derives sections of a recipe."""
