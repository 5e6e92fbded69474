"""`bigsgan plan`: the cost of a recipe, its partition into stages, and the layouts that fit."""

from __future__ import annotations

import argparse
import math

from bigsgan.commands.parsing import Commands, add_number, add_recipe, import_quietly, refuse_beside
from bigsgan.commands.planning import plan_on_ranks, with_data
from bigsgan.config import NETWORKS, load_recipe
from bigsgan.errors import UserError

_LEAST_GIB, _MOST_GIB, _MOST_GPUS = 2**-10, 2**40, 2**20
_LEAST_MFU, _LEAST_PEAK, _MOST_PEAK = 1e-6, 1e-6, 1e9
"""Limits of a share of the peak and of a peak in TFLOP/s, far beyond those of any device."""


def add(commands: Commands) -> None:
    """Add the command and its options."""
    text = "show the cost of a recipe: operations, stages, or the memory of its layouts, without training"
    command = commands.add_parser("plan", help=text)
    add_recipe(command)
    command.add_argument("--pipeline", action="store_true", help="the partition into pipeline stages, and the bubble")
    add_number(command, "--gpus", int, None, "number of ranks (default: the least that the stages need)")
    text = "GiB of each GPU: show the memory of all layouts, and which to take"
    add_number(command, "--gpu-memory", float, None, text)
    add_number(command, "--nodes", int, None, "number of hosts that the GPUs are on (default 1)")
    add_number(command, "--host-memory", float, None, "GiB of each host, for layouts that offload to it")
    text = "share of --peak-tflops that is computed with: show how long the run takes"
    add_number(command, "--mfu", float, None, text)
    text = "peak of each GPU: of its data sheet, or what bench train measured with the share"
    add_number(command, "--peak-tflops", float, None, text)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the cost of a recipe's networks, their division into stages, or the layouts that fit into memory."""
    recipe, found = with_data(load_recipe(options.config, options.overrides))
    least = math.lcm(*(recipe.engine(network).pipeline_stages for network in NETWORKS))
    gpus = least if options.gpus is None else options.gpus
    if options.gpus is None and any(recipe.engine(network).ranks for network in NETWORKS):
        raise UserError("--gpus", None, "must be given with engines.*.ranks", "add --gpus 8")
    if not 1 <= gpus <= _MOST_GPUS:
        raise UserError("--gpus", gpus, f"must be 1 to {_MOST_GPUS}", "give a number in this range")
    speed = _check_speed(options)
    if options.gpu_memory is not None:
        memory = _check_memory(options, gpus)
        module = import_quietly("bigsgan.plan")
        resources = module.Resources(gpus, options.nodes or 1, *memory)
        module.survey(options.config, [*options.overrides, *found], resources, options.json)
        return 0
    for flag, value in (("--nodes", options.nodes), ("--host-memory", options.host_memory)):
        if value is not None:
            raise UserError(flag, None, "needs --gpu-memory", "add --gpu-memory 80, or remove the option")
    planned = plan_on_ranks(recipe, gpus, options.config)
    module = import_quietly("bigsgan.plan")
    module.main(planned, options.pipeline, options.json, None if speed is None else module.Speed(*speed))
    if options.gpus is not None and speed is None and not options.pipeline and not options.json:
        print("To see which layouts fit into these GPUs, add --gpu-memory GIB.")
    return 0


def _check_speed(options: argparse.Namespace) -> tuple[float, float] | None:
    """Share of the peak, and the peak in operations a second, if they are given."""
    given = {"--mfu": options.mfu, "--peak-tflops": options.peak_tflops}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        other = next(flag for flag in given if flag not in missing)
        raise UserError(other, None, f"needs {missing[0]}", f"add {missing[0]}, such as --mfu 0.4 --peak-tflops 989")
    refuse_beside("--mfu", {"--gpu-memory": options.gpu_memory, "--pipeline": options.pipeline})
    if not 0 < options.mfu <= 1:
        raise UserError("--mfu", options.mfu, "must be greater than 0 and at most 1", "give a share such as 0.4")
    remedy = "give the speed that --mfu is a share of, such as a data sheet's 989"
    if not 0 < options.peak_tflops < math.inf:
        raise UserError("--peak-tflops", options.peak_tflops, "must be a positive number", remedy)
    for flag, value, least in (("--mfu", options.mfu, _LEAST_MFU), ("--peak-tflops", options.peak_tflops, _LEAST_PEAK)):
        if value < least:
            raise UserError(flag, value, f"must be at least {least:g}", "give a larger number")
    if options.peak_tflops > _MOST_PEAK:
        raise UserError("--peak-tflops", options.peak_tflops, f"must be at most {_MOST_PEAK:g}", remedy)
    return options.mfu, options.peak_tflops * 1e12


def _check_memory(options: argparse.Namespace, gpus: int) -> tuple[int, int | None]:
    """Bytes of a GPU, and of a node's host memory if that is given; refuse invalid options."""
    nodes = 1 if options.nodes is None else options.nodes
    if nodes < 1 or gpus % nodes:
        raise UserError("--nodes", nodes, f"must divide the number of GPUs ({gpus})", f"give a divisor of {gpus}")
    if options.pipeline:
        raise UserError("--pipeline", None, "cannot be combined with --gpu-memory", "give only one of them")
    for flag, gib in (("--gpu-memory", options.gpu_memory), ("--host-memory", options.host_memory)):
        if gib is not None and not 0 < gib < _MOST_GIB:
            raise UserError(flag, gib, f"must be above 0 and below {_MOST_GIB:.0e} GiB", "give a number such as 80")
        if gib is not None and gib < _LEAST_GIB:
            raise UserError(flag, gib, f"must be at least {_LEAST_GIB:g}", "give a size in GiB, such as 80")
    host = options.host_memory
    return math.ceil(options.gpu_memory * 2**30), None if host is None else math.ceil(host * 2**30)
