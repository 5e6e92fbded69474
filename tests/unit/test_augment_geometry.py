"""ADA's geometric transformations, each against its definition. Smooth images show where a pixel came from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from bigsgan.models.augment_draws import AugmentationDraws
from bigsgan.models.augment_geometry import SYM6, Geometry, draw_geometry, inverse_matrix, reflected, warp

LOWPASS = torch.tensor(SYM6, dtype=torch.float64) / sum(SYM6)


def geometry(**given: Any) -> Geometry:
    """One sample's strengths: none but the given ones."""
    neutral: dict[str, Any] = dict.fromkeys(("flip", "quarter_turns", "rotation_before", "rotation_after"), 0)
    neutral |= {"shift": (0, 0), "scale": 1, "stretch": 1, "translation": (0, 0)}
    return Geometry(**{name: torch.tensor([value], dtype=torch.float64) for name, value in (neutral | given).items()})


def transformed(images: Tensor, **given: Any) -> Tensor:
    return warp(images, inverse_matrix(geometry(**given), *images.shape[2:]), LOWPASS)


def wave(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A smooth function of pixels from the centre, without symmetries."""
    return 0.5 * np.sin(0.21 * x + 0.4) + 0.5 * np.cos(0.17 * y + 0.09 * x + 1.0)


def coordinates(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    y, x = np.mgrid[:height, :width]
    return x - (width - 1) / 2, y - (height - 1) / 2


def image(height: int, width: int) -> Tensor:
    return torch.from_numpy(wave(*coordinates(height, width)))[None, None]


def noise_image(height: int, width: int, channels: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(1, channels, height, width, dtype=torch.float64, generator=generator) * 2 - 1


@pytest.mark.parametrize("size", [(16, 16), (8, 24)])
def test_integer_translation_reflects_at_the_border(size):
    x = noise_image(*size)
    height, width = size
    right, down = round(0.125 * width), round(-0.1 * height)
    moved = transformed(x, shift=(0.125, -0.1))
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)), mode="reflect")
    expected = padded[:, :, 4 - down : 4 - down + height, 4 - right : 4 - right + width]
    assert (right, down) != (0, 0)
    assert_close(moved, torch.from_numpy(expected), rtol=0, atol=1e-9)


# The wavelet is orthogonal but not symmetric: what is mirrored comes back exactly only where it is smooth.
@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_flip_mirrors_left_and_right(size):
    assert_close(transformed(image(*size), flip=1), image(*size).flip(3), rtol=0, atol=0.03)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_quarter_turns_are_those_of_rot90(turns):
    assert_close(transformed(image(32, 32), quarter_turns=turns), image(32, 32).rot90(turns, (2, 3)), rtol=0, atol=0.03)


ANGLE = 0.7


@pytest.mark.parametrize(
    "given, source",
    [
        ({"scale": 1.3}, lambda x, y: (x / 1.3, y / 1.3)),
        ({"scale": 0.8}, lambda x, y: (x / 0.8, y / 0.8)),
        ({"stretch": 1.25}, lambda x, y: (x / 1.25, y * 1.25)),
        *(
            (
                {name: ANGLE},
                lambda x, y: (x * math.cos(ANGLE) - y * math.sin(ANGLE), x * math.sin(ANGLE) + y * math.cos(ANGLE)),
            )
            for name in ("rotation_before", "rotation_after")
        ),
        ({"translation": (0.033, -0.041)}, lambda x, y: (x - 0.033 * 40, y + 0.041 * 32)),
    ],
)
def test_general_transformations_read_where_their_inverse_points(given, source):
    height, width = 32, 40
    found = transformed(image(height, width), **given)[0, 0].numpy()
    x, y = source(*coordinates(height, width))
    inside = (abs(x) < width / 2 - 4) & (abs(y) < height / 2 - 4)
    assert inside.mean() > 0.3
    assert np.abs(found - wave(x, y))[inside].max() < 0.02
    assert np.abs(found - wave(*coordinates(height, width)))[inside].max() > 0.1


def test_the_inverse_matrix_undoes_all_in_order():
    given = {"flip": 1, "quarter_turns": 3, "shift": (0.1, -0.06), "scale": 1.4, "rotation_before": 0.3}
    given = geometry(**given, stretch=0.7, rotation_after=-1.1, translation=(0.2, 0.05))

    def rotation(angle: float) -> np.ndarray:  # of the picture, y pointing down
        c, s = math.cos(angle), math.sin(angle)
        return np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])

    def translation(x: float, y: float) -> np.ndarray:
        return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]])

    forward = np.diag([-1.0, 1, 1])
    for step in (
        *(rotation(3 * math.pi / 2), translation(3, -1), np.diag([1.4, 1.4, 1])),  # 0.1 * 30 and -0.06 * 20 = -1.2
        *(rotation(0.3), np.diag([0.7, 1 / 0.7, 1]), rotation(-1.1), translation(6, 1)),
    ):
        forward = step @ forward
    found = inverse_matrix(given, 20, 30)
    assert_close(found[0] @ torch.from_numpy(forward), torch.eye(3, dtype=torch.float64))


def test_reflection_has_no_end():
    x = torch.arange(4.0)[None, None, None]
    expected = [1, 2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0]
    assert reflected(x, 3, -5, 7).flatten().tolist() == expected
    assert torch.equal(
        reflected(noise_image(5, 6), 2, -4, 9), torch.nn.functional.pad(noise_image(5, 6), (0, 0, 4, 4), mode="reflect")
    )


def test_far_away_the_reflection_goes_on():
    x = noise_image(8, 8)
    assert_close(transformed(x, shift=(14 / 8, 28 / 8)), x, rtol=0, atol=1e-9)  # periods of 2 (8 - 1) pixels


def test_warping_is_differentiable_twice():
    strengths = {"flip": 1, "scale": 0.8, "rotation_before": 0.5, "stretch": 1.2, "translation": (0.2, -0.1)}
    inverse = inverse_matrix(geometry(**strengths), 4, 5)
    x = noise_image(4, 5, channels=2).requires_grad_()
    assert gradcheck(lambda x: warp(x, inverse, LOWPASS).square(), (x,))
    assert gradgradcheck(lambda x: warp(x, inverse, LOWPASS).square(), (x,), fast_mode=True)


def strengths_of(num: int, p: float) -> dict[str, np.ndarray]:
    names = ("flip", "quarter_turns", "shift", "scale", "rotation", "stretch", "translation")
    probabilities = {name: torch.tensor([p]) for name in names}
    drawn = draw_geometry(AugmentationDraws(torch.arange(num), torch.float32), probabilities)
    return {name: value.double().numpy() for name, value in drawn._asdict().items()}


def test_transformations_act_as_often_as_they_should():
    num, p = 20_000, 0.3
    s = strengths_of(num, p)
    acted = {
        "flip": (s["flip"] != 0, p / 2),  # half of the draws are to stay
        "quarter_turns": (s["quarter_turns"] != 0, p * 3 / 4),
        "shift": ((s["shift"] != 0).any(1), p),
        "scale": (s["scale"] != 1, p),
        "stretch": (s["stretch"] != 1, p),
        "rotation": ((s["rotation_before"] != 0) | (s["rotation_after"] != 0), p),
        "rotation_before": (s["rotation_before"] != 0, 1 - math.sqrt(1 - p)),
        "translation": ((s["translation"] != 0).any(1), p),
    }
    for name, (hits, expected) in acted.items():
        assert abs(hits.mean() - expected) < 5 * math.sqrt(0.25 / num), name
    # Streams of their own: one acts no more often where another does.
    hits = np.stack([hit for name, (hit, _) in acted.items() if name != "rotation_before"]).astype(float)
    assert np.abs(np.corrcoef(hits) - np.eye(len(hits))).max() < 5 / math.sqrt(num)


def test_strengths_are_distributed_as_published():
    num = 20_000
    s = strengths_of(num, 1.0)
    error = 5 / math.sqrt(num)
    assert set(s["flip"]) == {0, 1}
    assert set(s["quarter_turns"]) == {0, 1, 2, 3}
    assert abs(s["flip"].mean() - 0.5) < error
    assert abs(s["quarter_turns"].mean() - 1.5) < 2 * error
    assert 0.124 < np.abs(s["shift"]).max() <= 0.125
    for name, std in (("scale", 0.2), ("stretch", 0.2)):
        assert abs(np.log2(s[name]).mean()) < std * error
        assert abs(np.log2(s[name]).std() / std - 1) < error
    for name in ("rotation_before", "rotation_after"):
        assert 3.14 < np.abs(s[name]).max() <= math.pi
        assert abs(s[name].std() - math.pi / math.sqrt(3)) < 2 * error
    assert abs(s["translation"].std() / 0.125 - 1) < error
    assert abs(np.corrcoef(s["translation"].T)[0, 1]) < error
