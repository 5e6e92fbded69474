"""Layers of StyleGAN2 (Karras et al. 2020, arXiv 1912.04958): equalized learning rates and modulated convolutions.

Weights are drawn with standard deviation 1 and scaled by a constant where they are used, so that Adam's steps have the
same relative size in every layer (Karras et al. 2018, arXiv 1710.10196, section 4.1).

Shapes: N samples, C channels, H x W pixels, F features, W numbers in a style vector. A convolution computes in the half
type that it was given, or else in its weight's type; linear maps compute in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.images.size import Size
from bigsgan.models import fir, fused, noise
from bigsgan.models.convolutions import convolve, laid_out
from bigsgan.models.dual import linearly, multiply
from bigsgan.models.initial import Generators, draw_normal
from bigsgan.models.plain import Weighted, embed
from bigsgan.models.precision import full

SLOPE = 0.2
ACTIVATION_GAIN = math.sqrt(2)
"""Keeps the variance, which a leaky rectifier almost halves."""

_EPS = 1e-8


def normalize(x: Tensor) -> Tensor:
    """Scale each row of (N, F) to a mean square of 1."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + _EPS)


def rectify(x: Tensor, limit: float | None = None, slope: float = SLOPE) -> Tensor:
    """Apply a leaky rectifier in place, and clamp to plus or minus ``limit``.

    The activation's gain is already in weights and biases, because it commutes with the rectifier: this saves a pass
    over feature maps, and working in place saves a copy. ``x`` must be the output of an operation that does not keep it
    for the backward pass: of a convolution, a linear map, a sum or a product.
    """
    x = F.leaky_relu_(x, slope)
    return x if limit is None else x.clamp(-limit, limit)


def rectify_biased(x: Tensor, bias: Tensor, limit: float | None, slope: float = SLOPE) -> Tensor:
    """Add a bias (C,) to a feature map (N, C, H, W), which it may overwrite, and ``rectify``; in x's type."""
    if fused.used_for(x):
        return fused.rectify(x, bias, slope, limit)
    return rectify(x.add_(bias.view(-1, 1, 1)), limit, slope)


class Rectifying(Weighted):
    """A layer that a leaky rectifier may follow.

    Attributes:
        slope: Below 0; ``adapt`` changes it.
    """

    slope = SLOPE


class Resampling(torch.nn.Module):
    """A layer with the buffer ``resample_filter`` (K, K), unless it does not resample.

    Attributes:
        taps: Of the filter; ``adapt`` changes them, and with them the buffer's size.
    """

    resample_filter: Tensor | None
    taps: Sequence[float] = fir.BINOMIAL

    def make_filter(self, resamples: bool = True) -> None:
        """Register the buffer, uninitialized, or None."""
        size = fir.filter_size(self.taps)
        self.register_buffer("resample_filter", torch.empty(size, size, dtype=torch.float32) if resamples else None)

    @torch.no_grad()
    def fill_filter(self) -> None:
        """Fill the buffer."""
        if self.resample_filter is not None:
            self.resample_filter.copy_(fir.filter_like(self.resample_filter, self.taps))


def adapt(module: torch.nn.Module, taps: Sequence[float], slope: float) -> None:
    """Set the filters and slopes of all layers in a module."""
    for layer in module.modules():
        if isinstance(layer, Resampling) and list(taps) != list(layer.taps):
            layer.taps = tuple(taps)
            layer.make_filter(layer.resample_filter is not None)
        if isinstance(layer, Rectifying):
            layer.slope = slope


