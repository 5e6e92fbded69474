"""Widths and exponents, least squares of profiles, and which snapshots are taken."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq

from bigsgan.checkpoint import StateShard
from bigsgan.checkpoint.tags import remove_newer
from bigsgan.config.run_directory import write_recipe
from bigsgan.config.sections import LARGEST_WIDTH, SMALLEST_WIDTH
from bigsgan.errors import UserError
from bigsgan.inference.post_hoc import Profile, combine, reconstruct
from bigsgan.inference.trained import open_trained
from bigsgan.models.build import build_network
from bigsgan.training.build import _build_snapshots
from bigsgan.training.power import BEGUN, power_decay, power_exponent, power_kind
from bigsgan.training.state import Counters
from tests.single_process import Entry, save
from tests.tiny import tiny_recipe

CPU = torch.device("cpu")
WIDTHS = (0.05, 0.1)
T = 16


def deviation(gamma):
    """Standard deviation of the profile of t^gamma on [0, 1], by quadrature."""
    moments = [quad(lambda x, n=n: (gamma + 1) * x ** (gamma + n), 0, 1, epsabs=1e-13)[0] for n in (1, 2)]
    return (moments[1] - moments[0] ** 2) ** 0.5


@pytest.mark.parametrize("width", [0.02, 0.05, 0.1, 0.15, 0.25, LARGEST_WIDTH])
def test_exponents_belong_to_widths(width):
    assert power_exponent(width) == pytest.approx(brentq(lambda g: deviation(g) - width, 0, 1000), rel=1e-6)


def test_published_exponents():
    """Of the paper's section 3.1: 0.05 and 0.10 are 16.97 and 6.94."""
    assert [round(power_exponent(width), 2) for width in WIDTHS] == [16.97, 6.94]
    assert power_exponent(SMALLEST_WIDTH) == pytest.approx(1 / SMALLEST_WIDTH, rel=0.01)


def test_a_batch_may_change():
    """An update on two batches keeps what two updates keep that see the same weights."""
    for width in WIDTHS:
        assert power_decay(width, 8, 8) == 0
        assert power_decay(width, 32, 16) == pytest.approx(power_decay(width, 24, 8) * power_decay(width, 32, 8))


def on_a_grid(kept, wanted, num=20_000):
    """The same by profiles at many points: coefficients, and what is left of the profile relative to its norm."""
    points = (np.arange(num) + 0.5) / num * wanted.nimg

    def values(profile):
        gamma = brentq(lambda g: (g + 1) ** 0.5 / (g + 2) / (g + 3) ** 0.5 - profile.width, 0, 1e6, xtol=1e-12)
        inside = (gamma + 1) / profile.nimg * np.minimum(points / profile.nimg, 1) ** gamma
        return np.where(points <= profile.nimg, inside, 0)

    matrix, target = np.stack([values(each) for each in kept], axis=1), values(wanted)
    found = np.linalg.lstsq(matrix, target, rcond=None)[0]
    return found, np.linalg.norm(matrix @ found - target) / np.linalg.norm(target)


@pytest.mark.parametrize("width", [0.03, 0.07, 0.15, 0.25])
def test_coefficients_are_those_of_least_squares(width):
    kept = [Profile(nimg, w) for nimg in (100, 250, 400, 700, 1000) for w in WIDTHS]
    wanted = Profile(1000, width)
    coefficients, error = on_a_grid(kept, wanted)
    found, found_error = combine(kept, wanted)
    assert np.abs(found - coefficients).max() < 2e-3 * np.abs(coefficients).max()
    assert found_error == pytest.approx(error, rel=1e-2)


@pytest.mark.parametrize("num", [1, 20, 300])
def test_a_kept_width_is_taken_as_it_is(num):
    kept = [Profile(nimg, w) for nimg in range(1, num + 1) for w in WIDTHS]
    for i, width in enumerate(WIDTHS):
        expected = np.zeros(2 * num)
        expected[2 * num - 2 + i] = 1
        coefficients, error = combine(kept, Profile(num, width))
        assert np.abs(coefficients - expected).max() < 1e-6
        assert error < 1e-6


@pytest.fixture
def run(tmp_path):
    """A run directory with three snapshots of constant averages: of 0.05 the images seen, of 0.1 the double."""
    recipe = tiny_recipe(tmp_path)
    out = tmp_path / "run"
    write_recipe(recipe, out, {})
    for nimg in (T, 2 * T, 3 * T):
        add(out, recipe, nimg)
    return recipe, out


