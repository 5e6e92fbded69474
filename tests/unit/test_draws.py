"""Draws against Philox written out in integers, against exact distributions, and against being cut into slices."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest

from bigsgan.draws import Draws

MASK = 2**64 - 1
STREAM, COUNTERS = "latent", (3, 1)


def key_of(seed: int, stream: str, counters: tuple[int, ...]) -> tuple[int, int]:
    sequence = np.random.SeedSequence([seed, zlib.crc32(stream.encode()), *counters])
    low, high = sequence.generate_state(2, np.uint64).tolist()
    return low, high


def kolmogorov_smirnov(values: np.ndarray, distribution: np.ndarray) -> float:
    """sqrt(n) * the largest gap between the empirical and the true distribution function at the sorted values."""
    n = len(values)
    above, below = np.arange(1, n + 1) / n - distribution, distribution - np.arange(n) / n
    return math.sqrt(n) * max(above.max(), below.max())


def normal_distribution(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.vectorize(math.erf)(values / math.sqrt(2)))


KS_LIMIT = 1.95  # a true sample exceeds it once in 1000 times; the seeds here are fixed


def test_words_are_one_contiguous_read_of_numpys_philox():
    key = np.array(key_of(2**63 - 1, "order", ()), dtype=np.uint64)
    expected = np.random.Philox(key=key).random_raw(20 * 8).reshape(20, 8)[:, :6]
    assert np.array_equal(Draws(2**63 - 1).words("order", (), 0, 20, 6), expected)


def test_known_words():
    # Written down once: a run that resumes with a newer version must find the same latents.
    assert Draws(0).words("latent", (0,), 0, 1, 2).tolist() == [[14651690912521457561, 15398843823991346253]]


KINDS = {
    "words": lambda draws, first, num, width: draws.words(STREAM, COUNTERS, first, num, width),
    "uniform": lambda draws, first, num, width: draws.uniform(STREAM, COUNTERS, first, num, width),
    "normal": lambda draws, first, num, width: draws.normal(STREAM, COUNTERS, first, num, width),
    "truncated": lambda draws, first, num, width: draws.truncated_normal(STREAM, first, num, width, 0.3),
    "integers": lambda draws, first, num, width: draws.integers(STREAM, COUNTERS, first, num, 1000)[:, None],
}


@pytest.mark.parametrize("width", [1, 2, 5, 8, 120])
@pytest.mark.parametrize("kind", KINDS)
def test_every_slice_is_a_part_of_the_whole(kind, width):
    draws, num = Draws(11), 23
    whole = KINDS[kind](draws, 0, num, width)
    assert whole.shape == (num, 1 if kind == "integers" else width)
    assert len(np.unique(whole, axis=0)) > num - 3  # samples differ (1000 integers may meet)
    for first, size in [(0, 1), (22, 1), (1, 22), (7, 9), (10, 13)]:
        assert np.array_equal(KINDS[kind](draws, first, size, width), whole[first : first + size])


@pytest.mark.parametrize("width", [1, 3, 119])
def test_odd_widths_have_numbers_in_every_column(width):
    values = Draws(0).normal(STREAM, COUNTERS, 0, 4000, width)
    assert values.shape == (4000, width)
    assert values.dtype == np.float32
    assert np.abs(values.mean(axis=0)).max() < 5 / math.sqrt(4000)
    assert np.abs(values.std(axis=0) - 1).max() < 5 / math.sqrt(2 * 4000)
    correlation = np.corrcoef(values.T).reshape(width, width) - np.eye(width)
    assert np.abs(correlation).max() < 5.5 / math.sqrt(4000)  # 7021 pairs of columns


def test_seeds_streams_counters_and_samples_never_share_words():
    seen = [
        Draws(seed).words(stream, counters, 0, 50, 4).ravel()
        for seed in (0, 1, 2**32, 2**32 + 1)
        for stream in ("latent", "latent/label", "r1")
        for counters in ((0, 0), (0, 1), (1, 0), (1, 1), (2**31, 1))
    ]
    words = np.concatenate(seen)
    assert len(np.unique(words)) == len(words)


def test_uniform_follows_the_uniform_distribution():
    values = np.sort(Draws(1).uniform(STREAM, COUNTERS, 0, 10_000, 5).ravel())
    assert values.mean() == pytest.approx(1 / 2, abs=4 / math.sqrt(12 * 50_000))
    assert values.var() == pytest.approx(1 / 12, abs=4 / math.sqrt(180 * 50_000))
    assert kolmogorov_smirnov(values, values) < KS_LIMIT


class _FixedWords(Draws):
    def words(self, stream, counters, first, num, width):
        return np.full((num, width), {"ones": MASK, "zeros": 0}[stream], dtype=np.uint64)


def test_uniform_never_reaches_its_ends():
    # ln(0) would make an infinite latent.
    assert 1 - 1e-15 < _FixedWords(0).uniform("ones", (), 0, 1, 1)[0, 0] < 1
    assert 0 < _FixedWords(0).uniform("zeros", (), 0, 1, 1)[0, 0] < 1e-15
    extreme = np.concatenate([_FixedWords(0).normal(s, (), 0, 1, 2) for s in ("ones", "zeros")])
    assert np.isfinite(extreme).all()
    assert 8 < np.abs(extreme).max() < 9  # sqrt(2 ln 2**53) = 8.57


def test_normal_follows_the_normal_distribution():
    values = np.sort(Draws(2).normal(STREAM, COUNTERS, 0, 10_000, 5).ravel().astype(np.float64))
    n = len(values)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):  # spread: the variance of x**power
        assert (values**power).mean() == pytest.approx(moment, abs=4 * math.sqrt(spread / n))
    assert kolmogorov_smirnov(values, normal_distribution(values)) < KS_LIMIT


def test_integers_are_uniform():
    values = Draws(3).integers(STREAM, COUNTERS, 0, 50_000, 10)
    assert values.dtype == np.int64
    counts = np.bincount(values, minlength=10)
    assert len(counts) == 10
    # Chi-square with 9 degrees of freedom exceeds 27.9 once in 1000 times.
    assert (((counts - 5000) ** 2) / 5000).sum() < 27.9
    assert Draws(3).integers(STREAM, COUNTERS, 0, 5, 1).tolist() == [0] * 5
    big = Draws(3).integers(STREAM, COUNTERS, 0, 20_000, 1_000_000)
    assert 0 <= big.min() < 500
    assert 999_500 < big.max() < 1_000_000
    assert big.mean() == pytest.approx(5e5, abs=4 * 1e6 / math.sqrt(12 * 20_000))


def test_a_permutation_holds_every_index_once():
    draws = Draws(4)
    order = draws.permutation("order", (0,), 1797)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(1797))
    assert np.array_equal(order, draws.permutation("order", (0,), 1797))
    # Two random orders agree in about one place.
    for other in (draws.permutation("order", (1,), 1797), Draws(5).permutation("order", (0,), 1797), np.arange(1797)):
        assert (order == other).sum() < 10


def test_permutations_of_three_are_equally_likely():
    draws = Draws(6)
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(1200):
        order = tuple(draws.permutation("order", (epoch,), 3).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 20.5  # 5 degrees of freedom, once in 1000


@pytest.mark.parametrize("threshold", [0.1, 0.8, 2.0])
def test_truncated_normal_is_the_normal_inside_the_threshold(threshold):
    values = Draws(8).truncated_normal(STREAM, 0, 4000, 5, threshold)
    assert values.dtype == np.float32
    assert np.abs(values).max() <= np.float32(threshold)
    ordered = np.sort(values.ravel().astype(np.float64))
    low, high = normal_distribution(np.array([-threshold, threshold]))
    assert kolmogorov_smirnov(ordered, (normal_distribution(ordered) - low) / (high - low)) < KS_LIMIT


def test_truncation_keeps_what_is_inside_already():
    plain = Draws(8).normal(STREAM, (0,), 0, 500, 5)
    cut = Draws(8).truncated_normal(STREAM, 0, 500, 5, 1.0)
    inside = np.abs(plain) <= 1
    assert 0.6 < inside.mean() < 0.75
    assert np.array_equal(cut[inside], plain[inside])
    assert np.array_equal(Draws(8).truncated_normal(STREAM, 0, 500, 5, 50.0), plain)
