"""State dicts of SiT's published networks (Ma et al. 2024, arXiv 2401.08740), and the sections that they fit.

SiT reads t x + (1 - t) z of images x and noise z, and predicts x - z. Our generator reads (1 - t') x + t' z and
predicts z - x. So t' = 1 - t, the last linear map changes its sign, and the first map of times is composed with what
makes features of t out of those of t'. The embedding of no class is that of a null label. Left out are outputs that
SiT does not use.
``sources.SOURCES`` lists the errors raised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigsgan.config.families.dit import SIZES
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models.transformer import sines_of_positions
from bigsgan.weights.gat import inside, latent_data
from bigsgan.weights.optimizer_state import Moments
from bigsgan.weights.settings import SNAPSHOT, Options, Settings, half_life_nimg, short
from bigsgan.weights.stylegan_pickle import ForeignNetwork

_IN_BLOCK = {
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.out",
    "mlp.fc1": "perceptron.expand",
    "mlp.fc2": "perceptron.contract",
    "adaLN_modulation.1": "modulation.linear",
}
_IN_LAST = {"adaLN_modulation.1": "modulation.linear", "linear": "linear"}
_PATCHES, _POSITIONS, _CLASSES = "x_embedder.proj.weight", "pos_embed", "y_embedder.embedding_table.weight"
_TIMES, _OF_ALL = "t_embedder.mlp.0.weight", "t_embedder.mlp.2.bias"
_LAST = ("final_layer.linear.weight", "final_layer.linear.bias")
_DRIFT = 0.01
"""Rounding of the positions in an EMA, which the trainer averages too; other tables differ by more than 1."""
_GAME = {"path_type": "Linear", "prediction": "velocity"}
"""Arguments of the trainer by which it learns what our generator does."""
_OF_SHAPES_OR_MACHINE = (
    *("model", "image_size", "num_classes", "data_path", "results_dir", "epochs", "num_workers", "log_every"),
    *("ckpt_every", "sample_every", "wandb", "ckpt"),
)
_DECAY = 0.9999
_MOST_IMAGES = 1 << 20
WITHOUT_MOMENTS = "the squares of gradients do not fit the map of times"
CHECKPOINT = {"G": "model", "G_ema": "ema"}, {"G": "opt"}
"""Names of a snapshot's networks, and of their optimizers' states, in a checkpoint of the public trainer."""


def generator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our generator, as its ``generator_section`` describes it."""
    names = _names(_depth(state))
    for name in sorted(names.keys() ^ (state.keys() - {_POSITIONS})):
        raise _foreign(f"{name} is {'missing' if name in names else 'unknown'}")
    _check_positions(state)
    _, channels, patch, _ = state[_PATCHES].shape
    if len(state[_LAST[0]]) != 2 * channels * patch**2:
        raise _foreign(f"{_LAST[0]} does not have {2 * channels * patch**2} rows")
    classes, null = state[_CLASSES].split([len(state[_CLASSES]) - 1, 1])
    changed = {
        _PATCHES: state[_PATCHES].flatten(1),
        _TIMES: _turned(state[_TIMES]),
        _CLASSES: classes - null,  # the embedding of a null vector is 0, and joins what is added to all
        _OF_ALL: state[_OF_ALL] + null[0],
        **{name: -_of_velocities(state, name)[:, 0].flatten(0, 1) for name in _LAST},
    }
    return {f"layers.{ours}": changed.get(theirs, state[theirs]) for theirs, ours in names.items()}