def add(out, recipe, nimg, begun=0, value=None):
    network = build_network(recipe, "generator")
    parts = [
        StateShard("buffer", name, 0, torch.full_like(buffer, nimg).flatten())
        for name, buffer in network.named_buffers()
    ]
    for i, width in enumerate(WIDTHS):
        for name, parameter in network.named_parameters():
            values = torch.full((parameter.numel(),), float((nimg if value is None else value) * (i + 1)))
            parts.append(StateShard(power_kind(width), name, 0, values))
    assert save(out / "ema_snapshots", nimg, {"average": Entry(parts, {BEGUN: begun})}, keep=99)


def test_weights_are_combined_by_the_coefficients(run):
    _, out = run
    for nimg, last in ((None, 3 * T), (2 * T, 2 * T)):
        trained = open_trained(out, "generator", False, nimg, CPU, 0.07)
        assert trained.nimg == last
        seen = range(T, last + 1, T)
        coefficients, _ = on_a_grid([Profile(t, w) for t in seen for w in WIDTHS], Profile(last, 0.07))
        expected = coefficients @ [t * (i + 1) for t in seen for i in range(2)]
        for parameter in trained.network.parameters():
            assert parameter.detach().numpy() == pytest.approx(expected, rel=1e-3)
        assert all((buffer == last).all() for buffer in trained.network.buffers())
    assert len(list(trained.network.buffers())) > 0


def test_snapshots_of_averages_that_began_elsewhere_are_left_out(run):
    recipe, out = run
    add(out, recipe, 4 * T, begun=3 * T, value=7.0)
    _, network = reconstruct(out, recipe, 0.05, None)
    assert next(network.parameters()).detach().numpy() == pytest.approx(7.0, rel=1e-6)


def test_damaged_snapshots_are_skipped(run, caplog):
    recipe, out = run
    path = out / "ema_snapshots" / f"{2 * T:012d}" / "rank00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        nimg, network = reconstruct(out, recipe, 0.1, None)
    assert nimg == 3 * T
    assert next(network.parameters()).detach().numpy() == pytest.approx(6 * T, rel=1e-6)
    assert f"skipping {path.parent}" in caplog.text
    with pytest.raises(UserError, match=r"--nimg: must be an intact EMA snapshot, got 32 "):
        reconstruct(out, recipe, 0.1, 2 * T)


def test_a_profile_that_is_far_off_is_told_of(run, caplog):
    recipe, out = run
    with caplog.at_level(logging.WARNING):
        reconstruct(out, recipe, 0.01, None)
    assert "3 snapshots approximate an EMA of width 0.01 badly: their profile is" in caplog.text


def test_a_future_that_is_not_to_be_is_removed(run):
    _, out = run
    directory = out / "ema_snapshots"
    (directory / f"{4 * T:012d}").mkdir()  # damaged ones too
    remove_newer(directory, 2 * T)
    assert sorted(path.name for path in directory.iterdir()) == [f"{T:012d}", f"{2 * T:012d}", "latest"]
    remove_newer(out / "nothing", 0)


def test_a_future_is_removed_by_a_run_without_the_averages_too(run):
    recipe, out = run
    assert recipe.ema.power is None
    assert _build_snapshots(recipe, out, None, {}, Counters(1, 1, T), None) is None
    assert sorted(path.name for path in (out / "ema_snapshots").glob("0*")) == [f"{T:012d}"]


def test_wrong_questions(run, tmp_path):
    recipe, out = run
    for width in (0, -1, 0.3, float("nan")):
        with pytest.raises(UserError, match=r"--ema-width: must be 0.001 to 0.288, got "):
            reconstruct(out, recipe, width, None)
    with pytest.raises(UserError, match=r"--nimg: must be an EMA snapshot with --ema-width, got 17; choose from 16, 3"):
        reconstruct(out, recipe, 0.05, T + 1)
    with pytest.raises(UserError, match=r"--run: '.*' has no EMA snapshots, which --ema-width needs; remove the opti"):
        reconstruct(tmp_path / "another", recipe, 0.05, None)
    for network, live in (("generator", True), ("discriminator", False)):
        with pytest.raises(UserError, match=r"--ema-width: "):
            open_trained(out, network, live, None, CPU, 0.05)
