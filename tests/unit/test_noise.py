"""Random numbers on the device: against SplitMix64's published words, and their distribution."""

from __future__ import annotations

import math

import pytest
import torch

from bigsgan.models import noise

# Of Vigna's splitmix64.c, seed 1234567.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def splitmix(state: int, num: int) -> list[int]:
    mask, found = 2**64 - 1, []
    for _ in range(num):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found.append(z ^ (z >> 31))
    return found


def unsigned(words: torch.Tensor) -> list[int]:
    return [word % 2**64 for word in words.tolist()]


def test_words_are_those_of_splitmix64():
    assert splitmix(1234567, 5) == PUBLISHED
    seed, stream = 2**62 + 12345, 7
    key = seed ^ splitmix(stream, 1)[0]
    z = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    drawn = noise._words(torch.tensor([seed]), range(stream, stream + 1), 100)
    assert unsigned(drawn[0, 0]) == splitmix(z ^ (z >> 31), 100)


def test_a_sample_draws_the_same_in_any_batch():
    seeds = torch.tensor([3, 5, 8])
    whole = noise.normal(seeds, 1, (2, 3))
    assert whole.shape == (3, 2, 3)
    assert torch.equal(noise.normal(seeds[1:2], 1, (2, 3)), whole[1:2])
    assert not torch.equal(noise.normal(seeds, 2, (2, 3)), whole)


@pytest.mark.parametrize("num", [2**18, 2**18 - 1])
def test_uniform_and_normal_numbers_are_distributed_so(num):
    seeds = torch.arange(4)
    uniform = noise.uniform(seeds, 0, (num,)).double()
    assert uniform.min() > 0
    assert uniform.max() < 1
    normal = noise.normal(seeds, 0, (num,)).double()
    assert uniform.shape == normal.shape == (4, num)
    for values, cdf in ((uniform, lambda x: x), (normal, lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2))))):
        for row in values:
            # Kolmogorov and Smirnov: exceeded once in 1e6 by numbers that are distributed so.
            steps = torch.arange(1, num + 1) / num
            assert (cdf(row.sort().values) - steps).abs().max() < 2.7 / math.sqrt(num)
    correlation = torch.corrcoef(normal) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(num)
    for lag in (1, num // 2):
        assert (normal[:, :-lag] * normal[:, lag:]).mean().abs() < 5 / math.sqrt(num)


@pytest.mark.parametrize("kind, streams", [("uniform", range(7, 8)), ("normal", range(7, 11))])
def test_compiled_code_draws_the_same_numbers(kind, streams):
    seeds = torch.tensor([3, -5, 2**40])
    compiled = torch.compile(noise.draw, backend="eager", dynamic=False, fullgraph=True)
    assert torch.equal(compiled(seeds, streams, 53, kind), noise.draw(seeds, streams, 53, kind))
