"""`bigsgan bench generate`: a generator's time for a batch, by batch size, precision, and mode (eager or compiled)."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bigsgan.bench.about import print_results
from bigsgan.bench.host import HostPeak, return_unused
from bigsgan.bench.measure import Stopwatch
from bigsgan.bench.table import Table, mebibytes, number
from bigsgan.config import Recipe
from bigsgan.draws import Draws
from bigsgan.engines import MicroBatch
from bigsgan.engines.base import DTYPES
from bigsgan.errors import UserError
from bigsgan.inference.trained import open_trained
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import LayerStack, initialize
from bigsgan.runtime import comm, memory
from bigsgan.training.sampling import generator_inputs, sampling_mode, translation_inputs

_PERCENTILES = (50, 90, 99)
_SEED = 0

Generate = Callable[..., Tensor]


class Cases(NamedTuple):
    """The cases to measure: all combinations of batches, precisions and modes."""

    batches: Sequence[int]  # images at a time
    precisions: Sequence[str]  # precisions of the weights
    modes: Sequence[str]  # `eager`, `compiled`
    warmup: int  # batches before the clock starts
    steps: int  # batches that are timed


def main(recipe: Recipe | None, run: Path | None, cases: Cases, form: str | None) -> int:
    """Measure a recipe's initial weights or a run's EMA in one process, print, and return the exit status.

    Raises:
        UserError: The run cannot be opened.
    """
    with contextlib.redirect_stdout(sys.stderr):  # only the results go to standard output
        if run is not None:
            trained = open_trained(run, "generator", live=False, nimg=None, device=torch.device("cpu"))
            network, recipe = trained.network, trained.recipe
        else:
            assert recipe is not None
            network = build_network(recipe, "generator")
            initialize(network, initial_seed(recipe, "generator"))
        found = measured(network, recipe, cases)
    weights = "random weights" if run is None else f"EMA of {run}"
    what = f"{recipe.generator.family} at {recipe.data.resolution}, {weights}"
    percentiles = [f"p{p} ms" for p in _PERCENTILES]
    headings = ("case", "batch", *percentiles, "images/s", "device MiB", "host MiB", "first s", "differs")
    rows = [_row(each) for each in found if "reason" not in each]
    notes = [
        f"{_name(each)}, batch {each['batch']}: cannot run here: {each['reason']}" for each in found if "reason" in each
    ]
    notes += [
        "device MiB, host MiB: peak; first: the first batch, which compiles",
        "differs: most that a pixel, which is from -1 to 1, does from the eager fp32 image",
    ]
    table = Table(f"time of a batch: {what}", headings, rows, notes)
    print_results(form, {"generator": what, "cases": found}, table)
    return 0


def measured(network: LayerStack, recipe: Recipe, cases: Cases) -> list[dict[str, Any]]:
    """Measure each case, for a network in float32 on the host; a case that fails has a reason instead of numbers."""
    found = []
    for mode, precision, batch in itertools.product(cases.modes, cases.precisions, cases.batches):
        case = {"mode": mode, "precision": precision, "batch": batch}
        print(f"{_name(case)}, batch {batch}", file=sys.stderr, flush=True)
        return_unused()
        try:
            with memory.naming_remedy("for this batch", "leave it out"), torch.no_grad():
                case |= _measured_case(network, recipe, case, cases)
        except (UserError, RuntimeError) as error:  # torch raises RuntimeError if it lacks a type or compiler
            case["reason"] = str(error).strip().partition("\n")[0]
        found.append(case)
    return found


def _measured_case(network: LayerStack, recipe: Recipe, case: dict[str, Any], cases: Cases) -> dict[str, Any]:
    inputs = _inputs(recipe, case["batch"], comm.device())
    expected = _reference_images(network, inputs, recipe)
    cast = copy.deepcopy(network)
    for parameter in cast.parameters():  # not buffers, which are float32 at every precision
        parameter.data = parameter.data.to(DTYPES[case["precision"]])
    cast.to(comm.device())
    # Code compiled for other cases would count as this case's memory, and torch compiles at most 8 shapes.
    torch.compiler.reset()
    generate: Generate = torch.compile(cast, dynamic=False) if case["mode"] == "compiled" else cast
    return_unused()
    comm.forget_peak_memory()
    with contextlib.closing(HostPeak()) as host:
        with sampling_mode(cast, recipe.sample_statistics):
            images, first, seconds = _timed_batches(generate, inputs, cases)
        return {
            **{f"p{p}_seconds": float(np.percentile(seconds, p)) for p in _PERCENTILES},
            "images_per_second": len(expected) * len(seconds) / sum(seconds),
            "device_peak_bytes": None if comm.device().type == "cpu" else comm.peak_memory_bytes(),
            "host_peak_bytes": host.peak(),
            "first_seconds": first,
            "difference": float((images.float().cpu() - expected).abs().max()),
        }


def _reference_images(network: LayerStack, inputs: MicroBatch, recipe: Recipe) -> Tensor:
    """The network's images in float32, on the host, so that none of it stays in the device's memory."""
    copied = copy.deepcopy(network).to(comm.device())
    with sampling_mode(copied, recipe.sample_statistics):
        return copied(*inputs).float().cpu()


def _timed_batches(generate: Generate, inputs: MicroBatch, cases: Cases) -> tuple[Tensor, float, list[float]]:
    """The images, the seconds of the first batch, and those of each timed batch."""
    watch = Stopwatch()
    images = generate(*inputs)
    first = watch.seconds()
    for _ in range(cases.warmup):
        generate(*inputs)
    seconds = []
    for _ in range(cases.steps):
        watch = Stopwatch()
        generate(*inputs)
        seconds.append(watch.seconds())
    return images, first, seconds


def _inputs(recipe: Recipe, num: int, device: torch.device) -> MicroBatch:
    """Inputs of the first ``num`` samples: latents and labels, or for translation, noise instead of images."""
    draws = Draws(_SEED)
    labels = torch.arange(num) % max(recipe.data.num_classes, 1)
    if not recipe.translates:
        return generator_inputs(recipe, draws, "bench", 0, labels, None, device)
    shape = (recipe.input_channels, recipe.data.side, recipe.data.side)
    images = torch.from_numpy(draws.normal("bench", (), 0, num, math.prod(shape))).view(num, *shape).clamp(-1, 1)
    return translation_inputs(recipe, images, labels, draws.seeds("bench/seed", (0,), 0, num), device)


def _name(case: dict[str, Any]) -> str:
    return f"{case['mode']} {case['precision']}"


def _row(each: dict[str, Any]) -> list[str]:
    return [
        _name(each),
        str(each["batch"]),
        *(number(1e3 * each[f"p{p}_seconds"]) for p in _PERCENTILES),
        number(each["images_per_second"]),
        mebibytes(each["device_peak_bytes"]),
        mebibytes(each["host_peak_bytes"]),
        number(each["first_seconds"]),
        f"{each['difference']:.1e}",
    ]
