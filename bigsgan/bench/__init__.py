"""`bigsgan bench`: the cost of a recipe, and the time, memory and communication of an update."""
