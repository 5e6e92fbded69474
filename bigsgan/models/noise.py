"""Random numbers that a layer draws on the device: functions of a sample's seed, never of the rank or of torch's state.

A sample travels with a seed; each use in a network has its own stream. The generator is SplitMix64 (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators"), whose i-th word only depends on i. So a whole feature map
is drawn at once, and a recomputation under activation checkpointing draws the same numbers. On a GPU that is one kernel
if Triton works, and some forty of torch's otherwise.

Shapes: N samples, S streams; int64 holds unsigned 64-bit words, for which torch has no arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bigsgan.models import fused


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def uniform(seeds: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Return uniform numbers in the open interval (0, 1): float32 (N, *shape)."""
    return draw(seeds, range(stream, stream + 1), math.prod(shape), "uniform").view(-1, *shape)


def normal(seeds: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers by the Box-Muller transform, two from each word: float32 (N, *shape)."""
    return draw(seeds, range(stream, stream + 1), math.prod(shape), "normal").reshape(-1, *shape)


def draw(seeds: Tensor, streams: range, num: int, kind: str) -> Tensor:
    """Draw from consecutive streams, in hardly more operations than from one: (N,) int64 -> (N, S, num) float32.

    ``kind`` is ``uniform`` or ``normal``; a stream's numbers are those of the function of that name.
    """
    # While torch compiles, it joins these operations itself.
    if not torch.compiler.is_compiling() and fused.used_for(seeds, fused.DRAWS):
        return fused.kernels("noise").draw(seeds, streams, num, kind)
    if kind == "uniform":
        return _unit(_shift(_words(seeds, streams, num), 41))
    drawn = _words(seeds, streams, -(-num // 2))
    radius = torch.sqrt(-2 * torch.log(_unit(_shift(drawn, 41))))
    angle = 2 * math.pi * _unit((drawn >> 1) & 0x7FFFFF)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)[..., :num]


def _words(seeds: Tensor, streams: range, num: int) -> Tensor:
    """(N,) -> (N, S, num)."""
    keys = _mix(_numbers(seeds, 0, len(streams)) + _signed((streams.start + 0x9E3779B97F4A7C15) % 2**64))
    begin = _mix(seeds[:, None] ^ keys)
    return _mix(torch.add(begin[..., None], _numbers(seeds, 1, num + 1), alpha=_GOLDEN))


def _numbers(seeds: Tensor, start: int, end: int) -> Tensor:
    """Return start .. end - 1 in int64, made on the seeds' device, as a copy from the host would wait."""
    if torch.compiler.is_dynamo_compiling():  # exports see an ordinary arange
        numbers: Tensor = _opaque_arange(seeds, start, end)
        return numbers
    return torch.arange(start, end, dtype=torch.int64, device=seeds.device)


@torch.library.custom_op("bigsgan::arange", mutates_args=())
def _opaque_arange(seeds: Tensor, start: int, end: int) -> Tensor:
    """Count, hidden from torch's compiler.

    For a GPU it writes arithmetic on the numbers of an arange as arithmetic on 32-bit indices (2.11 to 2.15), of which
    Triton refuses the 64-bit constants.
    """
    return torch.arange(start, end, dtype=torch.int64, device=seeds.device)


@_opaque_arange.register_fake
def _(seeds: Tensor, start: int, end: int) -> Tensor:
    return torch.empty(end - start, dtype=torch.int64, device=seeds.device)


def _unit(bits: Tensor) -> Tensor:
    """23 bits -> (0, 1): with the added half, float32 holds no more bits."""
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
