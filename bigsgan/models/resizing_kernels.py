"""2x2 pooling and nearest-neighbour upsampling in Triton, on maps (N, C, H, W) that are channels_last.

Importing this module needs Triton. Only ``fused`` imports it; ``resizing`` adds the derivatives and makes the outputs.

A map is treated as a matrix with a row for each pixel. A program takes one tile of the small map, of half the sides,
and reads or writes the four pixels that belong to each of its pixels: every number passes through memory once. Tiles
are as wide for all layers, so that each kernel is compiled once. Numbers are read in their own type, computed in
float32 (float64 for float64), and rounded once, when they are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigsgan.models.tiles import cdiv

_TILE = (16, 64)
"""Small pixels and channels of a program: 8 numbers in each thread of Triton's four warps, side by side in memory, and
a cache line of 128 bytes for a pixel of half types. On an H100 it was faster than (32, 32) by 7 to 20 %."""


@triton.jit
def _tile_of(num_rows, num_columns, width, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """Return the places of a tile in the small map and in the large one, its channels, and what lies inside."""
    blocks = (num_columns + tile_columns - 1) // tile_columns
    row = tl.program_id(0) // blocks * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(0) % blocks * tile_columns + tl.arange(0, tile_columns)[None, :]
    upper_left = row // width * (4 * width) + row % width * 2
    small, large = row.to(tl.int64) * num_columns + column, upper_left.to(tl.int64) * num_columns + column
    return small, large, column, (row < num_rows) & (column < num_columns)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _pool(
    x_ptr, beside_ptr, bias_ptr, y_ptr, num_rows, num_columns, width, factor,
    adds: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Compute factor times the sum of four pixels, plus a small map and a bias if ``adds``."""
    small, large, column, inside = _tile_of(num_rows, num_columns, width, tile_rows, tile_columns)
    total: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    y = tl.full([tile_rows, tile_columns], 0.0, total)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            there = large + (2 * width * i + j) * num_columns
            y += tl.load(x_ptr + there, mask=inside, other=0.0).to(total)
    y *= factor
    if adds:
        y += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(total)
        y += tl.load(beside_ptr + small, mask=inside, other=0.0).to(total)
    tl.store(y_ptr + small, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _spread(
    x_ptr, onto_ptr, bias_ptr, y_ptr, num_rows, num_columns, width, factor,
    adds: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Write factor times a pixel to four; if ``adds``, the pixel and a bias are added to a large map."""
    small, large, column, inside = _tile_of(num_rows, num_columns, width, tile_rows, tile_columns)
    total: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    x = tl.load(x_ptr + small, mask=inside, other=0.0).to(total) * factor
    if adds:
        x += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(total)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            there = large + (2 * width * i + j) * num_columns
            y = x
            if adds:
                y += tl.load(onto_ptr + there, mask=inside, other=0.0).to(total)
            tl.store(y_ptr + there, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _split(
    x_ptr, sign_ptr, kept_ptr, y_ptr, num_rows, num_columns, width, factor,
    own: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """Write x where the sign is positive, else 0; and factor times the sum of four pixels of x, wherever they are.

    With ``own`` the sign is that of x. Comparisons keep NaN.
    """
    small, large, _, inside = _tile_of(num_rows, num_columns, width, tile_rows, tile_columns)
    total: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    y = tl.full([tile_rows, tile_columns], 0.0, total)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            there = large + (2 * width * i + j) * num_columns
            x = tl.load(x_ptr + there, mask=inside, other=0.0)
            sign = x if own else tl.load(sign_ptr + there, mask=inside, other=0.0)
            tl.store(kept_ptr + there, tl.where(sign <= 0, 0.0, x).to(x.dtype), mask=inside)
            y += x.to(total)
    tl.store(y_ptr + small, (y * factor).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "width"])
def _join(
    kept_ptr, pooled_ptr, sign_ptr, x_ptr, num_rows, num_columns, width, factor,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """The transpose of ``_split``: compute x = kept where the sign is positive, plus factor * pooled."""
    small, large, _, inside = _tile_of(num_rows, num_columns, width, tile_rows, tile_columns)
    total: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    pooled = tl.load(pooled_ptr + small, mask=inside, other=0.0).to(total) * factor
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            there = large + (2 * width * i + j) * num_columns
            kept = tl.load(kept_ptr + there, mask=inside, other=0.0).to(total)
            sign = tl.load(sign_ptr + there, mask=inside, other=0.0)
            x = tl.where(sign <= 0, 0.0, kept) + pooled
            tl.store(x_ptr + there, x.to(x_ptr.dtype.element_ty), mask=inside)


def pool(x: Tensor, y: Tensor, factor: float, beside: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Write factor * sums of x (N, C, H, W) + beside (N, C, H/2, W/2) + bias (C,) to y, as small."""
    adds = bias is not None
    with torch.cuda.device_of(x):
        _pool[_grid(y)](x, beside if adds else x, bias if adds else x, y, *_sizes(y), factor, adds, *_TILE)


def spread(x: Tensor, y: Tensor, factor: float, onto: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Write factor * x (N, C, H/2, W/2) + bias (C,), each pixel four times, + onto (N, C, H, W) to y, as large."""
    adds = bias is not None
    with torch.cuda.device_of(x):
        _spread[_grid(x)](x, onto if adds else x, bias if adds else x, y, *_sizes(x), factor, adds, *_TILE)


def split(x: Tensor, sign: Tensor | None, kept: Tensor, pooled: Tensor, factor: float) -> None:
    """Write x (N, C, H, W) to ``kept`` where the sign, of x if None, is positive; factor * its sums to ``pooled``."""
    own = sign is None
    with torch.cuda.device_of(x):
        _split[_grid(pooled)](x, x if own else sign, kept, pooled, *_sizes(pooled), factor, own, *_TILE)


def join(kept: Tensor, pooled: Tensor, sign: Tensor, x: Tensor, factor: float) -> None:
    """Add up to x (N, C, H, W): ``kept`` where the sign is positive, and factor * ``pooled`` (N, C, H/2, W/2)."""
    with torch.cuda.device_of(x):
        _join[_grid(pooled)](kept, pooled, sign, x, *_sizes(pooled), factor, *_TILE)


def _sizes(small: Tensor) -> tuple[int, int, int]:
    """Return the rows and columns of the small map's matrix, and the small map's width."""
    n, c, height, width = small.shape
    return n * height * width, c, width


def _grid(small: Tensor) -> tuple[int]:
    rows, columns, _ = _sizes(small)
    return (cdiv(rows, _TILE[0]) * cdiv(columns, _TILE[1]),)
