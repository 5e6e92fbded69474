"""Networks of plain torch, as people have them: the recipes of some tests name them as code from outside."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from bigsgan.models.network import LayerStack
from tests.public_dit import DiT


class Generator(nn.Module):
    """Embedding, linear map, and convolutions with group norm and batch norm."""

    def __init__(self, latent_size: int, num_classes: int, resolution: int, image_channels: int, width: int = 8):
        super().__init__()
        self.side = resolution // 4
        self.embedding = nn.Embedding(max(num_classes, 1), latent_size)
        self.linear = nn.Linear(latent_size, width * self.side**2)
        self.gain = nn.Parameter(torch.tensor(1.5))  # without dimensions
        self.body = nn.Sequential(
            *(nn.GroupNorm(2, width), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)),
            *(nn.BatchNorm2d(width), nn.SiLU(), nn.Upsample(scale_factor=2)),
            nn.Conv2d(width, image_channels, 3, padding=1),
        )

    def forward(self, latents, labels):
        """Images of latents (N, Z) and labels (N,)."""
        x = self.gain * self.linear(latents + self.embedding(labels))
        return torch.tanh(self.body(x.unflatten(1, (-1, self.side, self.side))))


class Discriminator(nn.Module):
    """Convolution, attention over patches, layer norm, a constant table of positions, projection on the class."""

    def __init__(self, num_classes: int, resolution: int, image_channels: int, width: int = 8, heads: int = 2):
        super().__init__()
        self.convolution = nn.Conv2d(image_channels, width, 4, stride=4)
        table = torch.linspace(-1, 1, width * (resolution // 4) ** 2).view(1, -1, width)
        self.positions = nn.Parameter(table, requires_grad=False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.embedding = nn.Embedding(max(num_classes, 1), width)
        self.head, self.temperature = nn.Linear(width, 1), nn.Parameter(torch.tensor(0.7))

    def forward(self, images, labels):
        """Logits (N,) of images and labels (N,)."""
        h = F.silu(self.convolution(images)).flatten(2).mT + self.positions
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0]).mean(1)
        return self.head(h).squeeze(1) + (h * self.embedding(labels)).sum(1) * self.temperature.exp()


class First(nn.Module):
    """Latents and labels -> features."""

    def __init__(self, latent_size, num_classes, width):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(max(num_classes, 1), latent_size), nn.Linear(latent_size, width)

    def forward(self, latents, labels):
        """(N, Z), (N,) -> (N, width)."""
        return F.silu(self.linear(latents + self.embedding(labels)))


class Last(nn.Module):
    """Features -> images."""

    def __init__(self, width, image_channels, resolution):
        super().__init__()
        self.linear, self.gain = nn.Linear(width, image_channels * resolution**2), nn.Parameter(torch.tensor(1.5))
        self.shape = image_channels, resolution, resolution

    def forward(self, h):
        """(N, width) -> images."""
        return torch.tanh(self.gain * self.linear(h)).unflatten(1, self.shape)


def generator_in_layers(latent_size, num_classes, resolution, image_channels, width: int = 8, depth: int = 2):
    """A list of functions that make layers, and plain ones of torch's among them."""
    middle = [part for _ in range(depth) for part in (partial(nn.Linear, width, width), partial(nn.LayerNorm, width))]
    first, last = partial(First, latent_size, num_classes, width), partial(Last, width, image_channels, resolution)
    return [first, *middle, nn.SiLU, last]


class Beside(nn.Module):
    """Applies a module to the first entry of the carry; with ``labels`` ends in a logit."""

    def __init__(self, module, ends=False):
        super().__init__()
        self.module, self.ends = module, ends

    def forward(self, h, labels):
        """The carry of the next layer, or the logits (N,)."""
        h = self.module(h)
        return (h.mean(dim=1) + 0 * labels,) if self.ends else (h, labels)


def discriminator_in_layers(resolution, image_channels, width: int = 8):
    """A ``LayerStack`` of torch's layers, which are initialized by torch's rules."""
    side = resolution // 4
    return LayerStack(
        [
            Beside(nn.Sequential(nn.Conv2d(image_channels, width, 4, stride=4), nn.SiLU(), nn.GroupNorm(2, width))),
            Beside(nn.Sequential(nn.Flatten(2), nn.Linear(side**2, width), nn.SiLU())),
            Beside(nn.TransformerEncoderLayer(width, 2, width, dropout=0.0, activation="gelu", batch_first=True)),
            Beside(nn.Sequential(nn.Flatten(1), nn.Linear(width**2, 1)), ends=True),
        ]
    )


class Trunk(nn.Module):
    """Features of images."""

    def __init__(self, image_channels, width):
        super().__init__()
        self.convolution = nn.Conv2d(image_channels, width, 4, stride=2, padding=1)

    def forward(self, images, labels):
        """(N, C, R, R), (N,) -> (N, width, R / 2, R / 2)."""
        return F.silu(self.convolution(images))


class Heads(nn.Module):
    """Maps of logits at two scales, and one logit, in lists as public discriminators return them."""

    def __init__(self, width):
        super().__init__()
        self.fine, self.coarse = (nn.Conv2d(width, 1, 3, padding=1) for _ in range(2))
        self.whole = nn.Linear(width, 1)

    def forward(self, h):
        """(N, width, H, H) -> (N, 1, H, H), (N, 1, H / 2, H / 2) and (N,)."""
        return [[self.fine(h)], [self.coarse(F.avg_pool2d(h, 2)), 3 * self.whole(h.mean((2, 3))).squeeze(1)]]


