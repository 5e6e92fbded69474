"""ADA's transformations of colour and frequency, noise and cutout, each against its definition in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bigsgan.models.augment_draws import AugmentationDraws
from bigsgan.models.augment_pixels import (
    Colour,
    amplify,
    band_filters,
    colour_matrix,
    cut_out,
    draw_amplifications,
    draw_colour,
    draw_cutout,
    draw_noise,
    gains,
    recolour,
)

LUMA = np.ones(3) / math.sqrt(3)


def colour(**given: float) -> Colour:
    neutral: dict[str, float] = {"brightness": 0, "contrast": 1, "luma_flip": 0, "hue": 0, "saturation": 1}
    return Colour(**{name: torch.tensor([value], dtype=torch.float64) for name, value in (neutral | given).items()})


def image(channels: int = 3, size: int = 6, num: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(num, channels, size, size + 1, dtype=torch.float64, generator=generator) * 2 - 1


def recoloured(x: Tensor, **given: float) -> Tensor:
    return recolour(x, colour_matrix(colour(**given)))


def householder(pixels: np.ndarray) -> np.ndarray:
    """Reflection at the plane through 0 that is perpendicular to the luma axis."""
    return pixels - 2 * (pixels @ LUMA)[..., None] * LUMA


def rodrigues(pixels: np.ndarray, angle: float) -> np.ndarray:
    """Rotation about the luma axis."""
    along = (pixels @ LUMA)[..., None] * LUMA
    return math.cos(angle) * pixels + math.sin(angle) * np.cross(LUMA, pixels) + (1 - math.cos(angle)) * along


def saturated(pixels: np.ndarray, factor: float) -> np.ndarray:
    grey = pixels.mean(axis=-1, keepdims=True)
    return grey + factor * (pixels - grey)


DEFINITIONS: dict[str, tuple[float, Any]] = {
    "brightness": (-0.3, lambda c: c - 0.3),
    "contrast": (1.7, lambda c: c * 1.7),
    "luma_flip": (1, householder),
    "hue": (2.1, lambda c: rodrigues(c, 2.1)),
    "saturation": (0.4, lambda c: saturated(c, 0.4)),
}


def check_pixels(found: Tensor, x: Tensor, definition: Any) -> None:
    expected = definition(x.permute(0, 2, 3, 1).numpy())
    assert_close(found.permute(0, 2, 3, 1), torch.from_numpy(expected))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_colour_transformation_is_its_definition(name):
    strength, definition = DEFINITIONS[name]
    check_pixels(recoloured(image(), **{name: strength}), image(), definition)


def test_colour_transformations_act_one_after_the_other():
    def all_of_them(pixels: np.ndarray) -> np.ndarray:
        for _, definition in DEFINITIONS.values():
            pixels = definition(pixels)
        return pixels

    check_pixels(
        recoloured(image(), **{name: strength for name, (strength, _) in DEFINITIONS.items()}), image(), all_of_them
    )


def test_grey_images_take_the_mean_of_the_colours_that_they_would_have():
    x = image(channels=1)
    strengths = {"brightness": 0.2, "contrast": 0.6, "luma_flip": 1, "hue": 1.0, "saturation": 3.0}
    as_colour = recoloured(x.expand(-1, 3, -1, -1), **strengths)
    assert_close(recoloured(x, **strengths), as_colour.mean(dim=1, keepdim=True))
    assert_close(recoloured(x, **strengths), -0.6 * (x + 0.2))  # hue and saturation leave grey as it is


def one_probability(name: str, p: float) -> dict[str, Tensor]:
    return {each: torch.tensor([p if each == name else 0.0]) for each in DEFINITIONS}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_colour_transformations_act_as_often_and_as_strongly_as_published(name):
    num, p = 20_000, 0.3
    error = 5 / math.sqrt(num)
    draws = AugmentationDraws(torch.arange(num), torch.float64)
    neutral = colour()._asdict()
    drawn = draw_colour(draws, one_probability(name, p))._asdict()
    acted = (drawn[name] != neutral[name]).double().mean().item()
    assert abs(acted - (p / 2 if name == "luma_flip" else p)) < error
    assert all((value == neutral[each]).all() for each, value in drawn.items() if each != name)
    strength = draw_colour(draws, one_probability(name, 1.0))._asdict()[name]
    if name in ("contrast", "saturation"):
        strength = strength.log2()
    mean, std = {
        "brightness": (0, 0.2),
        "contrast": (0, 0.5),
        "luma_flip": (0.5, 0.5),
        "hue": (0, math.pi / math.sqrt(3)),
        "saturation": (0, 1),
    }[name]
    assert abs(strength.mean().item() - mean) < std * error
    assert abs(strength.std().item() / std - 1) < error


def octaves(frequency: np.ndarray) -> np.ndarray:
    """Responses of the four bands from Daubechies' polynomial for two vanishing moments."""

    def low(w: np.ndarray) -> np.ndarray:
        return np.cos(w / 2) ** 4 * (1 + 2 * np.sin(w / 2) ** 2)

    def high(w: np.ndarray) -> np.ndarray:
        return low(w + math.pi)

    w = frequency
    return np.stack(
        [low(w) * low(2 * w) * low(4 * w), low(w) * low(2 * w) * high(4 * w), low(w) * high(2 * w), high(w)]
    )


