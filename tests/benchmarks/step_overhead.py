"""What engines, loop and monitoring cost over a plain PyTorch loop on the same networks, in one run.

    python -m tests.benchmarks.step_overhead [--config RECIPE] [--world-size 2] [--blocks 12] [dotted.key=value ...]

The plain loop is that of `bigsgan bench train`: it backpropagates through D(G(z)) (under DistributedDataParallel on
several ranks), averages G's weights with one foreach call, and reports nothing. The product's side is everything that
the training loop does for an update, with its reports. All stay built, so that blocks can be short. Blocks of both and
of a second copy of the plain loop (the A/A control) take turns; a ratio is the median over the rounds, with the
quartiles beside it.
"""

import argparse
import importlib
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tests.distributed.pool import RankPool

STEPS_PER_BLOCK = 4


class Product:
    """The product's update and reports, as training_loop makes them, with the time of each kind of task."""

    def __init__(self, loop):
        training, self.comm = (
            importlib.import_module("bigsgan.training.loop"),
            importlib.import_module("bigsgan.runtime.comm"),
        )
        self.schedules = importlib.import_module("bigsgan.training.schedules")
        self.loop, self.run, self.report = loop, loop.run, training._report_metrics
        self.clock = importlib.import_module("bigsgan.training.clock").Clock(0, loop.run.reals)
        self.seconds: dict[str, float] = {}
        for name in ("generator", "discriminator"):
            for verb in ("forward", "backward", "step"):
                self._time(getattr(self.run.step, name), verb, f"{name}.{verb}")
        self._time(self.run.reals, "next_phase", "data")
        self._time(self.run.source, "inputs", "latents")
        self._time(self.run.ema, "update", "EMA")

    def _time(self, owner, name, label):
        original = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.comm.synchronize()
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start

        setattr(owner, name, timed)

    def __call__(self):
        recipe, nimg = self.run.recipe, self.run.counters.nimg
        self.loop()
        after = self.run.counters.nimg
        if self.schedules.is_due(recipe.report_nimg, after, recipe.batch):
            decay = self.schedules.ema_decay(recipe.ema, recipe.batch, after)
            self.report(self.run, self.schedules.scheduled(recipe, nimg), decay, self.clock)


def measure(path, overrides, blocks, threads):
    """Seconds of each block of each side, and the product's time by phase; runs on every rank."""
    config = importlib.import_module("bigsgan.config")
    comm = importlib.import_module("bigsgan.runtime.comm")
    if threads:
        torch.set_num_threads(threads)
    world_size = comm.world_size()
    recipe = config.load_recipe(Path(path), [f"out={tempfile.mkdtemp()}", *overrides])
    plan = config.plan_run(recipe, world_size)
    plain, product = importlib.import_module("bigsgan.bench.plain"), importlib.import_module("bigsgan.bench.product")
    sides = {
        "plain": plain.build_plain_loop(plan, distributed=world_size > 1),
        "product": Product(product.build_engine_loop(plan)),
        "plain again": plain.build_plain_loop(plan, distributed=world_size > 1),
    }
    names, seconds = list(sides), {name: [] for name in sides}
    for block in range(-1, blocks):  # the first round warms up
        for name in names if block % 2 else names[::-1]:
            comm.barrier()
            comm.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS_PER_BLOCK):
                sides[name]()
            comm.synchronize()
            if block >= 0:
                seconds[name].append((time.perf_counter() - start) / STEPS_PER_BLOCK)
        if block < 0:
            sides["product"].seconds.clear()
    phases = {name: total / (blocks * STEPS_PER_BLOCK) for name, total in sides["product"].seconds.items()}
    sides["product"].run.reporter.close()
    return seconds, phases


def report(name, ratios):
    """Print a median with its 95 % interval (of order statistics; the normal approximation of the binomial)."""
    values, reach = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = max(0, int(len(values) / 2 - reach)), min(len(values) - 1, int(len(values) / 2 + reach))
    print(f"  {name}: {statistics.median(values):.3f} (95 % interval {values[low]:.3f} to {values[high]:.3f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="launch/recipes/digits.yaml")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads of each rank (default: all cores / ranks)"
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    pool = RankPool(options.world_size)
    try:
        results = pool.run(measure, options.config, options.overrides, options.blocks, options.threads, timeout=1200)
    finally:
        pool.stop()
    seconds, phases = results[0]
    print(
        f"world size {options.world_size}, {options.blocks} rounds of {STEPS_PER_BLOCK} updates; "
        "seconds an update (median):"
    )
    for name, values in seconds.items():
        print(f"  {name:12s} {statistics.median(values):.4f}")
    rounds = list(zip(seconds["plain"], seconds["plain again"], seconds["product"], strict=True))
    report("product / mean of both plain", [2 * product / (first + second) for first, second, product in rounds])
    report("plain again / plain", [second / first for first, second, _ in rounds])
    print("product by phase, ms an update:")
    for name, value in sorted(phases.items(), key=lambda item: -item[1]):
        print(f"  {name:28s} {1e3 * value:8.2f}")


if __name__ == "__main__":
    main()