def discriminator_of_maps(image_channels, width: int = 6):
    """Two layers, of which the last returns several maps of logits."""
    return [partial(Trunk, image_channels, width), partial(Heads, width)]


class OneStep(nn.Module):
    """A public DiT as a generator of one step."""

    def __init__(self, latent_size, num_classes, resolution, image_channels, depth: int = 2, width: int = 16):
        super().__init__()
        self.shape = image_channels, resolution, resolution
        more = {"num_heads": 2, "num_classes": num_classes, "class_dropout_prob": 0.0, "learn_sigma": False}
        self.dit = DiT(resolution, 4, image_channels, width, depth, **more)
        nn.init.normal_(self.dit.final_layer.linear.weight, std=0.1)  # DiT's own are 0

    def forward(self, latents, labels):
        """Latents (N, C * R**2) and labels (N,) -> images (N, C, R, R)."""
        return self.dit(latents.unflatten(1, self.shape), torch.ones(len(latents), device=latents.device), labels)


WHOLE = [
    'generator={family: "tests.outside:Generator", latent_size: 12}',
    'discriminator={family: "tests.outside:Discriminator", arguments: {width: 8}}',
    "optimizer.generator.lr=0.05",
]
"""Overrides of a game between two modules."""

LAYERED = [
    'generator={family: "tests.outside:generator_in_layers", latent_size: 12, arguments: {depth: 2}}',
    'discriminator={family: "tests.outside:discriminator_in_layers"}',
    "optimizer.generator.lr=0.05",
]
"""Overrides of a game between a list of functions that make layers and a ``LayerStack``."""


class Patches(nn.Module):
    """The first layer of a network whose labels are tokens: latents (N, Z), or images, become patches (N, P, width)."""

    def __init__(self, image_channels, resolution, width, latent_size=0):
        super().__init__()
        self.num, size = (resolution // 4) ** 2, image_channels * 16
        self.linear = nn.Linear(latent_size or size, self.num * width if latent_size else width)

    def forward(self, first, tokens, mask):
        """First, (N, T, W), (N, T) -> patches, tokens, mask."""
        if first.dim() == 4:
            first = F.pixel_unshuffle(first, 4).flatten(2).mT
        return self.linear(first).reshape(len(first), self.num, -1), tokens, mask


class Attending(nn.Module):
    """Patches attend to the tokens where the mask is true, and to one of their own."""

    def __init__(self, condition_size, width):
        super().__init__()
        self.linear, self.own = nn.Linear(condition_size[1], width), nn.Parameter(torch.ones(1, 1, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, h, tokens, mask):
        """(N, P, width), tokens, mask -> the same."""
        y = torch.cat([self.own.expand(len(h), -1, -1), self.linear(tokens)], 1)
        hidden = torch.cat([mask.new_zeros(len(h), 1), ~mask], 1)
        return h + self.attention(h, y, y, key_padding_mask=hidden, need_weights=False)[0], tokens, mask


class Unpatched(nn.Module):
    """The last layer: patches become images, or a logit."""

    def __init__(self, image_channels, resolution, width, ends):
        super().__init__()
        self.linear, self.side, self.ends = nn.Linear(width, 1 if ends else image_channels * 16), resolution // 4, ends

    def forward(self, h, tokens, mask):
        """Patches, tokens, mask -> images (N, C, R, R) or logits (N,)."""
        if self.ends:
            return self.linear(h.mean(1)).squeeze(1)
        return torch.tanh(F.pixel_shuffle(self.linear(h).mT.unflatten(2, (self.side, self.side)), 4))


def attending_generator(latent_size, condition_size, resolution, image_channels, width: int = 8):
    """The layers of a network with two blocks of cross-attention."""
    return attending_discriminator(condition_size, resolution, image_channels, width, latent_size)


def attending_discriminator(condition_size, resolution, image_channels, width: int = 8, latents: int = 0):
    """The same, of a generator if it reads ``latents``."""
    first = partial(Patches, image_channels, resolution, width, latents)
    blocks = [partial(Attending, condition_size, width)] * 2
    return [first, *blocks, partial(Unpatched, image_channels, resolution, width, not latents)]


TOKENS = [
    "data={kind: synthetic, resolution: 16, num_images: 48, num_classes: 0, condition_size: [5, 3]}",
    "data.condition_dropout=0.25",
    'generator={family: "tests.outside:attending_generator", latent_size: 12}',
    'discriminator={family: "tests.outside:attending_discriminator"}',
    "optimizer.generator.lr=0.05",
    "objective.fake_labels=data",
    "objective.reuse_fakes=true",
]
"""Overrides of a game between networks that read tokens."""


class TokensToVelocities(nn.Module):
    """Images with noise (N, C * R * R), tokens, mask, times (N,) -> estimates of the images (N, C, R, R)."""

    def __init__(self, latent_size, condition_size, resolution, image_channels, width: int = 8):
        super().__init__()
        self.shape = image_channels, resolution, resolution
        self.noisy, self.tokens = nn.Linear(latent_size, width), nn.Linear(condition_size[1], width)
        self.times, self.velocities = nn.Linear(1, width), nn.Linear(width, latent_size)

    def forward(self, noisy, tokens, mask, times):
        """Estimate."""
        seen = (self.tokens(tokens) * mask[:, :, None]).sum(1)
        h = torch.tanh(self.noisy(noisy) + seen + self.times(times[:, None]))
        return (noisy - times[:, None] * self.velocities(h)).unflatten(1, self.shape)
