"""Power iterations of a recipe's spectral layers: each by itself, as they are, and of several in one go.

    python -m tests.benchmarks.spectral [--config launch/recipes/digits.yaml] [--rounds 20]

`by shape` multiplies weights of equal shapes as one batch, which includes putting them side by side, as they changed
since the last update. (One batch of all, in matrices of the largest shape, would take 56 GB for BigGAN-128's G.) Both
find the same norms. They take turns in one process; a ratio is the median over the rounds, with the quartiles beside.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from bigsgan.config import NETWORKS, load_recipe
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import initialize
from tests.benchmarks.turns import rows, take_turns


def one_by_one(matrices, us):
    """Norms (num,) after one iteration of each."""
    norms = []
    for matrix, u in zip(matrices, us, strict=True):
        v = F.normalize(torch.mv(matrix.T, u), dim=0)
        product = torch.mv(matrix, v)
        norms.append(torch.dot(F.normalize(product, dim=0), product))
    return torch.stack(norms)


def in_one(batch, u):
    """The same of a batch (num, rows, columns) and (num, rows)."""
    v = F.normalize(torch.bmm(batch.mT, u.unsqueeze(2)), dim=1)
    product = torch.bmm(batch, v)
    return (F.normalize(product, dim=1) * product).sum((1, 2))


def by_shape(matrices, us):
    """Those of equal shapes in one batch each."""
    groups = defaultdict(list)
    for i, matrix in enumerate(matrices):
        groups[matrix.shape].append(i)
    norms = matrices[0].new_empty(len(matrices))
    for members in groups.values():
        norms[members] = in_one(torch.stack([matrices[i] for i in members]), torch.stack([us[i] for i in members]))
    return norms


SIDES = {"one by one": one_by_one, "by shape": by_shape, "control": one_by_one}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="launch/recipes/digits.yaml")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    recipe = load_recipe(Path(options.config), [f"out={tempfile.gettempdir()}"])
    print(f"{options.config}, {torch.get_num_threads()} threads")
    print("| network | layers, shapes | side | ms | ratio (quartiles) |")
    print("| --- | --- | --- | ---: | --- |")
    for name in NETWORKS:
        network = build_network(recipe, name)
        initialize(network, initial_seed(recipe, name))
        layers = network.spectral_layers()
        matrices, us = [layer.weight.flatten(1) for layer in layers], [layer.u for layer in layers]
        expected = one_by_one(matrices, us)
        sides = {side: partial(timed, iterate, matrices, us, expected) for side, iterate in SIDES.items()}
        what = f"{len(layers)}, {len({matrix.shape for matrix in matrices})}"
        for side, row in rows(take_turns(sides, options.rounds), "one by one").items():
            print(f"| {name} | {what} | {side} | {row} |")


def timed(iterate, matrices, us, expected):
    start = time.perf_counter()
    found = iterate(matrices, us)
    elapsed = time.perf_counter() - start
    torch.testing.assert_close(found, expected)
    return elapsed


if __name__ == "__main__":
    main()
