"""What overlapped updates do to learning: `python -m tests.benchmarks.schedules OUT`.

Three digits recipes, three seeds, with each ``objective.schedule``, on one process, measured as the gallery is. A run
that OUT already has is not made again, so that the command resumes where it was ended. A run takes one to three
minutes on a CPU core, all 18 of them a quarter of an hour to an hour; ``--share 0.25`` trains on a quarter of each
recipe's images.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path

from bigsgan import shipped
from bigsgan.config import load_recipe
from tests.digits_quality import measure

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"digits_dcgan": "DCGAN", "digits_r3gan": "R3GAN", "digits_stylegan2": "StyleGAN2"}
SCHEDULES = ("exact", "overlapped")
SEEDS = (0, 1, 2)
FOUND = "found.json"


def train(out: Path, name: str, seed: int, schedule: str, share: float) -> dict[str, float]:
    """Train with one schedule, unless it has been done, and return what was measured."""
    run = out / f"{name}-{seed}-{schedule}"
    if not (run / FOUND).is_file():
        recipe = load_recipe(shipped.recipe(name), [])
        nimg = round(recipe.total_nimg * share / recipe.batch) * recipe.batch
        own = [f"out={run}", f"seed={seed}", f"objective.schedule={schedule}", f"total_nimg={nimg}"]
        # At the end alone, as each takes time.
        own += [f"{key}={nimg}" for key in ("sample_nimg", "checkpoint_nimg")] + ["monitor=[]"]
        config = ["--config", f"launch/recipes/{name}.yaml"]
        subprocess.run([sys.executable, "launch/train.py", *config, *own], cwd=ROOT, check=True)
        (run / FOUND).write_text(json.dumps(measure(run)))
    found: dict[str, float] = json.loads((run / FOUND).read_text())
    return found


def main() -> None:
    """Train, and print a table of what there is after each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="of each recipe's images")
    options = parser.parse_args()
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number, seed in enumerate(SEEDS, 1):
        for name, schedule in product(RECIPES, SCHEDULES):
            found.setdefault((name, schedule), []).append(train(options.out, name, seed, schedule, options.share))
        print(f"\n{number} seeds, {options.share:g} of the images: the mean, and the seeds in order\n")
        print("| family | schedule | labelled as asked | spread |\n| --- | --- | ---: | ---: |")
        for (name, schedule), runs in found.items():
            right, spread = ([run[key] for run in runs] for key in ("right", "spread"))
            each = ", ".join(f"{100 * value:.1f}" for value in right)
            wide = ", ".join(f"{value:.2f}" for value in spread)
            print(
                f"| {RECIPES[name]} | `{schedule}` | {100 * statistics.mean(right):.1f} % ({each}) "
                f"| {statistics.mean(spread):.2f} ({wide}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
