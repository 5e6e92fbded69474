"""Autoencoders with codes: overrides of the tiny recipe, and the terms of codes in plain torch."""

import torch

from bigsgan.doctor.reference import Reference
from bigsgan.models import noise
from bigsgan.models.quantizers import VectorQuantizer
from tests.tiny import TINY_GAMES

_, NUM_CLASSES, GENERATOR, DISCRIMINATOR, *_ = TINY_GAMES["autoencoder_vq"]
AVERAGED = "bottleneck: {kind: vq, num_codes: 16, ema: {decay: 0.8, revival: {below: 0.9, most: 3}}, temperature: 0.3}"
MEANS = AVERAGED.replace("temperature", "kmeans_steps: 4, temperature")
LEARNED = "bottleneck: {kind: vq, num_codes: 16, kmeans_steps: 4, temperature: 0.3}"
SIGNS = "bottleneck: {kind: lfq, temperature: 2}"
OBJECTIVE = "objective={l1: 3, codebook: {weight: 2, entropy: {weight: 0.4, diversity: 1.5}}, reuse_fakes: true}"


def game(bottleneck):
    """Overrides of the tiny recipe."""
    generator = GENERATOR.partition("bottleneck")[0] + bottleneck + "}"
    return [NUM_CLASSES, generator, DISCRIMINATOR, OBJECTIVE, "optimizer.generator.lr=0.01"]


class WithCodes(Reference):
    """Adds the entropies, of whole batches, and the averages of Sonnet's quantizer, with counts and sums of latents."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        found = [each for each in self.g.modules() if isinstance(each, VectorQuantizer)]
        self.output_terms = self.entropies
        self.quantizer, self.noted, self.section = (found or [None])[0], [], self.recipe.generator.bottleneck
        if found:
            self.counts, self.totals = torch.ones(16), self.quantizer.codebook.detach().clone()

    def entropies(self, update, images, targets, labels):
        """The entropies."""
        encoded, *_ = self.outputs
        if self.quantizer is None:
            signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * encoded.shape[2])
        else:
            seeds = self.last_latents[len(self.noted)][2]
            self.noted.append((encoded.detach(), self.outputs[2], seeds))
            signs = torch.nn.functional.normalize(self.quantizer.codebook, dim=1)
        p = (-((encoded[:, :, None] - signs) ** 2).sum(3) / self.section.temperature).softmax(2).flatten(0, 1)
        mean = p.mean(0)
        value = -(p * p.log()).sum(1).mean() + 1.5 * (mean * mean.log()).sum()
        return 2 * 0.4 * value

    def update(self, update):
        """Note the number of the update."""
        self.number = update
        return super().update(update)

    @torch.no_grad()
    def _learn_from_logits(self):
        super()._learn_from_logits()
        if self.quantizer is None:
            return
        latents, codes, seeds = (torch.cat([each[i] for each in self.noted]) for i in range(3))
        num, self.noted = codes.numel(), []
        keys = torch.stack([noise.uniform(seeds, 2**32 + i, codes.shape[1:]).double() for i in range(2)])
        order = (keys[0] + keys[1] / 2**24).flatten().argsort()
        latents, codes = latents.flatten(0, 1), codes.flatten()
        if self.section.kmeans_steps and self.number == 0:
            means = latents[order[:16]].double()
            for _ in range(self.section.kmeans_steps):
                far = torch.cdist(latents.double(), torch.nn.functional.normalize(means, dim=1))
                codes = far.argmin(1)
                means = torch.stack([latents[codes == k].double().mean(0) for k in range(16)])
            self.counts = torch.bincount(codes, minlength=16) * 16 / num
            self.quantizer.codebook.copy_(means)
            self.totals = self.counts[:, None] * self.quantizer.codebook
            return
        if self.section.ema is None:
            return
        for k in range(16):
            inside = latents[codes == k]
            self.counts[k] = 0.8 * self.counts[k] + 0.2 * len(inside) * 16 / num
            self.totals[k] = 0.8 * self.totals[k] + 0.2 * inside.sum(0) * 16 / num
        dead = sorted((float(count), k) for k, count in enumerate(self.counts) if count < 0.9)[:3]
        for (_, k), place in zip(dead, order, strict=False):
            self.counts[k], self.totals[k] = 1.0, latents[place]
        self.quantizer.codebook.copy_(self.totals / self.counts[:, None])

    def memory(self):
        """With the counts."""
        return super().memory(), None if self.quantizer is None else self.counts.clone()

    def go_back(self, state, memory):
        """The sums follow from the codes."""
        super().go_back(state, memory[0])
        if self.quantizer is not None:
            self.counts = memory[1].clone()
            self.totals = self.counts[:, None] * self.quantizer.codebook
