"""`bigsgan bench`: what a recipe costs, and where the time, the memory and the messages of an update go."""
