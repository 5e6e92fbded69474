"""Weights that others trained: from the names and shapes of their state dicts to those of our networks."""
