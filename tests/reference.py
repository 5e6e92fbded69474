"""The doctor's reference, which tests compare with too."""

import contextlib

import torch

from bigsgan.config import Recipe
from bigsgan.doctor.agreement import distance, worst
from bigsgan.doctor.losses import LOSSES
from bigsgan.doctor.rates import make_optimizer
from bigsgan.doctor.reference import Reference, build_networks

__all__ = ["LOSSES", "Reference", "build_networks", "distance", "make_optimizer", "run_reference", "worst"]


def run_reference(recipe: Recipe, num_updates: int) -> dict[str, dict[str, torch.Tensor]]:
    """State of generator, discriminator and EMA after some updates, each name -> tensor."""
    reference = Reference(recipe)
    with contextlib.closing(reference.reals):
        for update in range(num_updates):
            reference.update(update)
    return reference.result()
