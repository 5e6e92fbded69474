"""`bigsgan export`: one network's weights, or the generator as a graph."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bigsgan.commands.parsing import Commands, add_run, add_sampling, add_width

FORMATS = ["safetensors", "hub", "onnx", "torch-export", "universal"]


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("export", help="write a network's weights as safetensors, for the Hub, or as a graph")
    add_run(command)
    add_width(command)
    command.add_argument("--out", required=True, help="file to write; a directory with --format hub or universal")
    text = "default: onnx for a file .onnx, torch-export for .pt2, else safetensors"
    command.add_argument("--format", dest="form", choices=FORMATS, help=text)
    text = "type of the weights in safetensors and hub (default fp32)"
    command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help=text)
    command.add_argument("--network", choices=["generator", "discriminator"], default="generator")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--ema", dest="live", action="store_false", help="the generator's EMA (default)")
    which.add_argument("--live", action="store_true", help="the live weights")
    text = "the generator with standing statistics, as `bigsgan sample` (default), or with running ones"
    command.add_argument("--standing", action=argparse.BooleanOptionalAction, help=text)
    add_sampling(command)
    command.set_defaults(run=run, live=None)


def run(options: argparse.Namespace) -> int:
    """Write one network."""
    module = importlib.import_module("bigsgan.export")
    asked = module.Options(
        network=options.network,
        live=options.live,
        width=options.ema_width,
        nimg=options.nimg,
        standing=options.standing,
        truncation=options.truncation,
        guidance=options.guidance,
        batch=options.batch,
        form=options.form,
        dtype=options.dtype,
    )
    module.main(Path(options.run_directory), Path(options.out), asked)
    return 0
