"""Flow matching along straight lines (Lipman et al. 2023, arXiv 2210.02747; Liu et al. 2023, arXiv 2209.03003)."""

from __future__ import annotations

from torch import Tensor


def velocity_error(images: Tensor, real_images: Tensor, times: Tensor) -> Tensor:
    """Return the mean squared error of the velocity z - x that an estimate of x means, a scalar.

    Of (1 - t) x + t z the estimate is this minus t times the velocity.

    Args:
        images: Estimates (n, C, H, W).
        real_images: The images x (n, C, H, W).
        times: t (n,), above 0.
    """
    return ((images - real_images) / times[:, None, None, None]).square().mean()
