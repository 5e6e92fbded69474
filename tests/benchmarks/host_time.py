"""What engines cost the host for each parameter tensor and update, over a plain PyTorch loop, in one run.

    python -m tests.benchmarks.host_time [--world-size 2] [--stages 0,1,2] [--rounds 12]

Two games of perceptrons so narrow that their arithmetic takes next to no time, one with many more layers than the
other. An update of a DeepSpeed engine costs so and so much more than one of the plain loop; by how much that grows with
the layers, over the parameter tensors of both networks that there are more, is what a tensor costs. Loops take turns;
each difference is between medians over the rounds. The plain loop's own second copy is the control.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bigsgan.config import both_engines
from tests.distributed.pool import RankPool

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
DEPTHS = (4, 64)
STEPS = 4


def overrides(depth, stage):
    """A game of two perceptrons, of Adam, at a ZeRO stage."""
    return [
        f"out={tempfile.mkdtemp()}",
        "data={kind: synthetic, resolution: 8, image_channels: 1, num_classes: 10, num_images: 64}",
        f"generator={{family: mlp, latent_size: 8, width: 8, depth: {depth}}}",
        f"discriminator={{family: mlp, width: 8, depth: {depth}}}",
        "batch=4",
        "metrics=null",
        *both_engines(f"ds_config={DS_CONFIGS / f'zero{stage}.json'}"),
    ]


def measure(stages, rounds):
    """Seconds an update by (side, depth), and parameter tensors by depth; runs on every rank."""
    config, comm = importlib.import_module("bigsgan.config"), importlib.import_module("bigsgan.runtime.comm")
    plain, product = importlib.import_module("bigsgan.bench.plain"), importlib.import_module("bigsgan.bench.product")
    torch.set_num_threads(1)
    loops, tensors = {}, {}
    for depth in DEPTHS:
        for side in ("plain", "plain again", *stages):
            stage = side if isinstance(side, int) else 0
            recipe = config.load_recipe(Path("launch/recipes/digits.yaml"), overrides(depth, stage))
            plan = config.plan_run(recipe, comm.world_size())
            if isinstance(side, int):
                loops[side, depth] = product.build_engine_loop(plan)
            else:
                loops[side, depth] = loop = plain.build_plain_loop(plan, distributed=comm.world_size() > 1)
                tensors[depth] = sum(len(list(n.root.parameters())) for n in (loop._generator, loop._discriminator))
    seconds = {key: [] for key in loops}
    for number in range(-1, rounds):  # the first warms up
        for key in list(loops) if number % 2 else list(loops)[::-1]:
            comm.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                loops[key]()
            if number >= 0:
                seconds[key].append((time.perf_counter() - start) / STEPS)
    return {key: statistics.median(values) for key, values in seconds.items()}, tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--stages", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    stages = [int(stage) for stage in options.stages.split(",")]
    pool = RankPool(options.world_size)
    try:
        seconds, tensors = pool.run(measure, stages, options.rounds, timeout=1200)[0]
    finally:
        pool.stop()
    few, many = DEPTHS
    print(f"world size {options.world_size}: updates with {tensors[few]} and {tensors[many]} parameter tensors")
    print("| side | ms, few | ms, many | us a tensor over the plain loop |")
    print("| --- | ---: | ---: | ---: |")
    for side in ("plain", "plain again", *stages):
        over = [seconds[side, depth] - seconds["plain", depth] for depth in DEPTHS]
        cost = (over[1] - over[0]) / (tensors[many] - tensors[few])
        name = side if isinstance(side, str) else f"ZeRO {side}"
        print(f"| {name} | {1e3 * seconds[side, few]:.2f} | {1e3 * seconds[side, many]:.2f} | {1e6 * cost:.1f} |")


if __name__ == "__main__":
    main()
