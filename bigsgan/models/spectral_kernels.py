"""Spectral normalization in Triton: products with a weight's two vectors, the division, and its gradient.

Importing this module needs Triton. Only ``fused`` imports it; ``spectral`` adds the derivatives.

A product's sum is cut into chunks, one a program, whose sums the next kernel adds up in a fixed order, so that a
resumed run computes the same. Shapes are arguments, not constants, so that each kernel is compiled once for all layers.
Numbers are read in their own type, computed in float32 (float64 for float64) and rounded once.

Shapes: R rows, C columns of a weight seen as a matrix, K pixels of its filters; fewer than 2**31 numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bigsgan.models.spectral import is_filter, total_type
from bigsgan.models.tiles import cdiv

_TILE = (32, 128)
_CHUNK = (512, 2048)
"""Rows and columns that a program adds up: the largest weights of BigGAN-128 take some 300 programs."""
_BLOCK = 2048
_FLAT, _TURNS = 1024, 16
"""Numbers of a weight that a program reads in one turn, and a program's turns in a sum."""


_add = tl.standard._sum_combine  # tl.sum fails in Triton's interpreter if Triton was imported without it


@triton.jit
def _quotient(x, y, total: tl.constexpr):
    # Triton's own division of float32 is not rounded correctly.
    return x / y if total == tl.float64 else tl.div_rn(x, y)


@triton.jit
def _multiply_rows(
    weight_ptr, u_ptr, out_ptr, rows, columns, chunk: tl.constexpr, tile: tl.constexpr, wide: tl.constexpr
):
    """Compute W^T u of one chunk of rows: out (chunks, C)."""
    total: tl.constexpr = tl.float64 if weight_ptr.dtype.element_ty == tl.float64 else tl.float32
    column = tl.program_id(0) * wide + tl.arange(0, wide)
    sums = tl.full([tile, wide], 0.0, total)
    for i in range(0, chunk, tile):
        row = tl.program_id(1) * chunk + i + tl.arange(0, tile)
        within = (row < rows)[:, None] & (column < columns)[None, :]
        w = tl.load(weight_ptr + row[:, None] * columns + column[None, :], mask=within, other=0.0)
        u = tl.load(u_ptr + row, mask=row < rows, other=0.0)
        sums += w.to(total) * u.to(total)[:, None]
    tl.store(out_ptr + tl.program_id(1) * columns + column, tl.reduce(sums, 0, _add), mask=column < columns)


@triton.jit
def _multiply_columns(
    weight_ptr, v_ptr, out_ptr, rows, columns, chunk: tl.constexpr, tile: tl.constexpr, wide: tl.constexpr
):
    """Compute W v of one chunk of columns: out (chunks, R)."""
    total: tl.constexpr = tl.float64 if weight_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    sums = tl.full([tile, wide], 0.0, total)
    for i in range(0, chunk, wide):
        column = tl.program_id(1) * chunk + i + tl.arange(0, wide)
        within = (row < rows)[:, None] & (column < columns)[None, :]
        w = tl.load(weight_ptr + row[:, None] * columns + column[None, :], mask=within, other=0.0)
        v = tl.load(v_ptr + column, mask=column < columns, other=0.0)
        sums += w.to(total) * v.to(total)[None, :]
    tl.store(out_ptr + tl.program_id(1) * rows + row, tl.reduce(sums, 1, _add), mask=row < rows)


