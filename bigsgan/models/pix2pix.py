"""pix2pix (Isola, Zhu, Zhou and Efros 2017, "Image-to-image translation with conditional adversarial networks").

And CycleGAN's generator of residual blocks (Zhu, Park, Isola and Efros 2017, arXiv 1703.10593).

Shapes: N samples, C channels, H x W pixels, P patches. The carry of the generator is (h (N, C, H, W), seeds (N,) while
dropout follows); a U-Net's carry grows by the skipped feature maps, fine to coarse, on the way down and shrinks on the
way up. The carry of the discriminator is (h,).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.pix2pix import Pix2PixDiscriminator, Pix2PixGenerator, pix2pix_levels
from bigsgan.images.size import Size
from bigsgan.models import noise
from bigsgan.models.batch_norm import AffineBatchNorm
from bigsgan.models.dual import has_tangent
from bigsgan.models.plain import Conv2d, ConvTranspose2d
from bigsgan.models.precision import full

_STD = 0.02
_SLOPE = 0.2
_EPSILON = 1e-5
_DROPPED = 0.5
_NUM_DROPOUTS = 3


class GeneratorInput(nn.Module):
    """The first halving of a U-Net, without normalization."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, keeps_seeds: bool) -> None:
        super().__init__()
        self.keeps_seeds = keeps_seeds
        self.conv = Conv2d(in_channels, out_channels, 4, _STD, stride=2, padding=1, bias=_biased(norm))

    def forward(self, images: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        """Images (N, C_in, H, W) in [-1, 1], (N,), (N,) -> (N, C, H/2, W/2), seeds."""
        h = self.conv(images)
        return (h, seeds) if self.keeps_seeds else (h,)


class Down(nn.Module):
    """Leaky ReLU, halving, normalization; the carry keeps the input beside the output.

    The coarsest level has no normalization, which would leave nothing of a single pixel.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str, is_coarsest: bool) -> None:
        super().__init__()
        self.conv = Conv2d(in_channels, out_channels, 4, _STD, stride=2, padding=1, bias=_biased(norm))
        self.norm = nn.Identity() if is_coarsest else _norm(norm, out_channels)

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), ... -> (N, C_out, H/2, W/2), ..., (N, C_in, H, W)."""
        return self.norm(self.conv(F.leaky_relu(h, _SLOPE))), *rest, h


class Up(nn.Module):
    """ReLU, doubling, normalization, dropout; the last skipped feature map is concatenated with the result.

    ``stream`` is that of the dropout's draws, None for no dropout; seeds are kept if dropout follows later.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str, stream: int | None, keeps_seeds: bool) -> None:
        super().__init__()
        self.stream, self.keeps_seeds = stream, keeps_seeds
        self.conv = ConvTranspose2d(in_channels, out_channels, 4, _STD, stride=2, padding=1, bias=_biased(norm))
        self.norm = _norm(norm, out_channels)

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), [seeds,] ..., (N, C_out, 2H, 2W) -> (N, 2 * C_out, 2H, 2W), [seeds,] ...."""
        *rest_before, skipped = rest
        x = self.norm(self.conv(F.relu(h)))
        if self.stream is not None:
            if self.training:
                x = _dropped(x, rest_before[0], self.stream)
            if not self.keeps_seeds:
                rest_before = rest_before[1:]
        return torch.cat([skipped, x], dim=1), *rest_before


class GeneratorOutput(nn.Module):
    """The last doubling of a U-Net -> image."""

    def __init__(self, channels: int, image_channels: int) -> None:
        super().__init__()
        self.conv = ConvTranspose2d(channels, image_channels, 4, _STD, stride=2, padding=1)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> (N, image channels, 2H, 2W) in [-1, 1], float32 whatever the network's type."""
        return (torch.tanh(full(self.conv(F.relu(h)))),)


class ResidualInput(nn.Module):
    """Image -> the finest feature map of the network of residual blocks."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, keeps_seeds: bool) -> None:
        super().__init__()
        self.keeps_seeds = keeps_seeds
        self.conv = Conv2d(in_channels, out_channels, 7, _STD, stride=1, padding=0, bias=_biased(norm))
        self.norm = _norm(norm, out_channels)

    def forward(self, images: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        """Images (N, C_in, H, W) in [-1, 1], (N,), (N,) -> (N, C, H, W), seeds."""
        h = F.relu(self.norm(self.conv(_reflected(images, 3))))
        return (h, seeds) if self.keeps_seeds else (h,)


class Resized(nn.Module):
    """Halves or doubles the resolution and doubles or halves the channels: convolution, normalization, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, norm: str) -> None:
        super().__init__()
        conv = Conv2d if out_channels > in_channels else _Doubling
        self.conv = conv(in_channels, out_channels, 3, _STD, stride=2, padding=1, bias=_biased(norm))
        self.norm = _norm(norm, out_channels)

    def forward(self, h: Tensor, *seeds: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), [seeds] -> (N, C_out, H/2, W/2) or (N, C_out, 2H, 2W), [seeds]."""
        return F.relu(self.norm(self.conv(h))), *seeds


class ResidualBlock(nn.Module):
    """Two convolutions, whose result is added to the input.

    ``stream`` is that of the dropout's draws, None for no dropout; seeds are kept if dropout follows later.
    """

    def __init__(self, channels: int, norm: str, stream: int | None, keeps_seeds: bool) -> None:
        super().__init__()
        self.stream, self.keeps_seeds = stream, keeps_seeds
        self.conv1 = Conv2d(channels, channels, 3, _STD, stride=1, padding=0, bias=_biased(norm))
        self.norm1 = _norm(norm, channels)
        self.conv2 = Conv2d(channels, channels, 3, _STD, stride=1, padding=0, bias=_biased(norm))
        self.norm2 = _norm(norm, channels)

    def forward(self, h: Tensor, *seeds: Tensor) -> tuple[Tensor, ...]:
        """(N, C, H, W), [seeds] -> (N, C, H, W), [seeds]."""
        x = F.relu(self.norm1(self.conv1(_reflected(h, 1))))
        if self.stream is not None and self.training:
            x = _dropped(x, seeds[0], self.stream)
        x = h + self.norm2(self.conv2(_reflected(x, 1)))
        return (x, *seeds) if self.keeps_seeds else (x,)


class ResidualOutput(nn.Module):
    """The finest feature map of the network of residual blocks -> image."""

    def __init__(self, channels: int, image_channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, image_channels, 7, _STD, stride=1, padding=0)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> (N, image channels, H, W) in [-1, 1], float32 whatever the network's type."""
        return (torch.tanh(full(self.conv(_reflected(h, 3)))),)


