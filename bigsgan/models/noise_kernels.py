"""Random numbers of samples in one Triton kernel: the arithmetic of ``noise``, word for word.

Importing this module needs Triton. Only ``fused`` imports it, for ``noise``. Uniform numbers equal those of ``noise``
bit for bit, normal ones up to the rounding of this device's logarithm, sine and cosine.

Shapes: N samples, S streams; a program draws a tile of the matrix (N * S, words).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigsgan.models.tiles import cdiv, next_power_of_2

_TILE = 1024
"""Words of a program: 8 in each thread of Triton's four warps."""


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _unit(bits):
    return (bits.to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23


# Without specialization: variants for kinds of these numbers would only mean more compiling.
@triton.jit(do_not_specialize=["stride", "first", "num_rows", "num_streams", "num_words", "num"])
def _draw(
    seeds_ptr,
    out_ptr,
    stride,
    first,
    num_rows,
    num_streams,
    num_words,
    num,
    kind: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    seeds = tl.load(seeds_ptr + (row // num_streams).to(tl.int64) * stride, mask=row < num_rows, other=0)
    key = _mix((row % num_streams).to(tl.uint64) + first.to(tl.uint64) + golden)
    begin = _mix(seeds.to(tl.uint64, bitcast=True) ^ key)
    word = _mix(begin + (column + 1).to(tl.uint64) * golden)
    inside = (row < num_rows) & (column < num_words)
    out_ptr += row.to(tl.int64) * num + column
    if kind == "uniform":
        tl.store(out_ptr, _unit(word >> 41), mask=inside)
    else:
        radius = tl.sqrt_rn(-2 * tl.log(_unit(word >> 41)))
        angle = 6.283185307179586 * _unit((word >> 1) & 0x7FFFFF)
        tl.store(out_ptr, radius * tl.cos(angle), mask=inside)
        tl.store(out_ptr + num_words, radius * tl.sin(angle), mask=inside & (column + num_words < num))


def draw(seeds: Tensor, streams: range, num: int, kind: str) -> Tensor:
    """Draw from consecutive streams, ``uniform`` or ``normal``, two from each word: (N,) int64 -> (N, S, num)."""
    out = torch.empty((len(seeds), len(streams), num), dtype=torch.float32, device=seeds.device)
    if not out.numel():
        return out
    rows, words = len(seeds) * len(streams), -(-num // 2) if kind == "normal" else num
    columns = min(next_power_of_2(words), _TILE)
    grid = cdiv(rows, _TILE // columns), cdiv(words, columns)
    with torch.cuda.device_of(seeds):
        _draw[grid](
            seeds, out, seeds.stride(0), streams.start, rows, len(streams), words, num,
            kind, _TILE // columns, columns,
        )  # fmt: skip
    return out