def test_band_filters_split_the_spectrum_in_octaves():
    bands = band_filters()
    assert bands.shape == (4, 43)
    assert_close(bands, bands[:, ::-1].copy())
    centered = np.roll(np.pad(bands, ((0, 0), (0, 64 - 43))), -21, axis=1)
    found = np.fft.fft(centered, axis=1)
    assert_close(found.real, octaves(2 * math.pi * np.fft.fftfreq(64)), rtol=0, atol=1e-10)
    assert np.abs(found.imag).max() < 1e-10
    assert_close(bands.sum(axis=0), np.eye(1, 43, 21)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("band", range(4))
def test_an_amplified_band_is_louder_and_the_expected_power_stays(band):
    amplification = np.ones(4)
    amplification[band] = 3.0
    power = np.array([10, 1, 1, 1]) / 13
    expected = amplification / math.sqrt((power * amplification**2).sum())
    gain = gains(torch.from_numpy(amplification)[None])
    assert_close(gain[0].numpy(), expected)
    impulse = torch.zeros(1, 1, 64, 64, dtype=torch.float64)
    impulse[0, 0, 32, 32] = 1
    response = np.abs(np.fft.fft2(amplify(impulse, gain, torch.from_numpy(band_filters()))[0, 0].numpy()))
    along = expected @ octaves(2 * math.pi * np.fft.fftfreq(64))
    assert_close(response, along[:, None] * along[None, :], rtol=0, atol=1e-9)


def test_bands_are_amplified_one_after_the_other():
    amplifications = np.array([0.5, 2.0, 3.0, 0.7])
    power = np.array([10, 1, 1, 1]) / 13
    expected = np.ones(4)
    for band, amplification in enumerate(amplifications):
        each = np.ones(4)
        each[band] = amplification
        expected *= each / math.sqrt((power * each**2).sum())
    assert_close(gains(torch.from_numpy(amplifications)[None])[0].numpy(), expected)


def test_filters_reflect_at_the_border_and_tell_samples_and_channels_apart():
    x = image(channels=2, size=24, num=2)
    gain = torch.tensor([[1.0, 2.0, 0.5, 3.0], [0.3, 1.0, 1.0, 2.0]], dtype=torch.float64)
    bands = torch.from_numpy(band_filters())
    found = amplify(x, gain, bands)
    for n in range(2):
        kernel = (gain[n] @ bands).numpy()
        for c in range(2):
            padded = np.pad(x[n, c].numpy(), 21, mode="reflect")
            rows = np.stack([np.convolve(row, kernel, mode="valid") for row in padded])
            columns = np.stack([np.convolve(column, kernel, mode="valid") for column in rows.T]).T
            assert_close(found[n, c], torch.from_numpy(columns))


def test_bands_are_drawn_as_published():
    num, p = 20_000, 0.3
    draws = AugmentationDraws(torch.arange(num), torch.float64)
    hits = (draw_amplifications(draws, torch.tensor([p])) != 1).double()
    strengths = draw_amplifications(draws, torch.tensor([1.0])).log2()
    error = 5 / math.sqrt(num)
    assert hits.shape == (num, 4)
    assert (hits.mean(dim=0) - p).abs().max() < error
    assert (torch.corrcoef(hits.T) - torch.eye(4)).abs().max() < error
    assert strengths.mean(dim=0).abs().max() < error
    assert (strengths.std(dim=0) - 1).abs().max() < error


def test_noise_has_one_strength_a_sample():
    num, p = 4_000, 0.3
    draws = AugmentationDraws(torch.arange(num), torch.float64)
    drawn = draw_noise(draws, torch.tensor([p]), (3, 8, 8))
    acted = drawn.flatten(1).any(dim=1).double().mean().item()
    assert abs(acted - p) < 5 * math.sqrt(0.25 / num)
    always = draw_noise(draws, torch.tensor([1.0]), (3, 8, 8)).flatten(1)
    sigma = always.std(dim=1)  # within 5 % of the drawn one
    assert abs(sigma.mean().item() / (0.1 * math.sqrt(2 / math.pi)) - 1) < 0.05
    assert abs(sigma.square().mean().sqrt().item() / 0.1 - 1) < 0.05
    normal = always / sigma[:, None]
    assert abs(normal.mean().item()) < 5 / math.sqrt(normal.numel())
    assert abs(normal.abs().mean().item() - math.sqrt(2 / math.pi)) < 0.01


def test_cutout_clears_the_pixels_whose_centres_it_covers():
    x = torch.ones(3, 2, 8, 16)
    sizes = torch.tensor([0.5, 0.5, 0.0])
    centers = torch.tensor([[0.5, 0.25], [0.03, 0.99], [0.5, 0.5]])
    expected = torch.ones(3, 2, 8, 16)
    expected[0, :, 0:4, 4:12] = 0
    expected[1, :, 6:8, 0:4] = 0  # over the border
    assert torch.equal(cut_out(x, sizes, centers), expected)


def test_cutout_is_drawn_as_published():
    num, p = 20_000, 0.3
    size, center = draw_cutout(AugmentationDraws(torch.arange(num), torch.float64), torch.tensor([p]))
    assert set(size.tolist()) == {0.0, 0.5}
    assert abs((size > 0).double().mean().item() - p) < 5 * math.sqrt(0.25 / num)
    assert (center.mean(dim=0) - 0.5).abs().max() < 5 / math.sqrt(12 * num)
    assert (center.std(dim=0) * math.sqrt(12) - 1).abs().max() < 5 / math.sqrt(num)
