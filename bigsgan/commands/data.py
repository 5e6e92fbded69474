"""`bigsgan data prepare`: converts a directory of images once, for training to read."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bigsgan.commands.parsing import Commands, add_number


def add(group: Commands) -> None:
    """Add the commands of ``data``."""
    parser = group.add_parser("data", help="prepare data sets for training")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "convert images once, into a zip file, tar shards or a folder; a second run resumes"
    command = commands.add_parser("prepare", help=text)
    command.add_argument("source", metavar="SRC", help="directory of images, with a sub-folder for each class if any")
    command.add_argument("destination", metavar="DST", help="zip file, or directory of the shards or folders, to write")
    add_number(command, "--resolution", int, None, "pixels a side", required=True)
    text = "format of DST, which is the data.kind of a recipe that reads it"
    command.add_argument("--format", choices=["zip", "tar", "folder"], required=True, help=text)
    add_number(command, "--workers", int, None, "processes that convert (default: one for each CPU core)")
    command.set_defaults(run=prepare)


def prepare(options: argparse.Namespace) -> int:
    """Convert a directory of images once, for training to read."""
    importlib.import_module("bigsgan.data.prepare").main(
        source=Path(options.source),
        destination=Path(options.destination),
        resolution=options.resolution,
        format=options.format,
        workers=options.workers,
    )
    return 0
