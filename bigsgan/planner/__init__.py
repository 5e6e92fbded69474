"""Predicts the memory of a run from its recipe."""
