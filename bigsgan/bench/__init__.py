"""`bigsgan bench`: what a recipe costs, and where the time, the memory and the messages of an update go.

`options` reads the command line and imports no torch; each command has a module of its own.
"""
