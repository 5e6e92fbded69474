"""`bigsgan evaluate`: the quality of a run's samples."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from bigsgan.commands.parsing import Commands, add_number, add_run, add_sampling, add_width, logs_aside
from bigsgan.config.metrics import KINDS as METRIC_KINDS
from bigsgan.config.metrics import FeatureNetwork, parse_metric
from bigsgan.runtime import launched
from bigsgan.runtime.slurm import launcher_variables


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("evaluate", help="measure the quality of a run's samples: FID and other metrics")
    add_run(command)
    add_width(command)
    text = f"names and numbers of images, such as fid50k,kid50k,is50k,pr50k; of {', '.join(METRIC_KINDS)}"
    command.add_argument("--metrics", default="fid10k", help=f"{text} (default fid10k)")
    text = "inception, digits, torchvision:NAME or a TorchScript file (default: digits for the digits, else inception)"
    command.add_argument("--features", default="auto", help=text)
    command.add_argument("--weights", help="file of the weights of inception or torchvision:NAME")
    text = "how images are resized for inception (default tensorflow)"
    command.add_argument("--resizer", choices=["tensorflow", "antialiased"], default="tensorflow", help=text)
    text = "compare with this .npz file: images (arr_0, arr_1), or the statistics (mu, sigma) of another project"
    command.add_argument("--reference", help=text)
    add_number(command, "--seed", int, 0, "of the latents (default 0)")
    command.add_argument("--live", action="store_true", help="use the live weights instead of the EMA")
    add_sampling(command)
    command.add_argument("--json", action="store_true", help="print the records as JSON")
    command.add_argument("overrides", nargs="*", metavar="data.key=value", help="where the real images are now")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the quality of a run's samples."""
    os.environ.update(launcher_variables(os.environ))
    launched.check_launcher()
    features = {"network": options.features, "weights": options.weights, "resizer": options.resizer}
    metrics = [parse_metric(name, "--metrics") for name in options.metrics.split(",")]
    with logs_aside():
        module = importlib.import_module("bigsgan.evaluate")
    asked = module.Options(
        run=Path(options.run_directory),
        nimg=options.nimg,
        live=options.live,
        width=options.ema_width,
        metrics=metrics,
        features=FeatureNetwork(**features),
        batch=options.batch,
        seed=options.seed,
        truncation=options.truncation,
        guidance=options.guidance,
        overrides=options.overrides,
        reference=None if options.reference is None else Path(options.reference),
        json=options.json,
    )
    return int(module.main(asked))
