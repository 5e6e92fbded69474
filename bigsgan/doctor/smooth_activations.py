"""Networks without kinks, so that a difference from the reference is a mistake and never a matter of rounding.

Where an activation lies within rounding of a kink, it falls on the other side in another order of summation, and one
sample's gradient jumps. Engines and layouts do not depend on what the layers compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.nn.functional as F
from torch import Tensor

from bigsgan.models import fused


def leaky_relu(x: Tensor, slope: float = 0.01, inplace: bool = False) -> Tensor:
    """Smooth replacement of a leaky ReLU of that slope."""
    return slope * x + (1 - slope) * F.gelu(x)


def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """Smooth replacement of ReLU."""
    return F.gelu(x)


def no_kernels(x: Tensor, subject: str = "") -> bool:
    """Say that no kernels are used, as they rectify. This is a function because torch.compile cannot trace a mock."""
    return False


@contextmanager
def smooth() -> Iterator[None]:
    """Make rectifiers and hinges smooth inside the block, and let pooling take means instead of maxima."""
    with (
        mock.patch.multiple(F, relu=relu, leaky_relu=leaky_relu, leaky_relu_=leaky_relu, max_pool2d=F.avg_pool2d),
        mock.patch.object(fused, "used_for", no_kernels),
    ):
        yield
