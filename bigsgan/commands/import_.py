"""`bigsgan import`: a run directory from published weights."""

from __future__ import annotations

import argparse
import math

from bigsgan.commands.parsing import Commands, add_recipe, import_late, path_type
from bigsgan.errors import UserError

BIGSGAN, UNIVERSAL = "bigsgan", "universal"


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("import", help="make a run directory from published weights")
    sources = ["biggan-pytorch", "studiogan", "stylegan2-ada", "stylegan3-style2", "r3gan", "gat", "sit", "pix2pix"]
    sources += ["diffusers", BIGSGAN, UNIVERSAL]
    text = f"project that trained the weights: {', '.join(sources)}; universal: a network of any recipe, by DeepSpeed"
    command.add_argument("--from", dest="source", metavar="PROJECT", required=True, choices=sources, help=text)
    text = "pickle, state dict, export or universal checkpoint of the generator; a folder of diffusers' autoencoder"
    command.add_argument("--weights", type=path_type("--weights"), help=text)
    text = "the same of the discriminator, if it is a separate file"
    command.add_argument("--discriminator", type=path_type("--discriminator"), help=text)
    command.add_argument("--bn-eps", type=float, help="BN_eps of a BigGAN-PyTorch generator, if it was not 1e-5")
    text = "file of the training settings, if not beside the weights; `none` ignores settings"
    command.add_argument("--settings", type=path_type("--settings", str), help=text)
    command.add_argument("--out", type=path_type("--out"), required=True, help="run directory to make")
    add_recipe(command, None)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make a run directory from published weights."""
    if options.bn_eps is not None and not 0 < options.bn_eps < math.inf:
        raise UserError("--bn-eps", options.bn_eps, "must be a positive number", "give the one it was trained with")
    if options.source in (BIGSGAN, UNIVERSAL):
        _import_networks(options)
        return 0
    if options.weights is None:
        raise UserError("--weights", None, "must be given", "give the generator's file")
    if options.config is not None or options.overrides:
        problem, detail = f"is not supported with --from {options.source}", "its files tell the networks"
        field = "--config" if options.config is not None else options.overrides[0].partition("=")[0]
        raise UserError(field, None, problem, "change config.yaml after the import", detail)
    import_late("bigsgan.importing").main(
        options.source, options.weights, options.discriminator, options.out, options.bn_eps, options.settings
    )
    return 0


def _import_networks(options: argparse.Namespace) -> None:
    """Make a run directory from our own exports, or DeepSpeed's universal checkpoints, of one network or both."""
    for flag, value in (("--bn-eps", options.bn_eps), ("--settings", options.settings)):
        if value is not None:
            raise UserError(flag, None, f"is not supported with --from {options.source}", "remove the option")
    given = {"generator": options.weights, "discriminator": options.discriminator}
    paths = {network: path for network, path in given.items() if path is not None}
    if not paths:
        what = "universal checkpoint" if options.source == UNIVERSAL else "export"
        remedy = f"give a network's {what}, by either or both"
        raise UserError("--discriminator", None, "must be given, or --weights", remedy)
    module, overrides = import_late("bigsgan.importing"), options.overrides
    module.import_exports(options.source, paths, options.config, overrides, options.out)