class FullyConnected(Rectifying):
    """Linear map with an equalized learning rate: (N, F_in) -> (N, F_out); ``activated`` adds a leaky rectifier.

    ``lr_multiplier`` is the learning rate relative to other layers', and ``bias`` the bias's initial value.
    """

    bias: torch.nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activated: bool = False,
        lr_multiplier: float = 1.0,
        bias: float = 0.0,
    ) -> None:
        super().__init__((out_features, in_features), 1 / lr_multiplier, out_features)
        self.activated, self.initial_bias = activated, bias
        self.weight_gain, self.bias_gain = lr_multiplier / math.sqrt(in_features), lr_multiplier

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw the weight and set the bias."""
        super().initialize(generators)
        self.bias.fill_(self.initial_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map, in float32 whatever the weight's type: styles scale whole feature maps, and D's logits are few."""
        gain = ACTIVATION_GAIN if self.activated else 1.0
        weight = full(self.weight) * (self.weight_gain * gain)
        x = multiply(F.linear, x.to(weight.dtype), weight, full(self.bias) * (self.bias_gain * gain))
        return rectify(x, slope=self.slope) if self.activated else x


class LabelEmbedding(FullyConnected):
    """The linear map of a condition: labels (N,) int64, which count as one-hot, or vectors of K numbers -> (N, F)."""

    def forward(self, labels: Tensor) -> Tensor:
        """Map, in float32 whatever the weight's type."""
        table = self.weight.t() if labels.dim() == 1 else full(self.weight).t()
        return full(embed(labels, table)) * self.weight_gain + full(self.bias) * self.bias_gain


class MappingNetwork(torch.nn.Module):
    """Latent and label -> style vector, or label -> its projection in D.

    With a ``latent_size`` of 0 it reads only labels, with 0 classes only latents. All layers have W outputs; without
    any layer, the normalized embedding is the projection.
    """

    def __init__(
        self, latent_size: int, num_classes: int, out_features: int, num_layers: int, lr_multiplier: float = 0.01
    ) -> None:
        super().__init__()
        self.embed = LabelEmbedding(num_classes, out_features) if num_classes else None
        first = latent_size + (out_features if num_classes else 0)
        self.fc = torch.nn.ModuleList(
            FullyConnected(out_features if i else first, out_features, True, lr_multiplier) for i in range(num_layers)
        )

    def forward(self, latents: Tensor | None, labels: Tensor) -> Tensor:
        """(N, Z) or None, (N,) -> (N, W), float32 at least."""
        parts = [] if latents is None else [normalize(full(latents))]
        if self.embed is not None:
            parts.append(normalize(self.embed(labels)))
        x = torch.cat(parts, dim=1)
        for layer in self.fc:
            x = layer(x)
        return x


class Conv2d(Rectifying, Resampling):
    """Convolution of D with an equalized learning rate: (N, C_in, H, W) -> (N, C_out, H, W), or half as large.

    Args:
        activated: Whether bias and leaky rectifier follow.
        resamples: Whether to halve the resolution, after the filter; ``Doubled`` doubles it.
        clamp: Activations are kept within plus or minus this.
        half: Type to compute in, or None for the weight's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        activated: bool = True,
        resamples: bool = False,
        clamp: float | None = None,
        half: torch.dtype | None = None,
    ) -> None:
        super().__init__((out_channels, in_channels, kernel, kernel), 1.0, out_channels if activated else None)
        self.kernel, self.resamples, self.clamp, self.half_type = kernel, resamples, clamp, half
        self.weight_gain = 1 / math.sqrt(in_channels * kernel**2)
        self.make_filter(resamples)

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw the weight, clear the bias and fill the filter."""
        super().initialize(generators)
        self.fill_filter()

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """Convolve, and scale the output, and its limits, by ``gain``."""
        dtype = self.half_type or self.weight.dtype
        scale = gain if self.bias is None else ACTIVATION_GAIN * gain
        x = self._convolve(laid_out(x, dtype), (self.weight * (self.weight_gain * scale)).to(dtype))
        if self.bias is None:
            return x
        limit = None if self.clamp is None else self.clamp * gain
        return rectify_biased(x, (self.bias * scale).to(dtype), limit, self.slope)

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        padding = self.kernel // 2
        if self.resample_filter is None:
            return convolve(x, weight, padding=padding)
        if self.kernel == 1:  # convolving a quarter of the pixels costs a quarter
            return convolve(fir.downsample(x, self.resample_filter), weight)
        # The filter's padding and the convolution's are both added before the filter.
        padding += len(self.resample_filter) // 2 - 1
        return convolve(fir.blur(x, self.resample_filter, padding), weight, stride=2)


