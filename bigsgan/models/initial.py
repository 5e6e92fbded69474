"""First values of parameters and buffers, drawn on the CPU whatever their device and type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Generators = Callable[[str], torch.Generator]
"""Returns the random generator of a parameter or buffer, by its name in its module."""


_LARGE = 2**30
"""Products of rows, columns and the smaller of both from which a matrix is made orthogonal on its parameter's device.

On 16 cores the 388 TFLOP of two networks of 8 billion parameters take several minutes, on a rank with one core hours.
"""


@torch.no_grad()
def draw_normal(tensor: Tensor, generator: torch.Generator, std: float = 1.0) -> None:
    """Fill a parameter or buffer with normal numbers of mean 0, drawn in float32 whatever its type."""
    drawn = torch.empty(tensor.shape, dtype=torch.float32)
    tensor.copy_(drawn.normal_(0, std, generator=generator))


def draw_orthogonal(shape: tuple[int, int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Return an orthogonal matrix (rows, columns) as torch's ``orthogonal_`` makes it, bit for bit on a CPU.

    The numbers are drawn on the CPU. Large matrices are decomposed on ``device``, and stay there.
    """
    rows, columns = shape
    drawn = torch.empty(shape, dtype=torch.float32).normal_(generator=generator)
    drawn = drawn.to(device if rows * columns * min(shape) >= _LARGE else "cpu")
    q, r = torch.linalg.qr(drawn.t() if rows < columns else drawn)
    del drawn
    q *= r.diagonal().sign()
    return (q.t() if rows < columns else q).contiguous()
