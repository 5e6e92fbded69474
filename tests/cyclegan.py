"""CycleGAN between two folders, and the step of the public code in plain torch.

Zhu, Park, Isola and Efros 2017, arXiv 1703.10593; junyanz/pytorch-CycleGAN-and-pix2pix, ``optimize_parameters``.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from bigsgan.doctor.reference import Reference


def game(first: Path, second: Path, **more: object) -> list[str]:
    """Overrides of the tiny recipe."""
    return [
        f"data={{kind: unpaired_folders, input_root: {first}, root: {second}, resolution: 32, image_channels: 3,"
        " num_classes: 0, num_workers: 0, horizontal_flip: true}",
        "generator={family: cyclegan, channels: 2, num_blocks: 1}",
        "discriminator={family: cyclegan, channels: 2}",
        "objective={loss: least_squares, adversarial: {weight: 2}, cycle: 10, identity: 5, pool: 2, reuse_fakes: true,"
        " schedule: generator_first}",
        *(f"{key}={value}" for key, value in more.items()),
    ]


def judge(layers: list, of: str, images: torch.Tensor) -> torch.Tensor:
    """The logits of one of two discriminators whose layers stand side by side."""
    carry = images, None
    for layer in layers:
        carry = getattr(layer, of)(*carry)
    return carry[0]


class PublicStep(Reference):
    """Four networks and two optimizers, which are stepped as the public code does, at any batch size."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        (g,), d = self.g.layers.values(), [*self.d.layers.values()]
        self.to_second, self.to_first = g.to_b, g.to_a
        self.of_first, self.of_second = (partial(judge, d, of) for of in ("of_a", "of_b"))
        self.pools = [[[], []] for _ in range(self.recipe.batch)]  # by sample: of the first domain, and of the second

    def query(self, sample, domain, image, drawn):
        """``ImagePool.query`` with given random numbers in (0, 1]: whether to exchange, and with which image."""
        pool = self.pools[sample][domain]
        if len(pool) < self.recipe.objective.pool:
            pool.append(image)
            return image
        if drawn[0] <= 0.5:
            return image
        number = int(torch.ceil(drawn[1] * len(pool))) - 1
        old, pool[number] = pool[number], image
        return old

    def optimize_parameters(self, update, micro_batches):
        """One step of G, and one of D on what the pools give; gradients are means over micro-batches."""
        made, num = [], len(micro_batches)
        for images, _ in micro_batches:
            real_a, real_b = images.chunk(2, dim=1)
            fake_b, fake_a = self.to_second(real_a), self.to_first(real_b)
            rec_a, rec_b = self.to_first(fake_b), self.to_second(fake_a)
            idt_a, idt_b = self.to_second(real_b), self.to_first(real_a)
            loss = F.mse_loss(judged := self.of_second(fake_b), torch.ones_like(judged))
            loss = loss + F.mse_loss(judged := self.of_first(fake_a), torch.ones_like(judged))
            loss = loss + 10 * F.l1_loss(rec_a, real_a) + 10 * F.l1_loss(rec_b, real_b)
            loss = loss + 5 * F.l1_loss(idt_a, real_b) + 5 * F.l1_loss(idt_b, real_a)
            (loss / num).backward()
            made.append((fake_a.detach(), fake_b.detach()))
        self.opt_d.zero_grad()
        self.opt_g.step()
        self.opt_g.zero_grad()
        for j, (images, _) in enumerate(micro_batches):
            samples = self.parts["discriminator"].positions(j)
            drawn = self.draws.uniform("pool", (update, 0), samples, (2,))
            for domain, network in enumerate((self.of_first, self.of_second)):
                real = images.chunk(2, dim=1)[domain]
                shown = [self.query(s, domain, x, u) for s, x, u in zip(samples, made[j][domain], drawn, strict=True)]
                on_real, on_fake = network(real), network(torch.stack(shown))
                loss = F.mse_loss(on_real, torch.ones_like(on_real)) + F.mse_loss(on_fake, torch.zeros_like(on_fake))
                (0.5 * loss / num).backward()
        self.opt_d.step()
        self.opt_d.zero_grad()

    def _begin_with_generator(self, update):
        self.optimize_parameters(update, self._read(update, 0))

    def _learn_from_logits(self):
        """Nothing of the game learns from them."""

    def memory(self):
        return super().memory(), copy.deepcopy(self.pools)

    def go_back(self, state, memory):
        own, pools = memory
        super().go_back(state, own)
        self.pools = copy.deepcopy(pools)