def generator_section(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Keys of a recipe's ``generator`` section."""
    depth, (width, channels, patch, _) = _depth(state), state[_PATCHES].shape
    heads = {size[:2]: size[2] for size in SIZES.values()}.get((depth, width))
    if heads is None:
        problem = f"are of {depth} blocks of {width} features, which is no published size, and do not tell the heads"
        raise UserError("weights", None, problem, "give a SiT of size S, B, L or XL")
    latent_size = channels * (patch * _side(state)) ** 2
    sizes = {"depth": depth, "width": width, "heads": heads, "patch": patch, "latent_size": latent_size}
    return {"family": "dit", **sizes, "times": True, "time_scale": 1.0}


def data_section(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Keys of a recipe's ``data`` that follow from a generator's shapes, with the published code's autoencoder."""
    _, channels, patch, _ = state[_PATCHES].shape
    data = latent_data(patch * _side(state), channels, len(state[_CLASSES]) - 1)
    return {**data, "missing_labels": "accept", "condition_dropout": 0.1}


def untold(network: str, section: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """No keys: what a state dict does not tell is fixed in the published code."""
    return ()


def left_out(state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Descriptions of a published generator's parts that have no place here, except its positions."""
    found = []
    if any(_of_velocities(state, name)[:, 1].any() for name in _LAST):
        found.append("outputs besides the velocity, not 0, as in a DiT, which predicts noise and cannot be told apart")
    return tuple(found)


def moments(state_dict: Mapping[str, Any], network: ForeignNetwork) -> Moments:
    """Raise a ValueError: the map of times was composed with another, which squares of its gradients cannot follow."""
    raise ValueError(WITHOUT_MOMENTS)


def checkpoint_settings(
    path: Path, args: Mapping[str, Any], steps: Any, has_heads: bool
) -> tuple[Settings, int | None]:
    """Settings in a checkpoint of the public trainer, which does not tell the images seen.

    Raises:
        UserError: It predicts something else than velocities along straight lines.
    """
    options = Options(path, {key: value for key, value in args.items() if isinstance(key, str)})
    for name, needed in _GAME.items():
        if (given := options.value(name)) not in (None, needed):
            problem = f"are of a SiT whose trainer's {name} is {short(given)} instead of {needed}"
            raise UserError("weights", None, problem, f"give one of {name} {needed}")
    for name in _OF_SHAPES_OR_MACHINE:
        options.value(name)
    batch, keys = options.value("global_batch_size"), {}
    if type(batch) is int and 0 < batch < _MOST_IMAGES:
        keys = {"batch": batch, "ema": {"half_life_nimg": half_life_nimg(batch, _DECAY)}}
    return Settings(SNAPSHOT, keys, options.left()), None


def _names(depth: int) -> dict[str, str]:
    """Our names of parameters, by the published ones."""
    names = {_CLASSES: "0.embedding.weight", **inside("x_embedder", "0", {"proj": "linear"})}
    names |= inside("t_embedder.mlp", "0.times", {"0": "expand", "2": "contract"})
    for i in range(depth):
        names |= inside(f"blocks.{i}", f"{1 + i}", _IN_BLOCK)
    return names | inside("final_layer", f"{1 + depth}", _IN_LAST)


def _depth(state: Mapping[str, Tensor]) -> int:
    return len({name.split(".")[1] for name in state if name.startswith("blocks.")})


def _side(state: Mapping[str, Tensor]) -> int:
    """Patches a side."""
    return math.isqrt(state[_POSITIONS].shape[1])


def _check_positions(state: Mapping[str, Tensor]) -> None:
    """Refuse other positions than ours, which are not saved."""
    if _POSITIONS not in state:
        raise _foreign(f"{_POSITIONS} is missing")
    table = sines_of_positions(Size.of(_side(state)), len(state[_PATCHES]))[None]
    given = state[_POSITIONS].float()
    if given.shape != table.shape or not torch.allclose(given, table, rtol=0, atol=_DRIFT):
        raise _foreign(f"{_POSITIONS} is not of sines and cosines of columns and rows")


def _of_velocities(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Rows of the last linear map: (patch^2, 2, C, ...), whose second dimension is of velocities, and of no use."""
    _, channels, patch, _ = state[_PATCHES].shape
    return state[name].unflatten(0, (patch**2, 2, channels))


def _turned(weight: Tensor) -> Tensor:
    """The weight (W, 2 F) for cosines and sines of t' f, of one for those of t f, where t = 1 - t'.

    cos (1 - t') f = cos f cos t'f + sin f sin t'f, and sin (1 - t') f = sin f cos t'f - cos f sin t'f. In float64.
    """
    of_cosines, of_sines = weight.double().chunk(2, dim=1)
    num = of_cosines.shape[1]
    f = 10_000 ** (-torch.arange(num, dtype=torch.float64) / num)
    turned = [of_cosines * f.cos() + of_sines * f.sin(), of_cosines * f.sin() - of_sines * f.cos()]
    return torch.cat(turned, dim=1).float()


def _foreign(problem: str) -> UserError:
    return UserError("weights", None, f"are not those of a SiT: {problem}", "give a SiT's")
