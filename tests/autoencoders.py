"""Tiny autoencoders, and latents on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bigsgan.config.data import Data


def write_latents(root: Path, num: int, posterior: bool) -> np.ndarray:
    """Latents of 4 channels at 8x8 in files of their own; the even ones are in class 0."""
    root.mkdir(exist_ok=True)
    numbers = np.random.default_rng(0).normal(size=(num, 8 if posterior else 4, 8, 8)).astype(np.float32)
    if posterior:
        numbers[:, 4:] = np.abs(numbers[:, 4:])
    for i in range(num):
        np.save(root / f"{i:03}.npy", numbers[i])
    labels = [[f"{i:03}.npy", i % 2] for i in reversed(range(num))]
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))
    return numbers


def write_autoencoder(root: Path, **more: Any) -> Path:
    """The configuration of an autoencoder that makes sides 8 times shorter, beside weights of nothing."""
    root.mkdir(exist_ok=True)
    about = {"latent_channels": 4, "block_out_channels": [1, 1, 1, 1], "scaling_factor": 0.5, "shift_factor": 0.25}
    (root / "config.json").write_text(json.dumps(about | more))
    save_file({"nothing": torch.zeros(1)}, root / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    return root


def latents(tmp_path: Path, **more: Any) -> Data:
    codec = more.pop("codec", None) or {"kind": "diffusers", "path": str(write_autoencoder(tmp_path / "vae"))}
    given = {"kind": "latents", "root": str(tmp_path / "data"), "resolution": 64, "image_channels": 3, "num_classes": 2}
    return Data(**{**given, "codec": codec, "num_workers": 0, **more})


def save_autoencoder(root: Path) -> Any:
    """A tiny one with random weights."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    network = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(4, 4, 4, 4),
        norm_num_groups=2,
        scaling_factor=0.5,
    )
    network.save_pretrained(root)
    return network.eval()
