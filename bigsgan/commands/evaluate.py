"""`bigsgan evaluate`: the quality of a run's samples."""

from __future__ import annotations

import argparse

from bigsgan import plugins
from bigsgan.commands.parsing import (
    Commands,
    add_number,
    add_run,
    add_sampling,
    add_truncation,
    import_quietly,
    path_type,
    picked,
)
from bigsgan.config.metrics import KINDS as METRIC_KINDS
from bigsgan.config.metrics import FeatureNetwork, check_distinct, parse_metric
from bigsgan.config.reconstruction import PerceptualNetwork
from bigsgan.errors import UserError
from bigsgan.runtime import launched


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("evaluate", help="measure the quality of a run's samples: FID and other metrics")
    add_run(command)
    text = f"names and numbers of images, such as fid50k,kid50k,is50k,pr50k; of {', '.join(METRIC_KINDS)}"
    text += f"; or {plugins.FORM}"
    command.add_argument("--metrics", default="fid10k", help=f"{text} (default fid10k)")
    text = "inception, digits, torchvision:NAME or a TorchScript file (default: by the data)"
    command.add_argument("--features", type=path_type("--features", str), default="auto", help=text)
    text = "file of the weights of inception or torchvision:NAME"
    command.add_argument("--weights", type=path_type("--weights", str), help=text)
    text = "how images are resized for inception (default tensorflow)"
    command.add_argument("--resizer", choices=["tensorflow", "antialiased"], default="tensorflow", help=text)
    text = "LPIPS, VGG-16 and its heads, or a program, for lpips (default: the recipe's)"
    command.add_argument("--lpips", type=path_type("--lpips", str), metavar="FILE[,HEADS]", help=text)
    text = "compare with this .npz file: images (arr_0, arr_1), or statistics (mu, sigma)"
    command.add_argument("--reference", type=path_type("--reference"), help=text)
    add_number(command, "--seed", int, 0, "of the latents (default 0)")
    command.add_argument("--live", action="store_true", help="use the live weights instead of the EMA")
    add_truncation(command)
    add_sampling(command)
    command.add_argument("--json", action="store_true", help="print the records as JSON")
    command.add_argument("overrides", nargs="*", metavar="data.key=value", help="where the real images are now")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure the quality of a run's samples."""
    launched.take_from_slurm()
    launched.check_launcher()
    features = FeatureNetwork(network=options.features, weights=options.weights, resizer=options.resizer)
    names = [name.strip() for name in options.metrics.split(",")]
    plugins.give(names)
    metrics = [parse_metric(name, "--metrics") for name in names]
    check_distinct(metrics, "--metrics")
    if not any(metric.needs_features for metric in metrics):
        flags = {"network": "--features", "weights": "--weights", "resizer": "--resizer"}
        problem = "must be unset with metrics that compare no features"
        for key in features.changed("", flags):
            raise UserError(flags[key], getattr(features, key), problem, "remove it")
    if options.lpips is not None and not any(metric.kind == "lpips" for metric in metrics):
        raise UserError("--lpips", options.lpips, "must be unset without the metric lpips", "remove it")
    module = import_quietly("bigsgan.evaluate")
    others = {"run": options.run_directory, "width": options.ema_width, "metrics": metrics, "features": features}
    if options.lpips is not None:
        path, _, heads = options.lpips.partition(",")
        others["lpips"] = PerceptualNetwork(path=path, heads=heads or None)
    return int(module.main(picked(module.Options, options, **others)))
