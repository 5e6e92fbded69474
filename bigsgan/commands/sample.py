"""`bigsgan sample`: images from a run's generator."""

from __future__ import annotations

import argparse
import csv

from bigsgan.commands.parsing import (
    Commands,
    add_number,
    add_run,
    add_sampling,
    import_late,
    import_quietly,
    path_type,
    picked,
)
from bigsgan.config.data import DIRECTIONS
from bigsgan.errors import UserError
from bigsgan.runtime import launched


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("sample", help="write samples from a run: a sheet, an animation or single files")
    add_run(command)
    add_number(command, "--num", int, None, "number of images (default 100; with --input, all)")
    text = "PNG file; GIF of an interpolation; directory of --files; .npz file of images and classes"
    command.add_argument("--out", type=path_type("--out"), required=True, help=text)
    add_number(command, "--seed", int, 0, "of the latents (default 0)")
    command.add_argument("--live", action="store_true", help="use the live weights instead of the EMA")
    text = "class of each column, such as 3,17,200-209 or cat,dog (default: the first; in an .npz file all)"
    command.add_argument("--classes", "--class", type=_classes, help=text)
    text = "columns' labels that are vectors: .npy or comma-separated text (default: some of the data, or classes)"
    command.add_argument("--conditions", type=path_type("--conditions"), help=text)
    text = "resample latents beyond this magnitude, or move styles to their mean (StyleGAN2, GAT, CAT); 0.3,0.7: rows"
    command.add_argument("--truncation", dest="truncations", type=_numbers, default=[], help=text)
    add_sampling(command)
    add_number(command, "--interpolate", int, None, "images per row, interpolating from one sample to the next")
    command.add_argument("--morph", action="store_true", help="interpolate from class to class too")
    text = "so many coarse styles by row, fine ones by column (StyleGAN2)"
    add_number(command, "--mix", int, 0, text)
    command.add_argument(
        "--files", action="store_true", help="single PNG files; under a launcher, shared among the ranks"
    )
    text = "directory of images for a generator from images; with --files most keep their sizes"
    command.add_argument("--input", type=path_type("--input"), help=text)
    text = "way between two domains, where a is that of data.input_root (default a_to_b)"
    command.add_argument("--direction", choices=DIRECTIONS, help=text)
    text = "one fixed map for all, none, or each sample's own (StyleGAN2; default random)"
    command.add_argument("--noise", choices=["const", "none", "random"], help=text)
    text = "apply --truncation only to this many of the first styles (StyleGAN2)"
    add_number(command, "--truncation-cutoff", int, None, text)
    text = "use batch norm's running statistics instead of standing ones"
    command.add_argument("--no-standing", dest="standing", action="store_false", help=text)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write samples of a run's generator."""
    shared = options.files or options.out.suffix == ".npz"  # ranks share the work, also under Slurm
    if shared:
        launched.take_from_slurm()
    launched.number("LOCAL_RANK", default=0, least=0)
    launched.check_rank()
    module = import_late("bigsgan.sample")
    asked = picked(module.Options, options, cutoff=options.truncation_cutoff, width=options.ema_width)
    rank, num_ranks = launched.rank(), launched.world_size()
    arguments = (options.run_directory, options.out, options.nimg, options.live, asked, rank, num_ranks)
    if num_ranks > 1 and shared:
        launched.check_launcher()
        comm, ending = import_quietly("bigsgan.runtime.comm"), import_quietly("bigsgan.runtime.ending")
        return int(ending.on_launched_ranks(lambda: module.main(*arguments, comm)))
    module.main(*arguments)
    return 0


def _numbers(word: str) -> list[float]:
    """Read numbers such as ``0.3,0.7,1``."""
    try:
        return [float(part) for part in word.split(",")]
    except ValueError:
        raise UserError("--truncation", word, "must be a number", "write a number such as 1, or 0.3,0.7,1") from None


def _classes(word: str) -> list[str]:
    """Read names, numbers and ranges, which only the run knows; double quotes stand around a name with commas."""
    try:
        parts = [part.strip() for part in next(csv.reader([word], skipinitialspace=True), [])]
    except csv.Error:  # a line break
        parts = []
    if not parts or not all(parts):
        remedy = "write numbers and ranges such as 3,17,200-209, or names"
        raise UserError("--classes", word, "must be a list of classes", remedy)
    return parts