class Doubled(Conv2d):
    """Residual connection of G: convolution of kernel 1 without bias, and twice the resolution."""

    def __init__(self, in_channels: int, out_channels: int, half: torch.dtype | None) -> None:
        super().__init__(in_channels, out_channels, 1, activated=False, resamples=True, half=half)

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        x = convolve(x, weight)
        return x if self.resample_filter is None else fir.upsample(x, self.resample_filter)


class Modulated(Weighted):
    """Convolution whose input channels are scaled by an affine map of the style vector (section 2.2).

    Attributes:
        affine: Map from the style vector to the scales; its bias begins at 1.
        clamp: Activations are kept within plus or minus this.
        half_type: Type to compute in, or None for the weight's.
    """

    bias: torch.nn.Parameter

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        w_size: int,
        clamp: float | None,
        half: torch.dtype | None,
    ) -> None:
        super().__init__((out_channels, in_channels, kernel, kernel), 1.0, out_channels)
        self.affine = FullyConnected(w_size, in_channels, bias=1.0)
        self.clamp, self.half_type = clamp, half


class ToRGB(Modulated):
    """Feature map -> its contribution to the image, modulated but not demodulated."""

    def __init__(
        self, in_channels: int, image_channels: int, w_size: int, clamp: float | None, half: torch.dtype | None
    ) -> None:
        super().__init__(in_channels, image_channels, 1, w_size, clamp, half)
        self.weight_gain = 1 / math.sqrt(in_channels)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """(N, C, H, W), (N, W) -> (N, image channels, H, W), float32 at least: the image is a sum over resolutions."""
        dtype = self.half_type or self.weight.dtype
        styles = self.affine(w) * self.weight_gain
        x = laid_out(x, dtype) * styles.to(dtype)[:, :, None, None]
        x = convolve(x, self.weight.to(dtype), self.bias.to(dtype))
        x = x if self.clamp is None else x.clamp(-self.clamp, self.clamp)
        return laid_out(x, torch.promote_types(dtype, torch.float32))


