"""What ranks of their own give to 1,024 GPUs, by the planner's model: images/s against ranks that hold both networks.

    python -m tests.benchmarks.scale [--mfu 0.4] [--peak-tflops 989] [--inside 350] [--between 40]

bigsgan/planner/traffic.py says what the model takes into account. The batch is as many images a GPU as stand in
RECIPES, or the recipe's on all numbers of GPUs. A division of the ranks counts if a batch within a tenth of that
divides by its numbers. The output is Markdown; nothing is measured.
"""

import argparse

from bigsgan import shipped
from bigsgan.config import both_engines, load_recipe, plan_run
from bigsgan.planner.balance import is_near, one_of_each, other_batches
from bigsgan.planner.sides import EXACT, OVERLAPPED, count_update
from bigsgan.planner.traffic import Machine, Model
from tests.benchmarks.pipeline import head, row

ZERO1 = both_engines("ds_config=ds_configs/zero1_bf16.json")
RECIPES = {
    "biggan256_imagenet": (32, []),
    "stylegan2_1024": (4, []),
    "gat_xl_imagenet256": (8, []),
    "biggan_xl_8b": (32, ZERO1),
    "gat_8b": (16, ZERO1),
}
"""Images a GPU, and overrides: on 64 GPUs of 80 GiB both networks of the largest fit at ZeRO 1."""

GPUS = (8, 64, 256, 1024)


def compare(name, gpus, batch, overrides, machine):
    """Images/s of both ways, and the best division with each schedule."""
    path = shipped.recipe(name)
    own = load_recipe(path, overrides)
    accumulation = max(1, min(own.accumulation, batch // gpus))
    recipe = load_recipe(path, [*overrides, f"batch={batch}", f"accumulation={accumulation}"])
    shared = count_update(plan_run(recipe, 1, path.parent, on_gpus=True))
    model = Model(shared, count_update(one_of_each(recipe, path.parent)), machine)
    seconds, best = model.shared_seconds(gpus), {}
    for schedule in (EXACT, OVERLAPPED):
        others = other_batches(recipe, model.separate, schedule, gpus, model.speed)
        near = [other.division for other in others if is_near(other, recipe)]
        best[schedule] = min(near, key=lambda division: division.timing.seconds, default=None)
    return batch / seconds, seconds, best


def table(machine, batches):
    """Print the table of all recipes; ``batches`` gives a recipe's batch on so many GPUs."""
    head("recipe", "GPUs", "batch", "both on all: images/s", "exact: ranks", "idle", "images/s", "overlapped: ranks",
         "idle", "images/s")  # fmt: skip
    for name, (each, overrides) in RECIPES.items():
        for gpus in GPUS:
            batch = batches(name, gpus, each)
            if batch < gpus:
                continue
            images, seconds, best = compare(name, gpus, batch, overrides, machine)
            cells = []
            for division in best.values():
                if division is None:
                    cells += ["none", "", ""]
                    continue
                cells += [division.text, f"{division.timing.idle:.0%}", f"x {seconds / division.timing.seconds:.2f}"]
            row(name, f"{gpus:,}", f"{batch:,}", f"{images:,.0f}", *cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"mfu": 0.4, "peak-tflops": 989.0, "inside": 350.0, "between": 40.0}
    texts = ("share of the peak that is computed with", "of a GPU", "GB/s of a GPU within 8", "GB/s of a GPU beyond")
    for (flag, value), text in zip(defaults.items(), texts, strict=True):
        parser.add_argument(f"--{flag}", type=float, default=value, help=f"{text} (default {value:g})")
    options = parser.parse_args()
    operations = options.mfu * options.peak_tflops * 1e12
    machine = Machine(operations, inside=options.inside * 1e9, between=options.between * 1e9)
    print(f"\nBatch in proportion to the GPUs, {machine}:\n")
    table(machine, lambda name, gpus, each: each * gpus)
    print("\nThe recipe's batch on all numbers of GPUs:\n")
    table(machine, lambda name, gpus, each: load_recipe(shipped.recipe(name), []).batch)


if __name__ == "__main__":
    main()