@triton.jit
def _finish(
    sums_ptr, vector_ptr, fresh_ptr, sigma_ptr, num, chunks, eps,
    moves: tl.constexpr, ends: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Add up the chunks of a product to x (num,).

    With ``moves``, vector and its copy fresh become x / |x|. With ``ends``, sigma becomes the dot product of vector, x.
    """
    total: tl.constexpr = tl.float64 if sums_ptr.dtype.element_ty == tl.float64 else tl.float32
    norm = tl.full([block], 0.0, total)
    if moves:
        for begin in range(0, num, block):
            at = begin + tl.arange(0, block)
            x = tl.full([block], 0.0, total)
            for chunk in range(chunks):
                x += tl.load(sums_ptr + chunk * num + at, mask=at < num, other=0.0)
            norm += x * x
    length = tl.sqrt_rn(tl.reduce(norm, 0, _add)) if total == tl.float32 else tl.sqrt(tl.reduce(norm, 0, _add))
    length = tl.maximum(length, eps)
    sigma = tl.full([block], 0.0, total)
    for begin in range(0, num, block):
        at = begin + tl.arange(0, block)
        x = tl.full([block], 0.0, total)
        for chunk in range(chunks):
            x += tl.load(sums_ptr + chunk * num + at, mask=at < num, other=0.0)
        if moves:
            vector = _quotient(x, length, total).to(vector_ptr.dtype.element_ty)
            tl.store(vector_ptr + at, vector, mask=at < num)
            tl.store(fresh_ptr + at, vector, mask=at < num)
        else:
            vector = tl.load(vector_ptr + at, mask=at < num, other=0.0)
        if ends:
            sigma += vector.to(total) * x
    if ends:
        tl.store(sigma_ptr, tl.reduce(sigma, 0, _add))


@triton.jit
def _divide(weight_ptr, sigma_ptr, out_ptr, num, columns, pixels, last: tl.constexpr, block: tl.constexpr):
    """Compute weight / sigma; filters get their channels last if ``last``."""
    total: tl.constexpr = tl.float64 if weight_ptr.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(0) * block + tl.arange(0, block)
    source = at
    if last:
        channels = columns // pixels
        within = at % columns
        source = at - within + within % channels * pixels + within // channels
    w = tl.load(weight_ptr + source, mask=at < num, other=0.0).to(total)
    sigma = tl.load(sigma_ptr).to(total)
    tl.store(out_ptr + at, _quotient(w, sigma, total).to(out_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def _there(at, columns, pixels, last: tl.constexpr):
    """Return the place in the gradient for a place in the weight; it differs if the gradient's channels are last."""
    if last:
        within = at % columns
        return at - within + within % pixels * (columns // pixels) + within // pixels
    return at


@triton.jit
def _sum_products(
    grad_ptr, weight_ptr, out_ptr, num, columns, pixels,
    last: tl.constexpr, block: tl.constexpr, turns: tl.constexpr,
):  # fmt: skip
    """Compute one program's sum of gradient times weight: out (programs,)."""
    total: tl.constexpr = tl.float64 if weight_ptr.dtype.element_ty == tl.float64 else tl.float32
    sums = tl.full([block], 0.0, total)
    for i in range(turns):
        at = (tl.program_id(0) * turns + i) * block + tl.arange(0, block)
        grad = tl.load(grad_ptr + _there(at, columns, pixels, last), mask=at < num, other=0.0)
        sums += grad.to(total) * tl.load(weight_ptr + at, mask=at < num, other=0.0).to(total)
    tl.store(out_ptr + tl.program_id(0), tl.reduce(sums, 0, _add))


@triton.jit
def _differentiate(
    grad_ptr, sums_ptr, u_ptr, v_ptr, sigma_ptr, out_ptr, num, columns, pixels, num_sums,
    last: tl.constexpr, block: tl.constexpr, turns: tl.constexpr,
):  # fmt: skip
    """Compute grad / sigma - (sum of sums) / sigma^2 * u v^T."""
    total: tl.constexpr = tl.float64 if sums_ptr.dtype.element_ty == tl.float64 else tl.float32
    sums = tl.full([block], 0.0, total)
    for begin in range(0, num_sums, block):
        there = begin + tl.arange(0, block)
        sums += tl.load(sums_ptr + there, mask=there < num_sums, other=0.0)
    sigma = tl.load(sigma_ptr).to(total)
    by_sigma = _quotient(_quotient(tl.reduce(sums, 0, _add), sigma, total), sigma, total)
    for i in range(turns):
        at = (tl.program_id(0) * turns + i) * block + tl.arange(0, block)
        grad = tl.load(grad_ptr + _there(at, columns, pixels, last), mask=at < num, other=0.0).to(total)
        u = tl.load(u_ptr + at // columns, mask=at < num, other=0.0).to(total)
        v = tl.load(v_ptr + at % columns, mask=at < num, other=0.0).to(total)
        value = _quotient(grad, sigma, total) - by_sigma * u * v
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < num)


def iterate(weight: Tensor, u: Tensor, v: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Move u (R,) and v (C,) in place by a step of the power iteration; return copies of both, and the norm ().

    ``weight`` (R, ...) is contiguous. Lengths to divide by are at least ``eps``.
    """
    rows, columns = _matrix(weight)
    new_u, new_v = torch.empty_like(u), torch.empty_like(v)
    sigma = torch.empty((), dtype=total_type(weight), device=weight.device)
    with torch.cuda.device_of(weight):
        chunks = cdiv(rows, _CHUNK[0])
        sums = torch.empty((chunks, columns), dtype=sigma.dtype, device=weight.device)
        grid = cdiv(columns, _TILE[1]), chunks
        _multiply_rows[grid](weight, u, sums, rows, columns, _CHUNK[0], *_TILE)
        _finish[(1,)](sums, v, new_v, sigma, columns, chunks, eps, True, False, _BLOCK)
        _end(weight, u, new_u, new_v, sigma, eps, True)
    return new_u, new_v, sigma


def norm(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return u^T W v: (R, ...), (R,), (C,) -> (); ``weight`` is contiguous."""
    sigma = torch.empty((), dtype=total_type(weight), device=weight.device)
    with torch.cuda.device_of(weight):
        _end(weight, u, u, v, sigma, 0.0, False)
    return sigma


def _end(weight: Tensor, u: Tensor, new_u: Tensor, v: Tensor, sigma: Tensor, eps: float, moves: bool) -> None:
    rows, columns = _matrix(weight)
    chunks = cdiv(columns, _CHUNK[1])
    sums = torch.empty((chunks, rows), dtype=sigma.dtype, device=weight.device)
    grid = cdiv(rows, _TILE[0]), chunks
    _multiply_columns[grid](weight, v, sums, rows, columns, _CHUNK[1], *_TILE)
    _finish[(1,)](sums, u, new_u, sigma, rows, chunks, eps, moves, True, _BLOCK)


def divide(weight: Tensor, sigma: Tensor) -> Tensor:
    """Return weight / sigma in the weight's shape and type; filters have their channels last, as convolutions need."""
    last = is_filter(weight)
    layout = torch.channels_last if last else torch.contiguous_format
    out = torch.empty_like(weight, memory_format=layout)
    pixels = weight.shape[2:].numel() if last else 1
    with torch.cuda.device_of(weight):
        grid = (cdiv(weight.numel(), _FLAT),)
        _divide[grid](weight, sigma, out, weight.numel(), weight.shape[1:].numel(), pixels, last, _FLAT)
    return out


def differentiate(grad: Tensor, weight: Tensor, u: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Return the gradient by the weight, given that by the output of ``divide`` with sigma = u^T W v."""
    last = is_filter(weight) and not grad.is_contiguous()
    grad = grad.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    out, num = torch.empty_like(weight), weight.numel()
    programs = cdiv(num, _FLAT * _TURNS)
    sums = torch.empty(programs, dtype=sigma.dtype, device=weight.device)
    place = (weight.shape[1:].numel(), weight.shape[2:].numel() if last else 1)
    with torch.cuda.device_of(weight):
        _sum_products[(programs,)](grad, weight, sums, num, *place, last, _FLAT, _TURNS)
        _differentiate[(programs,)](grad, sums, u, v, sigma, out, num, *place, programs, last, _FLAT, _TURNS)
    return out


def _matrix(weight: Tensor) -> tuple[int, int]:
    return len(weight), weight.shape[1:].numel()
