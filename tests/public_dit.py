"""A DiT in the style of the public one (Peebles and Xie 2022, arXiv 2212.09748): frozen positions, numpy, zeros."""

import math

import numpy as np
import torch
from torch import nn


def modulate(x, shift, scale):
    """Shift and scale each token."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    """Times -> vectors."""

    def __init__(self, hidden_size, frequency_embedding_size=32):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.size = frequency_embedding_size

    def forward(self, t):
        """(N,) -> (N, W)."""
        half = self.size // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(0, half, dtype=torch.float32) / half).to(t.device)
        angles = t[:, None].float() * frequencies[None]
        return self.mlp(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1))


class LabelEmbedder(nn.Module):
    """Labels -> vectors, some of them dropped in training."""

    def __init__(self, num_classes, hidden_size, dropout_prob):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + (dropout_prob > 0), hidden_size)
        self.num_classes, self.dropout_prob = num_classes, dropout_prob

    def forward(self, labels, train):
        """(N,) -> (N, W)."""
        if train and self.dropout_prob > 0:
            drop = torch.rand(labels.shape[0], device=labels.device) < self.dropout_prob
            labels = torch.where(drop, self.num_classes, labels)
        return self.embedding_table(labels)


class Attention(nn.Module):
    """Self-attention by torch's kernels."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        """(N, T, W) -> (N, T, W)."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))


class DiTBlock(nn.Module):
    """A block with adaLN-Zero."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * hidden_size, hidden_size),
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x, c):
        """(N, T, W), (N, W) -> (N, T, W)."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_a, scale_a))
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class FinalLayer(nn.Module):
    """Tokens -> patches."""

    def __init__(self, hidden_size, patch_size, out_channels):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x, c):
        """(N, T, W), (N, W) -> (N, T, P * P * C)."""
        return self.linear(modulate(self.norm_final(x), *self.adaLN_modulation(c).chunk(2, dim=1)))


class DiT(nn.Module):
    """Noisy images, times and labels -> images."""

    def __init__(
        self, input_size, patch_size, in_channels, hidden_size, depth, num_heads, mlp_ratio=4.0,
        class_dropout_prob=0.1, num_classes=1000, learn_sigma=True,
    ):  # fmt: skip
        super().__init__()
        self.out_channels, self.patch_size = in_channels * (2 if learn_sigma else 1), patch_size
        self.x_embedder = nn.Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob)
        self.side = input_size // patch_size
        self.pos_embed = nn.Parameter(torch.zeros(1, self.side**2, hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(hidden_size, num_heads) for _ in range(depth)])
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self.initialize_weights()

    def initialize_weights(self):
        """Xavier weights, positions of sines, and zeros where blocks begin as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.constant_(module.bias, 0)
        places = np.arange(self.side**2, dtype=np.float64)[:, None]
        angles = places / 10000 ** (np.arange(self.pos_embed.shape[-1] // 2) / self.pos_embed.shape[-1])
        self.pos_embed.data.copy_(torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], 1)).float()[None])
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        for block in (*self.blocks, self.final_layer):
            nn.init.constant_(block.adaLN_modulation[-1].weight, 0)
        nn.init.constant_(self.final_layer.linear.weight, 0)

    def forward(self, x, t, y):
        """(N, C, R, R), (N,), (N,) -> (N, C, R, R)."""
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y, self.training)
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c).reshape(
            -1, self.side, self.side, self.patch_size, self.patch_size, self.out_channels
        )
        size = self.side * self.patch_size
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, self.out_channels, size, size)
