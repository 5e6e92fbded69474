"""Games between images, with networks from outside the package, and what their terms are in plain torch."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from bigsgan.doctor.reference import Reference
from bigsgan.models import noise

NAMES = ("autoencoder", "judge", "divergence", "Spread", "painter", "by_class", "Translator", "ConditionalJudge")
"""What recipes name of this module."""


class Encoder(nn.Module):
    """Images -> latents, drawn from the sample's seed, and the code that they are drawn with."""

    def __init__(self, channels, width):
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.first, self.second = nn.Conv2d(channels, width, 4, 2, 1), nn.Conv2d(width, 4, 4, 2, 1)

    def forward(self, images, labels, seeds):
        """(N, C, R, R), (N,), (N,) -> (N, 2, R / 4, R / 4), (N, 4, R / 4, R / 4), (N,) integers."""
        h = F.silu(self.first(images)) * self.embedding(labels)[:, :, None, None]
        code = self.second(h)
        mean, log_variance = code.chunk(2, dim=1)
        drawn = noise.normal(seeds, 0, tuple(mean.shape[1:])).to(mean.dtype)
        return mean + (0.5 * log_variance).exp() * drawn, code, labels


class Decoder(nn.Module):
    """Latents -> images; the rest of the carry follows them."""

    def __init__(self, channels, width):
        super().__init__()
        self.first, self.second = nn.ConvTranspose2d(2, width, 4, 2, 1), nn.ConvTranspose2d(width, channels, 4, 2, 1)

    def forward(self, latents, code, labels):
        """(N, 2, R / 4, R / 4), ... -> (N, C, R, R), ...."""
        return torch.tanh(self.second(F.silu(self.first(latents)))), code, labels


def autoencoder(image_channels, width: int = 4):
    """Two layers."""
    return [partial(Encoder, image_channels, width), partial(Decoder, image_channels, width)]


class First(nn.Module):
    """Images -> features."""

    def __init__(self, channels, width):
        super().__init__()
        self.convolution = nn.Conv2d(channels, width, 4, 2, 1)

    def forward(self, images, labels):
        """(N, C, R, R), (N,) -> (N, width, R / 2, R / 2)."""
        return F.silu(self.convolution(images))


def judge(image_channels, width: int = 4):
    """Images -> a logit for each patch, by two layers."""
    return [partial(First, image_channels, width), partial(nn.Conv2d, width, 1, 4, 2, 1)]


def divergence(code, classes, images, input_images):
    """Of the latents' distribution from a standard normal one, weighted by the class and by the distance of images."""
    mean, log_variance = code.flatten(1).chunk(2, dim=1)
    each = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
    return (each * (1 + classes) * (1 + (images - input_images).square().mean((1, 2, 3)))).mean()


class Spread:
    """Minus the deviation of the codes over the batch: a function of means."""

    def means(self, code):
        """Of the codes and of their squares."""
        return torch.stack([code.mean(0), code.square().mean(0)])

    def __call__(self, means):
        """The value, a scalar."""
        first, second = means
        return -(second - first.square() + 1e-3).sqrt().mean()


class AutoencoderReference(Reference):
    """The reference of ``AUTOENCODER``."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.output_terms = self.terms

    def terms(self, update, images, targets, labels):
        """The sum of the terms of G's outputs."""
        code, _ = self.outputs
        mu, log_variance = code.flatten(1).chunk(2, dim=1)
        each = -0.5 * (1 + log_variance - mu**2 - torch.exp(log_variance)).sum(1)
        near = 1 + ((images - targets) ** 2).flatten(1).mean(1)
        loss = 0.01 * torch.mean(each * (labels + 1) * near)
        if self.recipe.objective.d_steps == 2:  # of LAZY
            loss = loss * (0 if update % 2 else 2)
        if update % 2 == 0:
            loss = loss - 2 * 0.3 * (code.var(0, unbiased=False) + 1e-3).sqrt().mean()
        return loss


AUTOENCODER = [
    "data.num_classes=0",
    'generator={family: "tests.image_games:autoencoder", reads: images, seeds: true, outputs: [code, classes]}',
    'discriminator={family: "tests.image_games:judge"}',
    "objective={l1: 3, reuse_fakes: true, terms: [{use: 'tests.image_games:divergence', weight: 0.01},"
    " {use: 'tests.image_games:Spread', weight: 0.3, every: 2}]}",
]
"""Overrides of the tiny recipe."""


