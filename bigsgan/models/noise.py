"""Random numbers that a layer draws on the device: functions of a sample's seed, never of the rank or of torch's state.

A sample travels with a seed; each use in a network has a stream of its own. The generator is SplitMix64 (Steele, Lea
and Flood 2014, "Fast splittable pseudorandom number generators"), whose i-th word is a function of i alone, so that a
whole feature map is drawn at once and a recomputation under activation checkpointing draws the same.

Shapes: N samples; int64 holds unsigned 64-bit words, as torch has no type of its own for arithmetic on them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def words(seeds: Tensor, stream: int, num: int) -> Tensor:
    """Random words: (N,) int64 -> (N, num) int64.

    Args:
        seeds: Of the samples.
        stream: Which use; different streams of one seed have nothing in common.
        num: Words for each sample.
    """
    return _sequence(_mix(seeds ^ _signed(_mix_int(stream))), num)


def words_of_streams(seeds: Tensor, streams: range, num: int) -> Tensor:
    """Random words of S consecutive streams, in hardly more operations than those of one.

    Args:
        seeds: (N,) int64, of the samples.
        streams: Which; S of them, one after the other.
        num: Words for each sample and stream.

    Returns:
        What ``words`` gives for each of them: (N, S, num) int64.
    """
    # On the device, as a copy of keys from the host would make it wait.
    numbers = torch.arange(len(streams), dtype=torch.int64, device=seeds.device)
    keys = _mix(numbers + _signed((streams.start + 0x9E3779B97F4A7C15) % 2**64))
    return _sequence(_mix(seeds[:, None] ^ keys), num)


def uniform(seeds: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Uniform numbers in the open interval (0, 1): float32 (N, *shape)."""
    return uniform_from(words(seeds, stream, math.prod(shape))).view(-1, *shape)


def normal(seeds: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers by the Box-Muller transform, two of each word: float32 (N, *shape)."""
    num = math.prod(shape)
    return normal_from(words(seeds, stream, -(-num // 2)))[:, :num].reshape(-1, *shape)


def uniform_from(drawn: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), one of each word: (...) int64 -> (...) float32."""
    return _unit(_shift(drawn, 41))


def normal_from(drawn: Tensor) -> Tensor:
    """Standard normal numbers, two of each word: (..., n) int64 -> (..., 2n) float32."""
    radius = torch.sqrt(-2 * torch.log(uniform_from(drawn)))
    angle = 2 * math.pi * _unit((drawn >> 1) & 0x7FFFFF)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)


def _unit(bits: Tensor) -> Tensor:
    """23 bits -> (0, 1): they and a half are the most that float32 tells apart."""
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def _sequence(begin: Tensor, num: int) -> Tensor:
    """The first words from a state on: (...) int64 -> (..., num)."""
    steps = torch.arange(1, num + 1, dtype=torch.int64, device=begin.device)
    return _mix(torch.add(begin[..., None], steps, alpha=_GOLDEN))


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix_int(number: int) -> int:
    """The same mixing of a Python integer."""
    mask = 2**64 - 1
    z = (number + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
