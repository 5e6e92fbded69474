"""Conditions that are tokens, such as a text encoder's: padded to one shape, with a mask behind each token's numbers.

Shapes: T, W are ``data.condition_size``: the most tokens, and the numbers of each; t tokens of one image.
"""

from __future__ import annotations

import numpy as np

from bigsgan.config.data import Data
from bigsgan.images.npz import array_of

TOKENS = "tokens.npy"
"""Field of a sample in a shard, with its tokens (t, W)."""


def padded(data: Data, tokens: np.ndarray) -> np.ndarray:
    """Return tokens (t, W) or, with a mask behind their numbers, (t, W + 1) as (T, W + 1) float32.

    What the mask leaves out is 0.

    Raises:
        ValueError: They have another shape, numbers that are not finite, or another mask than of 0 and 1.
    """
    (most, width), shape = data.condition_shape, tokens.shape
    if tokens.ndim != 2 or shape[1] not in (width - 1, width) or len(tokens) > most:
        raise ValueError(f"it has the shape {shape}, not (t, {width - 1}) with t up to {most}")
    found = np.zeros((most, width), np.float32)
    found[: len(tokens), -1] = 1
    found[: len(tokens), : shape[1]] = tokens
    if not np.isfinite(found).all():
        raise ValueError("it has a number that is not finite")
    if not np.isin(found[:, -1], (0, 1)).all():
        raise ValueError("its mask, the last number of each token, is not 0 or 1")
    found[found[:, -1] == 0] = 0
    return found


def read_tokens(data: Data, content: bytes) -> np.ndarray:
    """Return the tokens of a .npy file as (T, W + 1) float32; none, where these may be missing, of an empty file.

    Raises:
        ValueError: It is damaged, does not fit (see ``padded``), or has no tokens though none may be missing.
    """
    return present(data, padded(data, array_of(content)) if content else np.zeros(data.condition_shape, np.float32))


def present(data: Data, tokens: np.ndarray) -> np.ndarray:
    """Return padded tokens; raise ValueError if there are none though none may be missing."""
    if data.missing_labels == "refuse" and not tokens[:, -1].any():
        raise ValueError("it is missing")
    return tokens
