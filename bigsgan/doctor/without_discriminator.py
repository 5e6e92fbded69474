"""The reference of a generator that learns alone: plain PyTorch, in one process."""

from __future__ import annotations

from typing import Any

import torch

from bigsgan.config.reconstruction import Flow
from bigsgan.doctor.losses import of_outputs
from bigsgan.doctor.reference import Reference


class WithoutDiscriminator(Reference):
    """Runs updates without a discriminator."""

    def _take_turns(self, update: int) -> None:
        part, self.last_reals = self.parts["generator"], self._read(update, 0)
        for j, (x, y) in enumerate(self.last_reals):
            if self.recipe.objective.flow:
                loss = self._flow(self.recipe.objective.flow, update, j, x, y)
            else:
                inputs: Any = self.generator_inputs("generator", (update,), part)[j]
                images = self.forward(self.g, j == 0, *inputs)
                loss = self.distance(images, self._targets(x)) + of_outputs(self.recipe, inputs[0], *self.outputs)
                loss = loss + self.image_terms(update, images, self._targets(x), y)
                loss = loss + self.output_terms(update, images, self._targets(x), y)
            (loss / part.accumulation).backward()
        self._g_step()

    def _flow(self, section: Flow, update: int, j: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The squared error of the velocity that the generator's estimate means."""
        counters, samples = (update,), self.parts["generator"].positions(j)
        z = self.draws.noise("generator/latent", counters, samples, x.shape[1:])
        if section.times == "uniform":
            t = self.draws.uniform("generator/time", counters, samples, (1, 1, 1))
        else:
            t = 1 / (1 + torch.exp(-self.draws.normal("generator/time", counters, samples, (1, 1, 1))))
        noisy = x + t * (z - x)
        velocity = (noisy - self.forward(self.g, j == 0, noisy.flatten(1), y, t.flatten())) / t
        return section.weight * (velocity - (z - x)).pow(2).mean()

    def result(self) -> dict[str, dict[str, torch.Tensor]]:
        """State of generator and EMA: entry -> name -> tensor."""
        return {entry: state for entry, state in super().result().items() if entry != "discriminator"}

    def _learn_from_logits(self) -> None:
        """There are none."""