LAZY = [
    *AUTOENCODER[:3],
    "objective={l1: 3, reuse_fakes: true, d_steps: 2,"
    " terms: [{use: 'tests.image_games:divergence', weight: 0.01, every: 2},"
    " {use: 'tests.image_games:Spread', weight: 0.3, every: 2}]}",
]
"""The same with several steps of D, and in every second update no term of outputs."""


class Drawn(nn.Module):
    """Latents and classes -> features."""

    def __init__(self, latent_size, num_classes, width):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(num_classes, latent_size), nn.Linear(latent_size, width)

    def forward(self, latents, labels):
        """(N, Z), (N,) -> (N, width), (N,)."""
        return F.silu(self.linear(latents + self.embedding(labels))), labels


class Painted(nn.Module):
    """Features -> images; the features and the classes follow them."""

    def __init__(self, width, channels, side):
        super().__init__()
        self.linear, self.shape = nn.Linear(width, channels * side**2), (channels, side, side)

    def forward(self, features, labels):
        """(N, width), (N,) -> (N, C, R, R), (N, width), (N,)."""
        return torch.tanh(self.linear(features)).unflatten(1, self.shape), features, labels


def painter(latent_size, num_classes, image_channels, resolution, width: int = 6):
    """Two layers."""
    return [partial(Drawn, latent_size, num_classes, width), partial(Painted, width, image_channels, resolution)]


def by_class(hidden, classes, labels):
    """The mean square of the features, weighted by the class, which is an output too."""
    return (hidden.square().mean(dim=1) * (1 + labels) * (2 + classes)).mean()


class PainterReference(AutoencoderReference):
    """The reference of ``PAINTER``."""

    def terms(self, update, images, targets, labels):
        """The term of G's outputs."""
        features, _ = self.outputs
        return 0.2 * sum((x**2).mean() * (1 + y) * (2 + y) for x, y in zip(features, labels, strict=True)) / len(labels)


PAINTER = [
    'generator={family: "tests.image_games:painter", latent_size: 5, outputs: [hidden, classes]}',
    'discriminator={family: "tests.image_games:judge"}',
    "objective={reuse_fakes: true, fake_labels: data, terms: [{use: 'tests.image_games:by_class', weight: 0.2}]}",
]
"""Overrides of the tiny recipe, whose data have ten classes."""


class Translator(nn.Module):
    """Input images -> images."""

    def __init__(self, image_channels, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, image_channels, 1))

    def forward(self, input_images, labels):
        """(N, 3, R, R), (N,) -> (N, C, R, R)."""
        return torch.tanh(self.layers(input_images))


class ConditionalJudge(nn.Module):
    """Images and input images -> a logit for each patch."""

    def __init__(self, image_channels, width: int = 4):
        super().__init__()
        self.first, self.last = (make() for make in judge(image_channels + 3, width))

    def forward(self, images, labels, input_images):
        """(N, C, R, R), (N,), (N, 3, R, R) -> (N, 1, R / 4, R / 4)."""
        return self.last(self.first(torch.cat([images, input_images], dim=1), labels))


PAIRS = [
    "data={kind: synthetic_pairs, resolution: 16, num_images: 64, num_classes: 0, image_channels: 3}",
    'generator={family: "tests.image_games:Translator"}',
    'discriminator={family: "tests.image_games:ConditionalJudge"}',
    "objective={l1: 3, reuse_fakes: true, r1: {weight: 0.1, every: 2}}",
]
"""Overrides of the tiny recipe."""


WEIGHTS = {
    "ADAPTIVE": "adversarial: {weight: 0.7, adaptive: {parameter: 1.module.second.weight}}",
    "STARTS": "discriminator_from_nimg: 8, adversarial: {from_nimg: 8, ramp_nimg: 16,"
    " adaptive: {parameter: layers.1.module.first.weight, largest: 0.9}}",
    "BY_PART": "adversarial: {adaptive: {parameter: 1.module.second.weight, over: micro_batch}}",
    "FIXED": "adversarial: {weight: 0.3, from_nimg: 8}",
}
ADAPTIVE, STARTS, BY_PART, FIXED = (
    [*AUTOENCODER[:3], f"{AUTOENCODER[3].removesuffix('}')}, {weight}}}"] for weight in WEIGHTS.values()
)
"""The autoencoder with weights of the adversarial loss: adaptive; with another parameter, a limit, and parts that begin
later; as public trainers have it; and fixed."""