class _Doubling(ConvTranspose2d):
    """Transposed convolution of kernel 3 that doubles the resolution exactly: (N, C_in, H, W) -> (N, C_out, 2H, 2W)."""

    output_padding = 1


class DiscriminatorInput(nn.Module):
    """Input, if there is one, and image, concatenated along the channels -> the first halving, without normalization.

    Here and in the discriminator's other layers, a kernel of 4 halves the resolution, and one of 1 keeps it.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__()
        self.conv = _judging(in_channels, out_channels, kernel, stride=2 if kernel > 1 else 1, bias=True)

    def forward(self, images: Tensor, labels: Tensor, *inputs: Tensor) -> tuple[Tensor]:
        """(N, C, H, W), (N,), [(N, C_in, H, W)] -> (N, C_out, H/2, W/2), or (N, C_out, H, W)."""
        return (F.leaky_relu(self.conv(torch.cat([*inputs, images], dim=1)), _SLOPE),)


class DiscriminatorBlock(nn.Module):
    """Convolution, normalization, leaky ReLU."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = _judging(in_channels, out_channels, kernel, stride, _biased(norm))
        self.norm = _norm(norm, out_channels)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C_in, H, W) -> (N, C_out, H / stride, W / stride), or (N, C_out, H - 1, W - 1) for kernel 4, stride 1."""
        return (F.leaky_relu(self.norm(self.conv(h)), _SLOPE),)


class DiscriminatorHead(nn.Module):
    """Feature map -> a logit for each patch."""

    def __init__(self, channels: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.conv = _judging(channels, 1, kernel, stride=1, bias=bias)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> logits (N, P), float32 whatever the network's type."""
        return (full(self.conv(h).flatten(1)),)


