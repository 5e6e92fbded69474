"""A network in stages, each on its own ranks."""
