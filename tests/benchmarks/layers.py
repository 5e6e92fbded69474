"""What an update would take with contiguous activations, batch norm in float32, and no spectral norm, in one run.

    python -m tests.benchmarks.layers [--config launch/recipes/digits.yaml] [--rounds 12] [dotted.key=value ...]

One run makes its updates now as it is and now with one thing left out, in turns; a ratio is the median over the rounds,
with the quartiles beside it. The run as it is comes twice: the second is the control. What is learnt meanwhile means
nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from bigsgan.bench.product import build_engine_loop
from bigsgan.config import load_recipe, plan_run
from bigsgan.models.layers import SpectralLayer
from bigsgan.runtime import comm
from tests.benchmarks.turns import rows, take_turns

STEPS = 6


def contiguous(convolve, x, *args, **kwargs):
    return convolve(x.contiguous(), *args, **kwargs)


def channels_last(convolve, x, *args, **kwargs):
    return convolve(x.contiguous(memory_format=torch.channels_last), *args, **kwargs)


def in_float32(normalize, x, *args, **kwargs):
    return normalize(x.float(), *args, **kwargs).to(x.dtype)


SIDES = {
    "as it is": nullcontext,
    "contiguous": partial(mock.patch.object, F, "conv2d", partial(contiguous, F.conv2d)),
    "all convolutions in channels_last": partial(mock.patch.object, F, "conv2d", partial(channels_last, F.conv2d)),
    "batch norm in float32": partial(mock.patch.object, F, "batch_norm", partial(in_float32, F.batch_norm)),
    "no spectral normalization": partial(
        mock.patch.object, SpectralLayer, "normalized_weight", lambda self: self.weight
    ),
    "control": nullcontext,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="launch/recipes/digits.yaml")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    comm.initialize(3600)
    recipe = load_recipe(Path(options.config), [f"out={tempfile.gettempdir()}", "metrics=null", *options.overrides])
    loop = build_engine_loop(plan_run(recipe, 1))
    seconds = take_turns({side: partial(timed, loop, changed) for side, changed in SIDES.items()}, options.rounds)
    loop.close()
    print(f"{options.config}, {torch.get_num_threads()} threads")
    print("| side | ms an update | ratio (quartiles) |")
    print("| --- | ---: | --- |")
    for side, row in rows(seconds, "as it is").items():
        print(f"| {side} | {row} |")


def timed(loop, changed):
    with changed():
        loop()
        start = time.perf_counter()
        for _ in range(STEPS):
            loop()
        return (time.perf_counter() - start) / STEPS


if __name__ == "__main__":
    main()
