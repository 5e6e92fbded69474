"""`bigsgan doctor`: checks of a machine, a recipe on it, or a run, one after the other, on all ranks."""