class InstanceNorm(nn.Module):
    """Normalizes each channel of each sample over its pixels (Ulyanov et al. 2016, arXiv 1607.08022)."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        exact = full(x)  # sums over H * W values
        if not has_tangent(x):
            return F.instance_norm(exact, eps=_EPSILON).to(x.dtype)
        var, mean = torch.var_mean(exact, dim=(2, 3), correction=0, keepdim=True)  # as in batch_norm.py
        return ((exact - mean) * torch.rsqrt(var + _EPSILON)).to(x.dtype)


def _norm(norm: str, channels: int) -> nn.Module:
    if norm == "batch":
        return AffineBatchNorm(channels)
    return InstanceNorm() if norm == "instance" else nn.Identity()


def _biased(norm: str) -> bool:
    """Whether a convolution before this norm has a bias, as in the public project; without a norm it has none."""
    return norm == "instance"


def _judging(in_channels: int, out_channels: int, kernel: int, stride: int, bias: bool) -> Conv2d:
    return Conv2d(in_channels, out_channels, kernel, _STD, stride, padding=1 if kernel > 1 else 0, bias=bias)


def _dropped(x: Tensor, seeds: Tensor, stream: int) -> Tensor:
    """Apply dropout to (N, C, H, W), with draws from the samples' seeds (N,)."""
    kept = noise.uniform(seeds, stream, tuple(x.shape[1:])) >= _DROPPED
    return x * kept.to(x.dtype) / (1 - _DROPPED)


def _reflected(x: Tensor, num: int) -> Tensor:
    """Pad (N, C, H, W) by ``num`` mirrored pixels on each side.

    On a GPU, torch's own padding adds up its gradient in an order that differs from run to run.
    """
    for dim in (2, 3):
        size = x.shape[dim]
        before, after = x.narrow(dim, 1, num).flip(dim), x.narrow(dim, size - 1 - num, num).flip(dim)
        x = torch.cat([before, x, after], dim=dim)
    return x


def generator_layers(config: Pix2PixGenerator, size: Size, image_channels: int, input_channels: int) -> list[nn.Module]:
    """Flat layer list: images (N, input channels, H, W), labels (N,), seeds (N,) -> (N, image channels, H, W)."""
    if config.architecture == "resnet":
        return _residual_layers(config, image_channels, input_channels)
    levels = pix2pix_levels(size)
    widths = [config.channels * min(2**i, 8) for i in range(levels)]
    # Dropout follows the coarsest doublings except the first, as far as these keep the full width.
    num_dropouts = min(_NUM_DROPOUTS, max(levels - 5, 0)) if config.dropout else 0
    layers: list[nn.Module] = [GeneratorInput(input_channels, widths[0], config.norm, num_dropouts > 0)]
    for i in range(1, levels):
        layers.append(Down(widths[i - 1], widths[i], config.norm, is_coarsest=i == levels - 1))
    for i in range(levels - 1, 0, -1):
        dropout = levels - 1 - i  # 0 for the coarsest, which has none
        stream = dropout if 1 <= dropout <= num_dropouts else None
        in_channels = widths[i] if i == levels - 1 else 2 * widths[i]
        layers.append(Up(in_channels, widths[i - 1], config.norm, stream, dropout < num_dropouts))
    return [*layers, GeneratorOutput(2 * widths[0], image_channels)]


def _residual_layers(config: Pix2PixGenerator, image_channels: int, input_channels: int) -> list[nn.Module]:
    width, num = config.channels, config.num_blocks
    layers: list[nn.Module] = [ResidualInput(input_channels, width, config.norm, keeps_seeds=config.dropout)]
    layers += [Resized(c, 2 * c, config.norm) for c in (width, 2 * width)]
    for i in range(1, num + 1):
        stream = i if config.dropout else None
        layers.append(ResidualBlock(4 * width, config.norm, stream, keeps_seeds=config.dropout and i < num))
    layers += [Resized(2 * c, c, config.norm) for c in (2 * width, width)]
    return [*layers, ResidualOutput(width, image_channels)]


def discriminator_layers(
    config: Pix2PixDiscriminator, size: Size, image_channels: int, input_channels: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,), inputs (N, input channels, H, W) -> (N, P)."""
    both, is_fine = image_channels + input_channels, config.architecture == "pixels"
    kernel, depth = (1, 1) if is_fine else (4, config.depth)
    widths = [config.channels * min(2**i, 8) for i in range(depth + 1)]
    layers: list[nn.Module] = [DiscriminatorInput(both, widths[0], kernel)]
    for i in range(1, depth + 1):
        stride = 2 if i < depth else 1
        layers.append(DiscriminatorBlock(widths[i - 1], widths[i], config.norm, kernel, stride))
    return [*layers, DiscriminatorHead(widths[-1], kernel, bias=not is_fine or _biased(config.norm))]
