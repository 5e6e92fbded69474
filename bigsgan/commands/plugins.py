"""`bigsgan plugins`: what installed packages add, by Python's entry points."""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points

from bigsgan.commands.parsing import Commands
from bigsgan.table import aligned

_GROUPS = "bigsgan."


def add(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser("plugins", help="list what installed packages offer to recipes, without importing it")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print each name, its kind, the code that it stands for, and the package."""
    rows = [
        (each.name, each.group.removeprefix(_GROUPS), each.value, each.dist.name if each.dist else "")
        for group in entry_points().groups
        if group.startswith(_GROUPS)
        for each in entry_points(group=group)
    ]
    print("\n".join(aligned([("name", "kind", "code", "package"), *sorted(rows)], 4)))
    return 0
