"""StyleGAN2's filter and rectifier in Triton, on tensors (N, C, H, W) that are contiguous or channels_last.

Importing this module needs Triton. Only ``fused`` imports it, and adds the derivatives.

A tensor is treated as a matrix with contiguous rows: rows of pixels if it is contiguous, rows of channels if it is
channels_last. A program computes one tile of this matrix. So neighbouring threads read neighbouring numbers in both
layouts, and no number of a tile needs an index division of its own. Numbers are read in their own type, computed in
float32 (float64 for float64), and rounded once, when they are written.

Shapes: N samples, C channels, H x W pixels, K x K a filter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigsgan.models.fused import Geometry
from bigsgan.models.tiles import cdiv, next_power_of_2

_TILE = 1024
"""Numbers that a program computes: 8 in each thread of Triton's four warps."""
_WIDEST_FILTERED = 64
"""Most columns of a filter's tile: rows of a filtered map are often one pixel longer than a power of two."""


# Without specialization: variants for kinds of these numbers would only mean more compiling.
@triton.jit(do_not_specialize=["num_rows", "in_height", "in_width", "out_height", "out_width"])
def _resample(
    x_ptr,
    taps_ptr,
    y_ptr,
    num_rows,
    num_columns,
    in_height,
    in_width,
    out_height,
    out_width,
    gain: tl.constexpr,
    size: tl.constexpr,
    up: tl.constexpr,
    down: tl.constexpr,
    before: tl.constexpr,
    flipped: tl.constexpr,
    channels_last: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    if channels_last:
        out_x, out_y, plane = row % out_width, row // out_width % out_height, row // (out_width * out_height)
    else:
        out_x, out_y, plane = column, row % out_height, row // out_height
    # Only every ``up``-th tap meets a pixel, not a zero between two pixels; the first such tap depends on the place.
    first_y, first_x = 0, 0
    if up > 1:
        first_y = (before % up + (up - 1) * down * out_y) % up
        first_x = (before % up + (up - 1) * down * out_x) % up
    # The pixels that these taps meet; the divisions leave no remainder.
    in_y, in_x = (out_y * down + first_y - before) // up, (out_x * down + first_x - before) // up
    start, step = (plane.to(tl.int64) * in_height + in_y) * in_width + in_x, 1
    if channels_last:
        start, step = start * num_columns + column, num_columns
    x_ptr += start
    total = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    sums = tl.full([tile_rows, tile_columns], 0.0, total)
    for i in tl.static_range(size // up):
        within_y = inside & (in_y + i >= 0) & (in_y + i < in_height)
        for j in tl.static_range(size // up):
            within = within_y & (in_x + j >= 0) & (in_x + j < in_width)
            x = tl.load(x_ptr + (i * in_width + j) * step, mask=within, other=0.0)
            tap = (first_y + i * up) * size + first_x + j * up
            if flipped:
                tap = size * size - 1 - tap
            sums += x.to(total) * tl.load(taps_ptr + tap).to(total)
    y = (sums * gain).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row.to(tl.int64) * num_columns + column, y, mask=inside)


@triton.jit
def _rectify(
    x_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_columns,
    num_channels,
    slope: tl.constexpr,
    limit: tl.constexpr,
    channels_last: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    at = row.to(tl.int64) * num_columns + column
    total = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    if channels_last:
        bias = tl.load(bias_ptr + column, mask=column < num_columns, other=0.0)
    else:
        bias = tl.load(bias_ptr + row % num_channels)
    y = tl.load(x_ptr + at, mask=inside, other=0.0).to(total) + bias.to(total)
    y = tl.where(y > 0, y, y * slope)
    if limit is not None:  # by comparisons, which keep NaN
        y = tl.where(y > limit, limit, tl.where(y < -limit, -limit, y))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(grad_ptr, y_ptr, out_ptr, num, slope: tl.constexpr, limit: tl.constexpr, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < num
    total = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(total)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(total)
    grad = tl.where(y > 0, grad, grad * slope)
    if limit is not None:
        grad = tl.where((y > -limit) & (y < limit), grad, 0.0)
    tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=inside)


def resample(x: Tensor, taps: Tensor, geometry: Geometry) -> Tensor:
    """Filter: (N, C, H, W), (K, K) -> (N, C, height, width), in x's type and layout.

    ``x`` is contiguous or channels_last, ``taps`` contiguous.
    """
    up, down, before, height, width, gain, flipped = geometry
    n, c, in_height, in_width = x.shape
    channels_last = not x.is_contiguous()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    y = torch.empty((n, c, height, width), dtype=x.dtype, device=x.device, memory_format=layout)
    rows, columns = (n * height * width, c) if channels_last else (n * c * height, width)
    tile = _tile(columns, _WIDEST_FILTERED)
    with torch.cuda.device_of(x):
        _resample[_grid(rows, columns, tile)](
            x, taps, y, rows, columns, in_height, in_width, height, width,
            gain, taps.shape[0], up, down, before, flipped, channels_last, *tile,
        )  # fmt: skip
    return y


def rectify(x: Tensor, bias: Tensor, slope: float, limit: float | None) -> Tensor:
    """Rectify x + bias leakily, within plus or minus ``limit``: (N, C, H, W), (C,) -> x's shape and layout.

    Args:
        x: Contiguous or channels_last.
        bias: Contiguous.
        slope: The rectifier's slope below 0.
        limit: A number that x's type holds exactly, or None.
    """
    n, c, height, width = x.shape
    channels_last = not x.is_contiguous()
    rows, columns = (n * height * width, c) if channels_last else (n * c, height * width)
    tile, y = _tile(columns, _TILE), torch.empty_like(x)
    with torch.cuda.device_of(x):
        _rectify[_grid(rows, columns, tile)](x, bias, y, rows, columns, c, slope, limit, channels_last, *tile)
    return y


def slopes(grad: Tensor, y: Tensor, slope: float, limit: float | None) -> Tensor:
    """Multiply ``grad`` by the slope of the rectifier with output ``y``, 0 at the limit; all share shape and layout."""
    out = torch.empty_like(y)
    with torch.cuda.device_of(y):
        _slopes[(cdiv(y.numel(), _TILE),)](grad, y, out, y.numel(), slope, limit, _TILE)
    return out


def _tile(columns: int, widest: int) -> tuple[int, int]:
    """Return a tile's rows and columns, both powers of two."""
    width = min(next_power_of_2(columns), widest)
    return _TILE // width, width


def _grid(rows: int, columns: int, tile: tuple[int, int]) -> tuple[int, int]:
    return cdiv(rows, tile[0]), cdiv(columns, tile[1])
