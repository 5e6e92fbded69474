"""The time of updates with exact penalties, by a double backward and in forward mode, eager and compiled, in one run.

    python -m tests.benchmarks.penalties_time [--rounds N] [--steps N] > FILE

R3GAN with R1 and R2 in every update; StyleGAN2 as its recipe has it, lazily, and with R1 and path length in every one.
Each is a run of `bigsgan bench train`, whose variants take turns in one process and begin with a control. The machine
should do nothing else. Compiled variants need torch 2.15 or newer, without which passes with tangents stay eager.
"""

import argparse
import os
import subprocess
import sys

import torch

VARIANTS = "double_backward,forward_mode,compiled+double_backward,compiled+forward_mode"
CASES = {
    "R3GAN, R1 and R2 in every update": ("digits_r3gan", []),
    "StyleGAN2, lazy R1 and path length": ("digits_stylegan2", []),
    "StyleGAN2, R1 and path length in every update": (
        "digits_stylegan2",
        ["objective.r1.every=1", "objective.path_length.every=1"],
    ),
}
LONGEST = 16
"""Updates between two lazy penalties of digits_stylegan2: a round has to hold a multiple of them."""


def main() -> None:
    """Print what each run prints, under the name of its case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=LONGEST, help="updates of a variant in a round")
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}", flush=True)
    for name, (recipe, overrides) in CASES.items():
        print(f"\n{name}\n", flush=True)
        command = [sys.executable, "-m", "bigsgan", "bench", "train", "--config", f"launch/recipes/{recipe}.yaml"]
        command += ["--variants", VARIANTS, "--rounds", str(options.rounds), "--steps", str(options.steps)]
        subprocess.run([*command, "metrics=null", *overrides], check=True)
    print(f"\nAt the end: load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
