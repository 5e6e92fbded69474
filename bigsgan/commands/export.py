"""`bigsgan export`: one network's weights, or the generator as a graph."""

from __future__ import annotations

import argparse

from bigsgan.commands.parsing import Commands, add_run, add_sampling, add_truncation, import_late, path_type, picked
from bigsgan.config.data import DIRECTIONS

FORMATS = ["safetensors", "hub", "onnx", "torch-export", "universal", "diffusers"]
FORMATS += ["biggan-pytorch", "stylegan2-ada", "r3gan", "gat", "pix2pix"]  # state dicts for these projects' classes


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("export", help="write a network's weights as safetensors, for the Hub, or as a graph")
    add_run(command)
    text = "file to write; a directory with --format hub, universal or diffusers"
    command.add_argument("--out", type=path_type("--out"), required=True, help=text)
    text = f"{', '.join(FORMATS)}; default: onnx for a file .onnx, torch-export for .pt2, else safetensors"
    command.add_argument("--format", dest="form", metavar="FORMAT", choices=FORMATS, help=text)
    text = "type of the weights in safetensors and hub (default fp32)"
    command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help=text)
    command.add_argument("--network", choices=["generator", "discriminator"], default="generator")
    text = "which of CycleGAN's generators to write with --format pix2pix (default a_to_b)"
    command.add_argument("--direction", choices=DIRECTIONS, help=text)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--ema", dest="live", action="store_false", help="the generator's EMA (default)")
    which.add_argument("--live", action="store_true", help="the live weights")
    which = command.add_mutually_exclusive_group()
    text = "the generator with standing statistics, as `bigsgan sample` (default)"
    which.add_argument("--standing", action="store_true", help=text)
    which.add_argument("--no-standing", dest="standing", action="store_false", help="the generator with running ones")
    add_truncation(command)
    add_sampling(command, None)
    command.set_defaults(run=run, live=None, standing=None)


def run(options: argparse.Namespace) -> int:
    """Write one network."""
    module = import_late("bigsgan.export")
    module.main(options.run_directory, options.out, picked(module.Options, options, width=options.ema_width))
    return 0
