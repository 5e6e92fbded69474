"""`bigsgan export`: one network's weights as safetensors."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bigsgan.commands.parsing import Commands, add_run, add_sampling, add_width


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("export", help="write a network's float32 weights as safetensors")
    add_run(command)
    add_width(command)
    command.add_argument("--out", required=True, help="safetensors file")
    command.add_argument("--network", choices=["generator", "discriminator"], default="generator")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--ema", dest="live", action="store_false", help="the generator's EMA (default)")
    which.add_argument("--live", action="store_true", help="the live weights")
    text = "the generator with standing statistics, as `bigsgan sample` (default), or with running ones"
    command.add_argument("--standing", action=argparse.BooleanOptionalAction, help=text)
    add_sampling(command)
    command.set_defaults(run=run, live=None)


def run(options: argparse.Namespace) -> int:
    """Write one network's weights as safetensors."""
    importlib.import_module("bigsgan.export").main(
        run=Path(options.run_directory),
        network=options.network,
        live=options.live,
        width=options.ema_width,
        out=Path(options.out),
        nimg=options.nimg,
        standing=options.standing,
        truncation=options.truncation,
        batch=options.batch,
    )
    return 0
