"""`bigsgan plugins`: the code from outside that installed packages offer to recipes by a short name."""

from __future__ import annotations

import argparse

from bigsgan import plugins
from bigsgan.commands.parsing import Commands
from bigsgan.table import aligned

_HOW = "a package adds some by entry points of the groups " + ", ".join(f"bigsgan.{kind}" for kind in plugins.KINDS)


def add(commands: Commands) -> None:
    """Add the command, which has no options."""
    text = "list the families, loss terms, data, metrics and callbacks that installed packages add"
    commands.add_parser("plugins", help=text).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """List the entry points; nothing is imported."""
    found = plugins.installed()
    rows = [("name", "kind", "stands for", "package", "version"), *((p.name, p.kind, *p[2:]) for p in found)]
    print("\n".join(aligned(rows, num_texts=5)) if found else f"none: {_HOW}")
    return 0