class SynthesisLayer(Modulated, Rectifying, Resampling):
    """Modulated convolution of kernel 3, demodulation, noise, bias and leaky rectifier.

    Scaling the activations before and after one convolution for all samples equals the paper's own weight for each
    sample, without weights of N times the size.

    Attributes:
        noise_mode: ``random`` numbers from each sample's seed, the ``const`` buffer, or ``none``.
        noise_strength: Parameter (1,), or None in a layer without noise.
        noise_const: Buffer (H, W), float32, or None.
    """

    noise_strength: torch.nn.Parameter | None
    noise_const: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        w_size: int,
        size: Size,
        up: bool,
        stream: int | None,
        clamp: float | None,
        half: torch.dtype | None,
    ) -> None:
        """Take the ``size`` of the output, and the ``stream`` of a sample's seed that only this layer uses.

        Without a stream, the layer has no noise.
        """
        super().__init__(in_channels, out_channels, 3, w_size, clamp, half)
        self.size, self.up, self.stream = size, up, stream
        self.noise_mode = "random"
        has_noise = stream is not None
        self.register_parameter("noise_strength", torch.nn.Parameter(torch.empty(1)) if has_noise else None)
        const = torch.empty(*size, dtype=torch.float32) if has_noise else None
        self.register_buffer("noise_const", const)
        self.make_filter(up)

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw the weight and the constant noise, with strength 0, clear the bias, and fill the filter."""
        super().initialize(generators)
        if self.noise_strength is not None and self.noise_const is not None:
            self.noise_strength.zero_()
            draw_normal(self.noise_const, generators("noise_const"))
        self.fill_filter()

    def forward(self, x: Tensor, w: Tensor, seeds: Tensor, gain: float = 1.0) -> Tensor:
        """(N, C_in, H, W), (N, W), (N,) -> (N, C_out, H, W), twice as large if ``up``; it and its clamp times gain."""
        dtype = self.half_type or self.weight.dtype
        weight, styles = full(self.weight), self.affine(w)
        if dtype == torch.float16:
            # Products of styles and weights overflow fp16. Demodulation removes any scale (and its gradient, so the
            # scales need none). So both can be scaled to at most 1.
            weight = weight / (weight.detach().abs().amax(dim=(1, 2, 3), keepdim=True) * math.sqrt(weight[0].numel()))
            styles = styles / styles.detach().abs().amax(dim=1, keepdim=True)
        # Squared norm of each sample's weight, equation 3: a sum of many squares, so in float32.
        norms = F.linear(styles.square(), weight.square().sum(dim=(2, 3)))
        scale = ACTIVATION_GAIN * gain
        demodulation = (scale * torch.rsqrt(norms + _EPS)).to(dtype)[:, :, None, None]
        x = self._convolve(laid_out(x, dtype) * styles.to(dtype)[:, :, None, None], weight.to(dtype))
        drawn = self._noise(seeds)
        if drawn is None or self.noise_strength is None:
            x = x * demodulation
        else:
            x = torch.addcmul((scale * full(self.noise_strength) * drawn).to(dtype), x, demodulation)
        limit = None if self.clamp is None else self.clamp * gain
        return rectify_biased(x, (scale * self.bias).to(dtype), limit, self.slope)

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.resample_filter is None:
            return convolve(x, weight, padding=1)
        # Zeros between the pixels, convolution, filter: (H - 1) * 2 + 3 = 2H + 1 pixels, and 2H after the filter.
        x = linearly(lambda x: F.conv_transpose2d(x, weight.transpose(0, 1), stride=2), x)
        return fir.blur(x, self.resample_filter, padding=len(self.resample_filter) // 2 - 1, gain=4.0)

    def _noise(self, seeds: Tensor) -> Tensor | None:
        """Return noise (N, 1, H, W) or (H, W), or None."""
        if self.stream is None:
            return None
        if self.noise_mode == "random":
            return noise.normal(seeds, self.stream, (1, self.size.height, self.size.width))
        return self.noise_const if self.noise_mode == "const" else None


class MinibatchDeviation(torch.nn.Module):
    """Standard deviation over groups of images, as further feature maps (Karras et al. 2018, section 3).

    Groups are consecutive images. If the sizes of a rank's micro-batch and of its segments are multiples of the group's
    size, the result does not depend on the number of ranks, and real and fake images stay apart. Fewer images than a
    group form one group, as in StyleGAN2-ADA.

    Args:
        group: Number of images in a group; None for all.
        num_channels: Number of feature maps to add; each is the mean deviation of its share of the channels.

    Attributes:
        segments: Without a group, the number of equal parts of a batch, such as real and fake images, kept apart.
    """

    def __init__(self, group: int | None, num_channels: int) -> None:
        super().__init__()
        self.group, self.num_channels = group, num_channels
        if group is None:  # else no attribute: networks set it before each pass, and torch.compile checks it again
            self.segments = 1

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C + num_channels, H, W), in x's type.

        Raises:
            ValueError: The group does not divide N.
        """
        n, _, height, width = x.shape
        group = n // self.segments if self.group is None else min(self.group, n)
        if n % group:
            raise ValueError(f"{n} images do not divide into groups of {group}")
        grouped = full(x).view(n // group, group, self.num_channels, -1, height, width)  # squares: float32
        variance = (grouped - grouped.mean(dim=1, keepdim=True)).square().mean(dim=1)
        deviation = torch.sqrt(variance + _EPS).mean(dim=(2, 3, 4))  # (groups, num_channels)
        maps = deviation.repeat_interleave(group, dim=0)[:, :, None, None].expand(-1, -1, height, width)
        return torch.cat([x, maps.to(x.dtype)], dim=1)
