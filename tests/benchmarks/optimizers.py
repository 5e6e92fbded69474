"""What a step of Adam takes as one kernel, as a kernel for each operation, and tensor by tensor, in one run.

    python -m tests.benchmarks.optimizers [--config launch/recipes/digits.yaml] [--rounds 30]

All tensors of a recipe's networks get random gradients. A ratio is the median over the rounds, with the quartiles; the
fused one comes twice, and without its first moment, as bigsgan has it where beta1 is 0.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from bigsgan.config import NETWORKS, load_recipe
from bigsgan.engines.optimizer import AdamWithoutMomentum
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import initialize
from tests.benchmarks.turns import rows, take_turns

STEPS = 5
ADAM = {"lr": 1e-4, "betas": (0.0, 0.999)}
SIDES = {
    "fused": partial(torch.optim.Adam, **ADAM, fused=True),
    "fused, no first moment": partial(AdamWithoutMomentum, **ADAM, fused=True),
    "foreach": partial(torch.optim.Adam, **ADAM, foreach=True),
    "tensor by tensor": partial(torch.optim.Adam, **ADAM, foreach=False),
    "control": partial(torch.optim.Adam, **ADAM, fused=True),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="launch/recipes/digits.yaml")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    recipe = load_recipe(Path(options.config), [f"out={tempfile.gettempdir()}"])
    print(f"{options.config}, {torch.get_num_threads()} threads")
    print("| network, tensors, parameters | side | ms | ratio (quartiles) |")
    print("| --- | --- | ---: | --- |")
    for name in NETWORKS:
        network = build_network(recipe, name)
        initialize(network, initial_seed(recipe, name))
        parameters = list(network.parameters())
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        sides = {side: partial(timed, make(parameters)) for side, make in SIDES.items()}
        what = f"{name}, {len(parameters)}, {sum(parameter.numel() for parameter in parameters):,}"
        for side, row in rows(take_turns(sides, options.rounds), "fused").items():
            print(f"| {what} | {side} | {row} |")


def timed(optimizer):
    start = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    return (time.perf_counter() - start) / STEPS


if __name__ == "__main__":
    main()
