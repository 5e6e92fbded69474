"""Gain, bias and ReLU of normalized maps in Triton, with upsampling behind them; maps (N, C, H, W) are channels_last.

Importing this module needs Triton. Only ``fused`` imports it; ``modulation`` makes the outputs and adds derivatives.

A map is treated as a matrix with a row for each pixel. A program takes pixels of one sample. Sums over pixels are cut
into chunks, one a program, which torch adds up, so that their order is fixed. Numbers are read in their own type,
computed in float32 (float64 for float64), and rounded once, when they are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigsgan.models.tiles import cdiv

_TILE = (32, 32)
"""Pixels and channels that a program takes at a time: 8 numbers in each thread of Triton's four warps."""
_TURNS = 8
"""Tiles of a program that adds up."""

_add = tl.standard._sum_combine  # tl.sum fails in Triton's interpreter if Triton was imported without it


@triton.jit
def _places(sample, pixel, column, num_pixels, num_columns, width):
    """Return the places of pixels in a map, and those of the first of their four pixels in a map twice as large."""
    upper_left = pixel // width * (4 * width) + pixel % width * 2
    small = (sample * num_pixels + pixel).to(tl.int64) * num_columns + column
    return small, (sample * num_pixels * 4 + upper_left).to(tl.int64) * num_columns + column


@triton.jit(do_not_specialize=["num_pixels", "width", "tiles"])
def _modulate(
    x_ptr, gain_ptr, bias_ptr, y_ptr, num_pixels, num_columns, width, gain_step, bias_step, tiles,
    doubles: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Compute the ReLU of x * gain + bias; with ``doubles``, each pixel four times."""
    blocks = (num_columns + tile_columns - 1) // tile_columns
    column = tl.program_id(0) % blocks * tile_columns + tl.arange(0, tile_columns)[None, :]
    pixel = tl.program_id(0) // blocks % tiles * tile_rows + tl.arange(0, tile_rows)[:, None]
    sample = tl.program_id(0) // (blocks * tiles)
    exists = column < num_columns
    inside = (pixel < num_pixels) & exists
    small, large = _places(sample, pixel, column, num_pixels, num_columns, width)
    total: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    gain = tl.load(gain_ptr + sample.to(tl.int64) * gain_step + column, mask=exists, other=0.0).to(total)
    bias = tl.load(bias_ptr + sample.to(tl.int64) * bias_step + column, mask=exists, other=0.0).to(total)
    y = tl.load(x_ptr + small, mask=inside, other=0.0).to(total) * gain + bias
    y = tl.where(y <= 0, 0.0, y).to(y_ptr.dtype.element_ty)  # by a comparison, which keeps NaN
    if doubles:
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                tl.store(y_ptr + large + (2 * width * i + j) * num_columns, y, mask=inside)
    else:
        tl.store(y_ptr + small, y, mask=inside)


@triton.jit(do_not_specialize=["num_pixels", "width", "chunks"])
def _differentiate(
    grad_ptr, x_ptr, gain_ptr, bias_ptr, out_ptr, sums_ptr,
    num_pixels, num_columns, width, gain_step, bias_step, chunks,
    doubles: tl.constexpr, turns: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Compute the gradient by x, and one chunk's sums of those by gain and bias: sums (2, N, chunks, C)."""
    blocks = (num_columns + tile_columns - 1) // tile_columns
    column = tl.program_id(0) % blocks * tile_columns + tl.arange(0, tile_columns)[None, :]
    chunk = tl.program_id(0) // blocks % chunks
    sample = tl.program_id(0) // (blocks * chunks)
    exists = column < num_columns
    total: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    gain = tl.load(gain_ptr + sample.to(tl.int64) * gain_step + column, mask=exists, other=0.0).to(total)
    bias = tl.load(bias_ptr + sample.to(tl.int64) * bias_step + column, mask=exists, other=0.0).to(total)
    by_gain = tl.full([tile_rows, tile_columns], 0.0, total)
    by_bias = tl.full([tile_rows, tile_columns], 0.0, total)
    for turn in range(turns):
        pixel = (chunk * turns + turn) * tile_rows + tl.arange(0, tile_rows)[:, None]
        inside = (pixel < num_pixels) & exists
        small, large = _places(sample, pixel, column, num_pixels, num_columns, width)
        x = tl.load(x_ptr + small, mask=inside, other=0.0).to(total)
        if doubles:
            grad = tl.full([tile_rows, tile_columns], 0.0, total)
            for i in tl.static_range(2):
                for j in tl.static_range(2):
                    there = large + (2 * width * i + j) * num_columns
                    grad += tl.load(grad_ptr + there, mask=inside, other=0.0).to(total)
        else:
            grad = tl.load(grad_ptr + small, mask=inside, other=0.0).to(total)
        y = (x * gain + bias).to(x_ptr.dtype.element_ty)  # as it was rounded
        grad = tl.where(y <= 0, 0.0, grad)
        by_gain += grad * x
        by_bias += grad
        tl.store(out_ptr + small, (grad * gain).to(out_ptr.dtype.element_ty), mask=inside)
    column = tl.program_id(0) % blocks * tile_columns + tl.arange(0, tile_columns)
    there = tl.program_id(0) // blocks * num_columns + column
    num = tl.num_programs(0) // blocks * num_columns
    tl.store(sums_ptr + there, tl.reduce(by_gain, 0, _add), mask=column < num_columns)
    tl.store(sums_ptr + num + there, tl.reduce(by_bias, 0, _add), mask=column < num_columns)


def modulate(x: Tensor, gain: Tensor, bias: Tensor, y: Tensor) -> None:
    """Write the ReLU of x (N, C, H, W) * gain + bias, (N or 1, C) both, to y, of x's sides or twice as large."""
    n, c, height, width = x.shape
    tiles = cdiv(height * width, _TILE[0])
    steps = _step(gain), _step(bias)
    with torch.cuda.device_of(x):
        _modulate[(n * tiles * cdiv(c, _TILE[1]),)](
            x, gain, bias, y, height * width, c, width, *steps, tiles, y.shape != x.shape, *_TILE
        )


def differentiate(grad: Tensor, x: Tensor, gain: Tensor, bias: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Write the gradient by x to ``out``, given that by ``modulate``'s y; return those by gain and bias."""
    n, c, height, width = x.shape
    chunks = cdiv(height * width, _TILE[0] * _TURNS)
    sums = torch.empty((2, n, chunks, c), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    steps, doubles = (_step(gain), _step(bias)), grad.shape != x.shape
    with torch.cuda.device_of(x):
        _differentiate[(n * chunks * cdiv(c, _TILE[1]),)](
            grad, x, gain, bias, out, sums, height * width, c, width, *steps, chunks, doubles, _TURNS, *_TILE
        )
    by_gain, by_bias = sums.sum((1, 2) if len(gain) == 1 else 2).to(x.dtype).view(2, *gain.shape).unbind()
    return by_gain, by_bias


def _step(each: Tensor) -> int:
    """Return the distance from one sample's numbers to the next one's, 0 if all samples share them."""
    return each.stride(0) if len(each) > 1 else 0
