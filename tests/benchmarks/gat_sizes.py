"""`python -m tests.benchmarks.gat_sizes CLONE S/2 S/4 S/8 B/2 L/2 XL/2`: GAT at published sizes beside the public code.

CLONE is as in tests/records/gat.py; a size is a name there and a patch. Both compute in float64, with the same random
weights, of latents of 32x32x4 and 1,000 classes: what the networks return, D's gradient at its images, and the
gradients of all parameters. What is printed is the distance of ours to theirs, relative to the norm, of gradients the
largest one. The weights and gradients of XL take 15 GB.
"""

from __future__ import annotations

import argparse
import gc
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bigsgan.config.families.gat import GATDiscriminator, GATGenerator
from bigsgan.models import gat
from bigsgan.models.network import LayerStack
from bigsgan.weights import gat as weights
from tests.levels import built
from tests.networks import numel
from tests.records.gat import LEVELS, disturb, grads_of, in_float64, make, of_levels, public_code, published, stacked

SIDE, CHANNELS, CLASSES, NUM = 32, 4, 1_000, 2
OURS = {
    "G": (
        partial(built, gat.generator_layers, GATGenerator, SIDE, CHANNELS, CLASSES),
        weights.generator_section,
        weights.generator_state,
    ),
    "D": (
        partial(built, gat.discriminator_layers, GATDiscriminator, SIDE, CHANNELS, CLASSES),
        weights.discriminator_section,
        weights.discriminator_state,
    ),
}


def sharing(theirs: nn.Module, letter: str) -> LayerStack:
    """Our network, on the weights of theirs."""
    build, section_of, state_of = OURS[letter]
    state = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    network = build(**section_of(state))
    missing, unexpected = network.load_state_dict(state_of(state), strict=False, assign=True)
    assert not missing, missing
    assert not unexpected, unexpected
    return network.requires_grad_(True)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def compare(theirs: nn.Module, letter: str) -> list[float]:
    """Distances of outputs, of D's gradient at images, and the largest of a parameter's gradient."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (NUM,), generator=generator)
    images = torch.randn(NUM, LEVELS * CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64)
    z = torch.randn(NUM, 64, generator=generator, dtype=torch.float64)
    direction, found = torch.randn(images.shape, generator=generator, dtype=torch.float64), []
    slopes = [images.clone().requires_grad_(), images.clone().requires_grad_()]
    expected = stacked(make(theirs, z, y)) if letter == "G" else theirs(of_levels(slopes[0]), y).squeeze(1)
    (expected * (direction if letter == "G" else 1)).sum().backward()
    grads = OURS[letter][2](grads_of(theirs))
    theirs.zero_grad()
    network = sharing(theirs, letter)
    outputs = network(z, y) if letter == "G" else network.part(1, len(network.layers))(slopes[1], y)  # behind the noise
    (outputs * (direction if letter == "G" else 1)).sum().backward()
    found.append(distance(outputs, expected))
    if letter == "D":
        found.append(distance(slopes[1].grad, slopes[0].grad))
    own = {name: p.grad for name, p in network.named_parameters()}
    assert own.keys() == grads.keys(), own.keys() ^ grads.keys()
    return [*found, torch.tensor([distance(own[name], grad) for name, grad in grads.items()]).amax().item()]  # or NaN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="directory with the public code")
    parser.add_argument("sizes", nargs="+", help="such as XL/2")
    options = parser.parse_args()
    public = public_code(options.clone)
    print("| size | network | parameters | outputs | at images | parameters' gradients |\n| --- |" + " --- |" * 5)
    for size in options.sizes:
        for letter in OURS:
            torch.manual_seed(0)
            theirs = in_float64(published(public, letter, size, SIDE, CLASSES))
            disturb(theirs)
            far = compare(theirs, letter)
            assert all(map(math.isfinite, far))
            outputs, *at_images, gradients = (f"{each:.1e}" for each in far)
            cells = [outputs, *(at_images or [""]), gradients]
            print(f"| {size} | {letter} | {numel(theirs):,} | {' | '.join(cells)} |", flush=True)
            del theirs
            gc.collect()


if __name__ == "__main__":
    main()
