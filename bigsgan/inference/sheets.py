"""The images of `bigsgan sample`: grids, truncation sweeps, interpolations, style mixing, translated pairs.

Shapes: n images (n, C, H, W) in [-1, 1] on the host, Z numbers in a latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.data import build_dataset, readable_samples
from bigsgan.data.codecs import build_codec
from bigsgan.data.conditions import Conditions
from bigsgan.draws import Draws
from bigsgan.engines import MicroBatch
from bigsgan.errors import UserError
from bigsgan.inference.mappings import set_psi
from bigsgan.inference.trained import TrainedNetwork
from bigsgan.models import layers, plain
from bigsgan.models.network import LayerStack
from bigsgan.models.stylegan2 import Mapping
from bigsgan.models.stylegan2_layers import SynthesisLayer
from bigsgan.training.sampling import generator_inputs, sample, stand_statistics, standing_batches, translation_grid

_TABLES = (layers.Embedding, plain.Embedding)


class Sheet(NamedTuple):
    """Images (n, C, H, W) to show, row by row, in ``columns`` columns."""

    images: Tensor
    columns: int


class Sampler:
    """Makes sheets from a generator of images from latents."""

    def __init__(
        self, trained: TrainedNetwork, seed: int, batch: int, conditions: Conditions, standing: bool = True
    ) -> None:
        """Take a generator, to compute ``batch`` images at a time; ``seed`` is for the latents.

        ``standing`` gives batch norm standing statistics, over ``conditions``; otherwise it uses its own.
        """
        self.conditions = conditions
        self._trained, self._recipe, self._draws = trained, trained.recipe, Draws(seed)
        self._batch, self._standing = batch, standing

    def prepare(self, truncation: float | None) -> None:
        """Give batch norm standing statistics, and a mapping network its truncation psi.

        Standing statistics come from latents drawn like the samples' (Brock et al. 2019, section 4.1).
        """
        set_psi(self._trained.network, truncation)
        if not self._standing:
            return
        threshold, device = self._threshold(truncation), self._trained.device
        batches = standing_batches(self._recipe, self.conditions, threshold, self._batch, device)
        stand_statistics(self._trained.network, self._trained.infer, batches)

    def inputs(self, first: int, labels: Tensor, truncation: float | None) -> MicroBatch:
        """Inputs of the samples from number ``first`` on, one for each label."""
        threshold, device = self._threshold(truncation), self._trained.device
        return generator_inputs(self._recipe, self._draws, "sample", first, labels, threshold, device)

    def images(self, inputs: MicroBatch) -> Tensor:
        """Make images from inputs."""
        network = self._trained.network
        statistics = self._recipe.sample_statistics if self._standing else "running"
        return sample(network, self._trained.show, inputs, self._batch, statistics)

    def grid(self, num: int, columns: Tensor, truncation: float | None) -> Sheet:
        """Make ``num`` images, with a column for each label of ``columns``, (columns,) or (columns, K)."""
        self.prepare(truncation)
        batches = torch.arange(num).split(self._batch)  # tokens of all samples may not fit into memory
        inputs = (self.inputs(int(each[0]), columns[each % len(columns)], truncation) for each in batches)
        return Sheet(torch.cat(list(map(self.images, inputs))), len(columns))

    def sweep(self, columns: Tensor, truncations: Sequence[float]) -> Sheet:
        """Make the same samples with each truncation, one row for each."""
        rows = [self.grid(len(columns), columns, truncation).images for truncation in truncations]
        return Sheet(torch.cat(rows), len(columns))

    def interpolation(self, columns: Tensor, steps: int, truncation: float | None, morph: bool) -> Sheet:
        """Make rows of ``steps`` images, each from one sample to the next, along great circles of the latents.

        Args:
            columns: Label of each row's first sample; the last row ends at the first row's.
            steps: Images in a row.
            truncation: Truncation of the latents.
            morph: Also interpolate between the labels' embeddings; otherwise a row keeps its first label.
        """
        self.prepare(truncation)
        latents, labels, *rest = self.inputs(0, columns, truncation)
        by_table = morph and labels.dim() == 1
        if by_table and not any(isinstance(module, _TABLES) for module in self._trained.network.modules()):
            family = self._recipe.generator.family
            raise UserError("--morph", None, f"is not supported by generators of family {family}", "remove the option")
        rows = []
        for i in range(len(columns)):
            j = (i + 1) % len(columns)
            for step in range(steps):
                share = step / steps
                z = slerp(latents[i], latents[j], share)[None]
                label, seeds = labels[i : i + 1], [entry[i : i + 1] for entry in rest]
                if morph and not by_table:
                    label = label.lerp(labels[j : j + 1], share)
                with self._between(int(labels[i]), int(labels[j]), share) if by_table else nullcontext():
                    rows.append(self.images((z, label, *seeds)))
        return Sheet(torch.cat(rows), steps)

    def mixed_styles(self, columns: Tensor, rows: int, crossover: int, truncation: float | None) -> Sheet:
        """Make images with coarse styles by row and fine styles by column (Karras et al. 2019, figure 3).

        The first row and column show the samples themselves; the corner is black. ``columns`` are labels, and
        ``crossover`` is the number of styles that count as coarse.
        """
        if not self._mappings():
            raise UserError("--mix", None, "needs a generator with styles", "remove the option")
        num_styles = self._mappings()[0].num_ws
        if crossover >= num_styles:
            problem = f"must be less than {num_styles}, the number of styles"
            raise UserError("--mix", crossover, problem, f"give 1 to {num_styles - 1}")
        self.prepare(truncation)
        network = self._trained.network
        labels = torch.cat([columns[:1]] * rows + [columns])
        network.eval()
        with torch.no_grad():
            latents, all_labels, seeds = self.inputs(0, labels, None)
            styles, _ = network.part(0, 1).fold(latents, all_labels, seeds)
            infer, codec = network.part(1, len(network.layers)), build_codec(self._recipe.data, self._trained.device)

            def synthesis(*inputs: Tensor) -> Tensor:
                pieces = zip(*(tensor.split(self._batch) for tensor in inputs), strict=True)
                return torch.cat([codec.decode(infer(*piece)).cpu() for piece in pieces])

            coarse, fine = styles[:rows], styles[rows:]
            fines = synthesis(fine, seeds[rows:])
            sheet = [torch.cat([torch.full_like(fines[:1], -1), fines])]
            for i in range(rows):
                mixed = torch.cat([coarse[i].expand_as(fine)[:, :crossover], fine[:, crossover:]], dim=1)
                own = synthesis(coarse[i : i + 1], seeds[i : i + 1])
                sheet.append(torch.cat([own, synthesis(mixed, seeds[i].expand(len(fine)))]))
        return Sheet(torch.cat(sheet), len(columns) + 1)

    def _mappings(self) -> list[Mapping]:
        return [module for module in self._trained.network.modules() if isinstance(module, Mapping)]

    def _threshold(self, truncation: float | None) -> float | None:
        """Threshold of the latents; None if truncation moves w towards a mean instead."""
        return None if self._recipe.generator.truncates_w else truncation

    @contextmanager
    def _between(self, label: int, other: int, share: float) -> Iterator[None]:
        """Replace a class's embeddings by ones between two classes' inside the block."""
        tables = [module.weight for module in self._trained.network.modules() if isinstance(module, _TABLES)]
        kept = [table[label].clone() for table in tables]
        with torch.no_grad():
            for table in tables:
                table[label].lerp_(table[other], share)
        try:
            yield
        finally:
            with torch.no_grad():
                for table, row in zip(tables, kept, strict=True):
                    table[label].copy_(row)


def set_styles(network: LayerStack, noise: str | None, cutoff: int | None) -> None:
    """Choose the noise of a generator with styles, and to how many of the first styles psi applies.

    Raises:
        UserError: The generator has fewer styles than ``cutoff``.
    """
    for module in network.modules():
        if isinstance(module, SynthesisLayer) and noise is not None:
            module.noise_mode = noise
        if isinstance(module, Mapping) and cutoff is not None:
            if not 1 <= cutoff <= module.num_ws:
                problem = f"must be 1 to {module.num_ws}, the number of styles"
                raise UserError("--truncation-cutoff", cutoff, problem, "give a number in this range")
            module.truncation_cutoff = cutoff


def slerp(a: Tensor, b: Tensor, share: float) -> Tensor:
    """The point ``share`` of the way from a to b (Z,): along a great circle (Shoemake 1985), the norm in proportion."""
    norms = a.norm(), b.norm()
    u, v = a / norms[0], b / norms[1]
    angle = torch.arccos(torch.dot(u, v).clamp(-1, 1))
    if torch.sin(angle) < 1e-4:  # nearly parallel vectors define no great circle
        return torch.lerp(a, b, share)
    between = (torch.sin((1 - share) * angle) * u + torch.sin(share * angle) * v) / torch.sin(angle)
    return between * torch.lerp(*norms, share)


def translated_pairs(trained: TrainedNetwork, num: int, batch: int) -> Sheet:
    """Show inputs of the run's data, their translations and maybe their targets side by side."""
    data = trained.recipe.data
    samples = readable_samples(build_dataset(data), data, num)
    grid = translation_grid(trained.recipe, *samples, trained.device)
    infer = grid.makes(trained.recipe, trained.infer)
    images = sample(trained.network, infer, grid.inputs, batch, trained.recipe.sample_statistics)
    return Sheet(grid.frame(images), grid.columns)
