"""`bigsgan data`: converts or encodes a directory of images once, for training to read."""

from __future__ import annotations

import argparse
from typing import get_args

from bigsgan.commands.parsing import Commands, add_number, import_late, import_quietly, path_type, picked
from bigsgan.config.origin import Origin, find_origin
from bigsgan.config.sections import LARGEST_SIDE
from bigsgan.errors import UserError
from bigsgan.images.size import Fit, Fitting, Size
from bigsgan.runtime import launched

_IGNORED = "files that may be images and may be ignored (default: as many as there are images)"
_LABELS = ("labels_file", "label_key", "condition_size", "multi_label", "missing_labels", "num_classes")


def add(group: Commands) -> None:
    """Add the commands of ``data``."""
    parser = group.add_parser("data", help="prepare data sets for training")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "convert images once, into a zip file, tar shards or a folder; a second run resumes"
    command = commands.add_parser("prepare", help=text)
    _add_places(command, "zip file, or directory of the shards or folders, to write")
    text = "format of DST, which is the data.kind of a recipe that reads it"
    command.add_argument("--format", choices=["zip", "tar", "folder"], required=True, help=text)
    add_number(command, "--workers", int, None, "processes that convert (default: one for each CPU core)")
    command.set_defaults(run=prepare)

    text = "make latents of images with an autoencoder, on all ranks; a second run resumes"
    command = commands.add_parser("encode", help=text)
    _add_places(command, "directory of the shards to write, of data.kind=latents")
    text = "diffusers:FOLDER, torchscript:ENCODER,DECODER, dct or dct:BLOCK"
    command.add_argument("--codec", required=True, help=text)
    text = "encode images of one channel"
    command.add_argument("--grey", dest="image_channels", action="store_const", const=1, default=3, help=text)
    text = "keep the images beside their latents, as PNG files"
    command.add_argument("--keep-images", action="store_true", help=text)
    text = "folder of a text encoder of transformers, which makes tokens of captions, beside the latents"
    command.add_argument("--text-encoder", type=path_type("--text-encoder"), help=text)
    text = "file (.csv, .tsv) of paths and captions, or column of huggingface (default: .txt files beside the images)"
    command.add_argument("--captions", help=text)
    add_number(command, "--max-tokens", int, None, "tokens of a caption (default: 120, or the tokenizer's fewer)")
    add_number(command, "--batch", int, 32, "images encoded at a time, by each rank (default 32)")
    add_number(command, "--workers", int, None, "processes of each rank that read images (default: its share of cores)")
    command.set_defaults(run=encode)


def _add_places(command: argparse.ArgumentParser, destination: str) -> None:
    text = "images: directory, with a folder for each class if any; archive or file; or package.module:name"
    command.add_argument("source", metavar="SRC", type=path_type("SRC"), help=text)
    command.add_argument("destination", metavar="DST", type=path_type("DST"), help=destination)
    text = "keys of a recipe that say how SRC is read, such as data.split=train"
    command.add_argument("overrides", nargs="*", metavar="data.key=value", help=text)
    command.add_argument("--kind", help="data.kind of a recipe that reads SRC (default: by what SRC is)")
    text = "pixels a side of the images, or HEIGHT,WIDTH"
    command.add_argument("--resolution", type=_size, required=True, help=text)
    text = "images of other proportions: cut out, pad with black, or stretch (default: crop)"
    command.add_argument("--fit", choices=get_args(Fit), default="crop", help=text)
    text = "skip images that are cut off, or decode what is there (default: skip)"
    command.add_argument("--truncated", choices=["skip", "accept"], help=text)
    add_number(command, "--max-ignored", _natural, None, _IGNORED)


def _size(text: str) -> Size:
    """Read one number, or a height and a width as a recipe has them."""
    words = text.strip("[]").split(",")
    if not all(word.strip().isdecimal() for word in words) or len(words) > 2:
        problem, detail = "must be an integer, or a height and a width", "with an x, projects differ in which is which"
        raise UserError("--resolution", text, problem, "write 256, or 256,128", detail if "x" in text else "")
    size = Size.of([int(word) for word in words] * (2 // len(words)))
    if size.shorter < 1:
        raise UserError("--resolution", size.value, "must be at least 1", "give a larger number")
    if size.longer > LARGEST_SIDE:
        raise UserError("--resolution", size.value, f"must be at most {LARGEST_SIDE}", "give a smaller number")
    return size


def _origin(options: argparse.Namespace) -> Origin:
    given = {key: getattr(options, key) for key in ("kind", "truncated", "max_ignored")}
    return find_origin(options.source, Fitting(options.resolution, options.fit), given, options.overrides)


def _natural(text: str) -> int:
    if (number := int(text)) < 0:
        raise UserError("--max-ignored", number, "must be at least 0", "give a larger number")
    return number


def encode(options: argparse.Namespace) -> int:
    """Make latents of a directory of images, on all ranks."""
    launched.take_from_slurm()
    launched.check_launcher()
    options.origin = _origin(options)
    if (data := options.origin.data).has_inputs:
        raise UserError("--kind", data.kind, "cannot be encoded", "encode one of its folders, with --kind folder")
    if data.range is not None:
        remedy = "train on the images, or on what `bigsgan data prepare` makes of them"
        raise UserError("data.range", data.range, "cannot be encoded", remedy, "autoencoders take 8 bits")
    for option in ("captions", "max_tokens"):
        value, name = getattr(options, option), f"--{option.replace('_', '-')}"
        if value is not None and options.text_encoder is None:
            raise UserError(name, value, "needs a text encoder", "add --text-encoder, or remove the option")
    given = options.origin.keys
    if options.text_encoder is not None and (others := [key for key in _LABELS if given.get(key)]):
        problem, detail = "cannot be given with --text-encoder", "labels are the tokens of captions"
        raise UserError(f"data.{others[0]}", given[others[0]], problem, "remove it", detail)
    if options.max_tokens is not None and not 0 < options.max_tokens <= LARGEST_SIDE:
        problem = f"must be 1 to {LARGEST_SIDE}"
        raise UserError("--max-tokens", options.max_tokens, problem, "give a number in this range")
    module = import_quietly("bigsgan.encode")
    return int(module.main(picked(module.Options, options)))


def prepare(options: argparse.Namespace) -> int:
    """Convert a directory of images once, for training to read."""
    origin = _origin(options)
    import_late("bigsgan.data.prepare").main(origin, options.destination, options.format, options.workers)
    return 0
