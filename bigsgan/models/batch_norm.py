"""Batch norm over all data-parallel ranks (Ioffe and Szegedy 2015, arXiv 1502.03167), with torch's kernels.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.models.dual import has_tangent, linearly
from bigsgan.models.initial import Generators
from bigsgan.models.layers import Embedding, Kept, RankAverages, SpectralLinear, TwiceDifferentiable
from bigsgan.models.modulation import modulate_and_rectify
from bigsgan.models.precision import full

_TINY = 1e-30
"""Added to variances, as torch returns the inverse, which must be finite for a variance of 0."""
_OF_TORCH = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
"""What torch's batch norm has, though some may be None."""


class _Moments(torch.autograd.Function):
    """Mean and biased variance of each channel, (C,) float32, by torch's batch norm; its var_mean takes far longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        running = x.new_zeros(2, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        _, mean, inverse = torch.native_batch_norm(x, None, None, running[0], running[1], True, 0.0, _TINY)
        ctx.save_for_backward(x, mean)
        return mean, inverse.pow(-2)

    @staticmethod
    def backward(ctx: Any, mean_grad: Tensor, var_grad: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        num = x.numel() // x.shape[1]
        slope = var_grad * (2 / num)
        offset = mean_grad / num - slope * mean
        return torch.addcmul(offset.view(1, -1, 1, 1), x, slope.view(1, -1, 1, 1)).to(x.dtype)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling() or has_tangent(x):
        var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
        return mean, var
    moments: tuple[Tensor, Tensor] = _Moments.apply(x)
    return moments


@torch.library.custom_op("bigsgan::copied", mutates_args=())
def _copied(buffer: Tensor) -> Tensor:
    """Copy a buffer for a backward pass, which must see the buffer's old values.

    A backward pass compiled by torch 2.14 recomputes an ordinary copy, from a buffer that has moved: the gradient is
    wrong. It does not recompute operations that it does not know.
    """
    return buffer.clone()


@_copied.register_fake
def _(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer)


class BatchStatistics(RankAverages, TwiceDifferentiable):
    """Normalizes each channel over the samples and pixels of the global micro-batch, without gain or bias.

    Statistics are float32. If ``average_over_ranks`` is given, they are those of its ranks. In training
    mode the micro-batch is normalized by its own statistics; in evaluation mode by the running statistics (Ioffe and
    Szegedy 2015, arXiv 1502.03167).

    Attributes:
        running_mean: Buffer (C,), float32.
        running_var: Buffer (C,), float32, unbiased.
        momentum: Weight of a new micro-batch in the running statistics; torch's default.
        segments: Number of equal parts of a batch, such as real and fake images, that are normalized separately; the
            first moves the running statistics.
        exact: Whether to compute in float32 whatever the input's type, for second derivatives.
        tracks: Whether evaluation mode uses running statistics; else those of the micro-batch.
        is_partial: Whether other ranks take statistics of their own; an update ends with the mean of running ones.
    """

    tracks, is_partial = True, False
    running_mean: Tensor
    running_var: Tensor
    momentum = 0.1

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.segments = eps, 1
        self.register_buffer("running_mean", torch.empty(channels, dtype=torch.float32))
        self.register_buffer("running_var", torch.empty(channels, dtype=torch.float32))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Start the running statistics at mean 0 and variance 1."""
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """Normalize (N, C, H, W) to mean 0 and variance 1 for each channel, in x's type.

        Differentiable twice; in bf16 this is only exact to bf16's 8 bits if ``exact`` is set. In training mode x may
        lack a ``shift`` (C,), which the mean would remove; the running mean includes it.
        """
        # Sums over N * H * W values need more than 8 or 11 bits. torch's kernels add up bf16 in float32, the type of
        # the running statistics. But terms of second derivatives would be subtracted in bf16, and so would gradients
        # through the normalization and through statistics of all ranks.
        uses_running = not self.training and self.tracks
        is_local = self.average_over_ranks is None or uses_running
        inputs = x if x.dtype == torch.bfloat16 and is_local and not self.exact else full(x)
        if uses_running:
            return F.batch_norm(inputs, self.running_mean, self.running_var, eps=self.eps).to(x.dtype)
        if self.segments == 1:
            return self._normalize(inputs, shift).to(x.dtype)
        n, c, h, w = x.shape
        # Segments become channels, which batch norm does not mix.
        by_segment = inputs.view(self.segments, -1, c, h, w).transpose(0, 1).reshape(-1, self.segments * c, h, w)
        normalized = self._normalize(by_segment, shift).view(-1, self.segments, c, h, w).transpose(0, 1)
        return normalized.reshape(n, c, h, w).to(x.dtype)

    def _normalize(self, x: Tensor, shift: Tensor | None) -> Tensor:
        """Normalize (n, segments * C, H, W).

        Over several ranks, with mean m, variance v, and constants m' and v' of the same values,

            (x - m) / sqrt(v) = (x - m') / sqrt(v') * gain + bias,
            gain = sqrt(v') / sqrt(v) = 1, bias = (m' - m) / sqrt(v') * gain = 0,

        which torch's kernel for running statistics computes, with the derivatives by gain and bias in float32.
        """
        channels = len(self.running_mean)
        if self.average_over_ranks is None and not has_tangent(x):
            # Copies even if nothing may move: a recomputation has to save as many tensors as its forward pass.
            mean, var = (buffer.repeat(self.segments) for buffer in (self.running_mean, self.running_var))
            in_place = self.segments == 1 and shift is None
            if in_place and self.moving:
                mean, var = self.running_mean, self.running_var
            normalized = F.batch_norm(x, mean, var, training=True, momentum=self.momentum, eps=self.eps)
            if not in_place and self.moving:
                moved = mean[:channels]
                self.running_mean.copy_(moved if shift is None else moved.add(shift, alpha=self.momentum))
                self.running_var.copy_(var[:channels])
            return normalized
        mean, var = self._global_statistics(x, self.average_over_ranks or (lambda moments: moments))
        if self.moving:
            count = x.numel() // x.shape[1] * self.num_ranks
            moved = mean[:channels].detach()
            self.running_mean.lerp_(moved if shift is None else moved + shift, self.momentum)
            self.running_var.lerp_(var[:channels].detach() * (count / max(count - 1, 1)), self.momentum)
        inverse = torch.rsqrt(var + self.eps)
        # Compiled code joins these with other operations. The tangent of torch's kernel (2.14) has a wrong derivative.
        if torch.compiler.is_compiling() or has_tangent(x):
            return (x - mean.view(1, -1, 1, 1)) * inverse.view(1, -1, 1, 1)
        gain = inverse / inverse.detach()
        bias = (mean.detach() - mean) * inverse.detach() * gain
        return F.batch_norm(x, mean.detach(), var.detach(), gain, bias, eps=self.eps)

    def _global_statistics(self, x: Tensor, average: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance over all ranks, with one collective.

        The variance is that within the ranks plus that of their means. Means are measured from the running mean, which
        all ranks share, so that squares of large means do not cancel the variance. Rounding must not make it negative;
        the gradient stays, which a clamp alone would drop.
        """
        mean, var = _moments(x)
        # Compiled code needs a copy, as the running mean moves in place before the backward pass.
        center = _copied(self.running_mean) if torch.compiler.is_compiling() else self.running_mean
        center, kept = center.repeat(self.segments), None
        if not torch.compiler.is_compiling() and not has_tangent(x):
            kept = Kept.open
        if kept is not None and kept.is_full:  # the running mean has moved since
            center, known = kept.take()
            average = partial(average, known=known)
        offset = mean - center
        means = linearly(average, torch.stack([offset, offset.square(), var]))
        if kept is not None and not kept.is_full:
            kept.keep(center, means)
        offset, square, var = means.unbind(0)
        between = square - offset.square()
        return center + offset, var + between + (between.clamp(min=0) - between).detach()


class ConditionalBatchNorm(nn.Module):
    """Batch norm whose gain and bias are linear in a condition (Brock et al. 2019, appendix B), and a ReLU."""

    def __init__(self, channels: int, condition_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.statistics = BatchStatistics(channels, eps)
        self.gain, self.bias = (self._map(condition_size, channels) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor, shift: Tensor | None = None, upsamples: bool = False) -> Tensor:
        """Compute the ReLU of normalized * (1 + gain) + bias, with each pixel four times if it ``upsamples``.

        (N, C, H, W), (N, condition_size) -> (N, C, H or 2H, W or 2W); x may lack ``shift``.
        """
        gain, bias = 1 + self.gain(condition), self.bias(condition)
        return modulate_and_rectify(self.statistics(x, shift), gain, bias, upsamples)

    def _map(self, condition_size: int, channels: int) -> nn.Module:
        return SpectralLinear(condition_size, channels, bias=False)


class ClassBatchNorm(ConditionalBatchNorm):
    """Batch norm with a learned gain and bias for each class and channel (Dumoulin et al. 2017, arXiv 1610.07629).

    The condition is the labels (N,) int64, and its size the number of classes; or a vector, and its size.
    """

    def _map(self, num_classes: int, channels: int) -> nn.Module:
        return Embedding(num_classes, channels)


class AffineBatchNorm(nn.Module):
    """Batch norm with one learned gain and bias for each channel, and a ReLU if it ``rectifies``."""

    def __init__(self, channels: int, eps: float = 1e-5, rectifies: bool = False) -> None:
        super().__init__()
        self.rectifies = rectifies
        self.statistics = BatchStatistics(channels, eps)
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Start as the identity."""
        self.weight.fill_(1)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        if self.rectifies:
            return modulate_and_rectify(self.statistics(x), self.weight.view(1, -1), self.bias.view(1, -1))
        return torch.addcmul(self.bias.view(1, -1, 1, 1), self.statistics(x), self.weight.view(1, -1, 1, 1))


class GlobalBatchNorm(BatchStatistics):
    """torch's batch norm with the statistics of the global micro-batch, which move once an update.

    It begins with the values of ``own``, whose names its parameters and buffers have.
    """

    def __init__(self, own: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__(own.num_features, own.eps)
        assert own.momentum is not None, "only such are replaced"
        self.momentum = own.momentum
        self.tracks = own.track_running_stats
        self.weight, self.bias = own.weight, own.bias
        if own.running_mean is not None and own.running_var is not None:
            self.running_mean, self.running_var = own.running_mean, own.running_var
        else:
            self.running_mean.zero_()
            self.running_var.fill_(1)

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Start as torch's does: with a weight of 1 and a bias of 0."""
        super().initialize(generators)
        if self.weight is not None:
            self.weight.fill_(1)
            self.bias.zero_()

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """Normalize (N, C, ...) to mean 0 and variance 1 for each channel; then times a weight, plus a bias."""
        normalized = super().forward(x.reshape(*x.shape[:2], -1, 1), shift).reshape(x.shape)
        if self.weight is None:
            return normalized
        shape = (1, -1, *[1] * (x.dim() - 2))
        return torch.addcmul(self.bias.view(shape), normalized, self.weight.view(shape))


def global_batch_norms(module: nn.Module) -> nn.Module:
    """Return the module with ``GlobalBatchNorm`` in the place of each of torch's batch norms, in place below it.

    One that computes something else too, by its class or by hooks, stays, as does one without a momentum.
    """
    replaced: dict[nn.Module, nn.Module] = {part: GlobalBatchNorm(part) for part in module.modules() if _is_plain(part)}
    for part in module.modules():
        for name, child in part._modules.items():  # a module may have several names
            if child in replaced:
                part._modules[name] = replaced[child]
    return replaced.get(module, module)


def _is_plain(module: nn.Module) -> TypeGuard[nn.modules.batchnorm._BatchNorm]:
    """Whether a module does what torch's batch norm does, and nothing else."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.momentum is None:
        return False
    kind, forwards = type(module), (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    is_torchs = kind.forward in forwards and kind.train is nn.Module.train and kind.__call__ is nn.Module.__call__
    names = {*module._parameters, *module._buffers, *module._modules}
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return is_torchs and names == _OF_TORCH and "forward" not in vars(module) and not any(hooks)
