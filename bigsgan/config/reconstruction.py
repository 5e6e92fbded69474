"""Sections of the recipe's ``objective`` that compare G's images with targets or latents, and latents with codes."""

from __future__ import annotations

from typing import Literal

from bigsgan.config.sections import NaturalFloat, PathText, PositiveFloat, PositiveInt, Section


class Huber(Section):
    """weight * E[x^2 / 2 where |x| < delta, else delta (|x| - delta / 2)], x the difference from the targets."""

    weight: PositiveFloat
    """Factor."""
    delta: PositiveFloat = 1.0
    """Difference above which it grows linearly."""


class PerceptualNetwork(Section):
    """The frozen network of a [perceptual distance](../how-to/image-games.md#perceptual-distance)."""

    path: PathText
    """State dict (.pth, .pt or .safetensors) of LPIPS with VGG-16, or of torchvision's VGG-16; or a program (.pt2, or
    of torch.jit.save)."""
    heads: PathText | None = None
    """State dict of LPIPS' linear heads, which torchvision's VGG-16 needs."""


class Perceptual(PerceptualNetwork):
    """weight * E[sum over layers of the mean squared distance of unit features] of G's images and the targets.

    LPIPS (Zhang et al. 2018, arXiv 1801.03924, equation 1), or a [perceptual
    distance](../how-to/image-games.md#perceptual-distance) like it.
    """

    weight: PositiveFloat = 1.0
    """Factor."""


class CodeEntropy(Section):
    """weight * (E[H(p)] - diversity * H(E[p])): each latent is sure of its code, and all codes are used alike.

    p is the softmax of ``generator.bottleneck.temperature`` (Yu et al. 2023, arXiv 2310.05737, section 3).
    """

    weight: PositiveFloat = 0.1
    """Factor."""
    diversity: NaturalFloat = 1.0
    """Weight of the second part."""


class Transport(Section):
    """weight * E[(x - z)^2], the squared distance of G's images to their latents (Lin et al. 2025, arXiv
    2511.22475)."""

    weight: PositiveFloat = 0.2
    """Factor."""
    final_weight: NaturalFloat | None = None
    """As for R1."""
    decay_nimg: PositiveInt | None = None
    """As for R1."""


class Flow(Section):
    """weight * E[((x - G((1 - t) x + t z, t)) / t)^2], the error of the velocity z - x.

    It is flow matching along straight lines (Lipman et al. 2023, arXiv 2210.02747; Liu et al. 2023, arXiv 2209.03003).
    """

    weight: PositiveFloat = 1.0
    """Factor."""
    times: Literal["uniform", "logit_normal"] = "uniform"
    """Distribution of t in (0, 1]; ``logit_normal`` is the logistic function of a standard normal number (Esser et al.
    2024, arXiv 2403.03206)."""


class DistributionMatching(Section):
    """weight * E[(x - stop(x - d))^2] / 2, where d = (fake score's estimate - teacher's) / mean |x - teacher's|.

    It is D's output ``matching`` (Yin et al. 2024, arXiv 2311.18828, equations 7 and 8; DMD2: arXiv 2405.14867).
    """

    weight: PositiveFloat = 1.0
    """Weight in G's loss."""
    denoising: PositiveFloat = 100.0
    """Weight in D's loss of the fake score's error, D's output ``denoising``."""


class Codebook(Section):
    """weight * (E[(code - latent)^2] + commitment * the same), whose first part moves codes and the second latents.

    Means are over all numbers of G's outputs ``encoded`` and ``quantized`` (van den Oord et al. 2017, arXiv 1711.00937,
    equation 3). Codes without a gradient have no first part.
    """

    weight: PositiveFloat = 1.0
    """Factor."""
    commitment: NaturalFloat = 0.25
    """Weight of the part that moves latents."""
    entropy: CodeEntropy | None = None
