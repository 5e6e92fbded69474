"""Trains an autoencoder with averaged codes, and compares each update with a public quantizer's in plain torch.

    python -m tests.benchmarks.public_averages

needs the package vector-quantize-pytorch (tests/records/codebook.py). One process, ZeRO 0, without D. Theirs has the
same encoder and decoder, begins with the same weights and sees the same images; its quantizer, with its commitment
loss, is the public one. Printed for each update: the distance of all parameters and of the codes, relative to what the
update changed. Adam's epsilon is 1e-3, so that small gradients stay small.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigsgan
from bigsgan.models.quantizers import VectorQuantizer
from tests.benchmarks.short_run import short_run
from tests.records.codebook import COMMITMENT, DECAY, quantizer

BATCH, UPDATES, CHANNELS, CODES = 8, 5, 3, 16
ADAM: dict[str, Any] = {"kind": "adam", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-3}


class Public(nn.Module):
    """Stands for the layer that quantizes."""

    def __init__(self, codes: Tensor, is_normalized: bool) -> None:
        super().__init__()
        num = BATCH * (32 // 2) ** 2
        self.public = quantizer(codes, num, is_normalized)

    def forward(self, h: Tensor, *seeds: Tensor) -> tuple[Tensor, ...]:
        made, _, loss = self.public(h)
        return made, loss.sum()


def recipe(is_normalized: bool) -> Path:
    """Write the recipe and return its file."""
    bottleneck = {"kind": "vq", "num_codes": CODES, "normalized": is_normalized, "ema": {"decay": DECAY}}
    sizes = {"channels": 8, "multipliers": [1, 2], "num_blocks": 1, "norm_groups": 4, "latent_channels": CHANNELS}
    sections = {
        "generator": {"family": "autoencoder", **sizes, "bottleneck": bottleneck},
        "discriminator": {"family": "none"},
        "objective": {"l2": 1, "codebook": {"commitment": COMMITMENT}},
        "optimizer": {"generator": ADAM},
    }
    return short_run(Path(tempfile.mkdtemp()), BATCH, UPDATES, 0, **sections)


def compare(is_normalized: bool) -> None:
    """Train, repeat the updates in plain torch, and print the distances."""
    seen, states = list[Tensor](), list[dict[str, Tensor]]()
    with bigsgan.Trainer(bigsgan.Recipe.read(recipe(is_normalized))) as trainer:
        network = trainer.build().step.generator.network
        theirs = copy.deepcopy(network)
        number = next(n for n, layer in theirs.layers.items() if isinstance(layer, VectorQuantizer))
        codes = theirs.layers[number].codebook.detach()
        if is_normalized:
            codes = F.normalize(codes, dim=1)
        theirs.layers[number] = Public(codes.clone(), is_normalized)

        def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                seen.append(inputs[0].detach().clone())

        next(iter(network.layers.values())).register_forward_pre_hook(note)
        for _ in trainer:
            states.append(copy.deepcopy(network.state_dict()))
    optimizer = torch.optim.Adam(theirs.parameters(), lr=ADAM["lr"], betas=ADAM["betas"], eps=ADAM["eps"])
    own, before = theirs.layers[number].public._codebook, {}
    for update, (images, ours) in enumerate(zip(seen, states, strict=True)):
        before = {name: each.detach().clone() for name, each in theirs.named_parameters()} | {
            "codes": own.embed[0].clone()
        }
        made, loss = theirs.fold(images, torch.zeros(len(images)))
        optimizer.zero_grad()
        ((made - images).square().mean() + loss).backward()
        optimizer.step()
        found = ours[f"layers.{number}.codebook"]
        ours["codes"] = F.normalize(found, dim=1) if is_normalized else found
        after = {name: each.detach() for name, each in theirs.named_parameters()} | {"codes": own.embed[0]}
        whole = [[v - before[n] for n, v in after.items() if n != "codes"], [after["codes"] - before["codes"]]]
        far = [[v - ours[n] for n, v in after.items() if n != "codes"], [after["codes"] - ours["codes"]]]
        shares = [norm(a) / norm(b) for a, b in zip(far, whole, strict=True)]
        print(f"normalized {is_normalized}, update {update}: parameters {shares[0]:.1e}, codes {shares[1]:.1e}")


def norm(tensors: list[Tensor]) -> float:
    """That of all of them together."""
    return float(torch.cat([each.flatten() for each in tensors]).norm())


if __name__ == "__main__":
    compare(False)
    compare(True)
