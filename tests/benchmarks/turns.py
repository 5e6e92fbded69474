"""Sides of a comparison, timed in turns in one process."""

import statistics


def take_turns(sides, rounds):
    """Time each side in each round, forwards and backwards in turn; a round before them warms up.

    Args:
        sides: By name, what does the work and returns its seconds.
        rounds: How often.

    Returns:
        By name, the seconds of each round.
    """
    seconds = {name: [] for name in sides}
    for number in range(-1, rounds):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            elapsed = sides[name]()
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def rows(seconds, first):
    """By side, milliseconds and their ratio to those of ``first``, the median with the quartiles, as in a table."""
    found = {}
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(values, seconds[first], strict=True)], n=4)
        found[name] = f"{1e3 * statistics.median(values):.2f} | {middle:.3f} ({low:.3f} to {high:.3f})"
    return found
