"""`bigsgan import`: a run directory from published weights."""

from __future__ import annotations

import argparse
import math

from bigsgan.commands.parsing import Commands, import_late, path_type
from bigsgan.errors import UserError


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("import", help="make a run directory from published weights")
    sources = ["biggan-pytorch", "studiogan", "stylegan2-ada", "stylegan3-style2", "r3gan", "gat", "pix2pix"]
    text = f"project that trained the weights: {', '.join(sources)}"
    command.add_argument("--from", dest="source", metavar="PROJECT", required=True, choices=sources, help=text)
    text = "pickle, or state dict of the generator"
    command.add_argument("--weights", type=path_type("--weights"), required=True, help=text)
    text = "state dict of the discriminator, if it is a separate file"
    command.add_argument("--discriminator", type=path_type("--discriminator"), help=text)
    command.add_argument("--bn-eps", type=float, help="BN_eps of a BigGAN-PyTorch generator, if it was not 1e-5")
    text = "file of the training settings, if not beside the weights; `none` ignores settings"
    command.add_argument("--settings", type=path_type("--settings", str), help=text)
    command.add_argument("--out", type=path_type("--out"), required=True, help="run directory to make")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make a run directory from published weights."""
    if options.bn_eps is not None and not 0 < options.bn_eps < math.inf:
        raise UserError("--bn-eps", options.bn_eps, "must be a positive number", "give the one it was trained with")
    import_late("bigsgan.importing").main(
        options.source, options.weights, options.discriminator, options.out, options.bn_eps, options.settings
    )
    return 0
