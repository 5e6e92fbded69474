"""State dicts of GAT's published networks (arXiv 2509.24935), and the sections that they fit.

The published code has separate lists of blocks and heads; ours is one flat list in the order of computation. These are
left out: tables of positions, which are fixed; G's embedding of an input that is multiplied by 0; and its running means
of w, which each rank had for itself. Shapes do not tell the type of matrix products, nor D's number of levels and its
noise. ``sources.SOURCES`` lists the errors raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models.transformer import rotations, sines_of_positions
from bigsgan.weights.empty import call
from bigsgan.weights.optimizer_state import Moments, adam_moments
from bigsgan.weights.stylegan_pickle import ForeignNetwork

_IN_BLOCK = {
    "attn.qkv": "attention.qkv",
    "attn.q_norm": "attention.query_norm",
    "attn.k_norm": "attention.key_norm",
    "attn.proj": "attention.out",
    "mlp.w12": "perceptron.expand",
    "mlp.w3": "perceptron.contract",
    "adaLN_modulation.1": "modulation.linear",
    "norm1": "norm1",
    "norm2": "norm2",
}
_IN_HEAD = {"adaLN_modulation.1": "modulation.linear", "linear": "linear"}
_TWO_LAYERS = {"0": "first", "2": "second"}
_THREE_LAYERS = {**_TWO_LAYERS, "4": "third"}
_AUTOENCODER, _FACTOR = "data/sd-vae-ft-mse", 8
"""The autoencoder's place in the shipped recipes, and how many times shorter a side of its latents is."""
_TEACHER = "data/dinov2_vitb14.pt2"
"""Place for the teacher whose features the heads were trained to predict, as in shipped recipes."""
UNTOLD_OF_TEACHER = ("path", "resolution", "weight")
"""Keys of ``objective.teacher`` that do not follow from shapes."""
CHECKPOINT = {"G": "generator", "G_ema": "ema", "D": "discriminator"}, {"G": "optG", "D": "optD"}
"""Names of a snapshot's networks, and of their optimizers' states, in a checkpoint of the public trainer."""
_FROZEN = ("pos_embed",)
"""Parameters that do not train."""
_BUFFER = re.compile(r"w_avg|(?:.+\.)?feat_rope\..+")
_INPUT = "x_embedder.proj"
_FLAT = {"layers.1.token": 0, "layers.1.linear.weight": 1}
"""First of the dimensions that are one in D's parameters here."""
_LEFT_OUT = {
    "w_avg": "G's means of w by class, which are computed where samples are truncated",
    f"{_INPUT}.weight": "G's embedding of an input that is multiplied by 0",
}


def generator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our generator, as its ``generator_section`` describes it."""
    names = _generator_names(_count(state, "blocks", "generator"), _count(state, "final_layers", "generator"))
    used = {name: tensor for name, tensor in state.items() if name not in (f"{_INPUT}.weight", f"{_INPUT}.bias")}
    return _renamed(used, "generator", names)


def discriminator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our discriminator, as its ``discriminator_section`` describes it."""
    found = _renamed(state, "discriminator", _discriminator_names(_count(state, "blocks", "discriminator")))
    return {name: tensor.flatten(_FLAT[name]) if name in _FLAT else tensor for name, tensor in found.items()}


def exported(
    network: str, section: Mapping[str, Any], data: Mapping[str, int], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of ``generator_state`` and ``discriminator_state``, with the tables of positions.

    G's unused embedding of an input is 0, and so are its means of w by class, which only its truncation reads.
    """
    width, patch, is_g = section["width"], section["patch"], network == "generator"
    size = Size.of(data["resolution"] // patch)
    rotation = rotations((size,), width // section["heads"], class_tokens=False).repeat_interleave(2, dim=1)
    found = {"pos_embed": sines_of_positions(size, width)[None]}
    found |= {f"feat_rope.freqs_{name}": rotation[..., i].clone() for i, name in enumerate(("cos", "sin"))}
    names = _generator_names(section["depth"], section["levels"]) if is_g else _discriminator_names(section["depth"])
    for theirs, ours in names.items():
        if (tensor := state.get(f"layers.{ours}")) is not None:
            found[theirs] = tensor
    if is_g:
        found |= {f"{_INPUT}.weight": torch.zeros(width, data["image_channels"], patch, patch)}
        return found | {f"{_INPUT}.bias": torch.zeros(width), "w_avg": torch.zeros(data["num_classes"], width)}
    shapes = {"cls_token": (1, 1, width), f"{_INPUT}.weight": (width, -1, patch, patch)}
    return found | {name: found[name].view(shape) for name, shape in shapes.items()}


def opened(network: str, section: Mapping[str, Any], data: Mapping[str, int]) -> str:
    """The call of the published class for such weights; the settings of attention change no number."""
    arguments = {
        "input_size": data["resolution"],
        "in_channels": data["image_channels"],
        "num_classes": data["num_classes"],
        "patch_size": section["patch"],
        "depth": section["depth"],
        "hidden_size": section["width"],
        "num_heads": section["heads"],
        "qk_norm": True,
        "fused_attn": True,
    }
    if network == "generator":
        return f"models.generator.GAT({call({**arguments, 'latent_size': section['latent_size']})})"
    width, hidden = data.get("teacher_width", 0), data.get("teacher_hidden", 0)
    arguments |= {"cmap_dim": section["embedding_size"], "z_dims": [width], "projector_dim": hidden}
    return f"models.discriminator.GATD({call(arguments)})"


def _generator_names(depth: int, num_heads: int) -> dict[str, str]:
    """Our names of parameters, by the published ones."""
    between = depth // num_heads
    names = {"y_embedder.embedding_table.weight": "0.embedding.weight"}
    names |= inside("latent_embedder", "0.layers", _TWO_LAYERS)
    for i in range(depth):
        names |= inside(f"blocks.{i}", f"{1 + i + i // between}", _IN_BLOCK)
    for i in range(num_heads):
        names |= inside(f"final_layers.{i}", f"{(i + 1) * (between + 1)}", _IN_HEAD)
    return names


def _discriminator_names(depth: int) -> dict[str, str]:
    """Our names of parameters, by the published ones."""
    last = f"{depth + 2}"
    names = {"cls_token": "1.token", "y_embedder.embedding_table.weight": f"{last}.embedding.weight"}
    names |= inside(_INPUT.partition(".")[0], "1", {"proj": "linear"})
    for i in range(depth):
        names |= inside(f"blocks.{i}", f"{2 + i}", _IN_BLOCK)
        names |= {f"blocks.{i}.ls_attn": f"{2 + i}.scale1.weight", f"blocks.{i}.ls_mlp": f"{2 + i}.scale2.weight"}
    names |= inside("final_layer", last, {"0": "norm", "1": "linear"})
    names |= inside("y_embedder.latent_embedder", f"{last}.mapping", _TWO_LAYERS)
    return names | inside("proj", f"{last}.teacher", _THREE_LAYERS)


def inside(theirs: str, ours: str, names: Mapping[str, str]) -> dict[str, str]:
    """Names of the weights and biases of layers within a module."""
    leaves = ("weight", "bias")
    return {f"{theirs}.{k}.{leaf}": f"{ours}.{name}.{leaf}" for k, name in names.items() for leaf in leaves}


def _renamed(state: Mapping[str, Tensor], network: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename all entries except positions and running means."""
    found = {}
    for name, tensor in state.items():
        if name in _FROZEN or _BUFFER.fullmatch(name):
            continue
        if name not in names:
            raise _foreign(network, f"{name} is unknown")
        found[f"layers.{names[name]}"] = tensor
    return found


def moments(state_dict: Mapping[str, Any], network: ForeignNetwork) -> Moments:
    """State of a network's optimizer, which numbers parameters in their order in the state dict."""
    parameters = tuple(name for name in network.state if not _BUFFER.fullmatch(name))
    return adam_moments(state_dict, network._replace(parameters=parameters), _FROZEN)


def left_out(generator: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Descriptions of a published generator's parts that have no place here, except computed tables."""
    return tuple(what for name, what in _LEFT_OUT.items() if name in generator)


def generator_section(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Keys of a recipe's ``generator`` section."""
    embedding = state["y_embedder.embedding_table.weight"].shape[1]
    return {
        **_section(state, "generator"),
        "levels": _count(state, "final_layers", "generator"),
        "patch": state[f"{_INPUT}.weight"].shape[-1],
        "latent_size": state["latent_embedder.0.weight"].shape[1] - embedding,
        "embedding_size": embedding,
    }


def discriminator_section(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Keys of a recipe's ``discriminator`` section."""
    return {
        **_section(state, "discriminator"),
        "patch": state[f"{_INPUT}.weight"].shape[-1],
        "embedding_size": state["y_embedder.embedding_table.weight"].shape[1],
    }


def untold(network: str, section: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """No keys: what a state dict does not tell is fixed in the published code, or in its trainer's arguments."""
    return ()


def teacher_section(state: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Keys of a recipe's ``objective.teacher``; None if a discriminator has no heads for a teacher's features."""
    if "proj.4.weight" not in state:
        return None
    width, hidden = state["proj.4.weight"].shape
    return {"path": _TEACHER, "width": width, "hidden": hidden}


def data_section(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Keys of a recipe's ``data`` that follow from a generator's shapes, with the published code's autoencoder."""
    patch, side = state[f"{_INPUT}.weight"].shape[-1], int(state["pos_embed"].shape[1] ** 0.5)
    channels = len(state["final_layers.0.linear.weight"]) // patch**2
    return latent_data(patch * side, channels, len(state["y_embedder.embedding_table.weight"]))


def latent_data(side: int, channels: int, num_classes: int) -> dict[str, Any]:
    """Keys of a recipe's ``data`` for the latents, of ``side`` pixels a side, of the public codes' autoencoder."""
    return {
        "resolution": _FACTOR * side,
        "image_channels": 3,
        "num_classes": num_classes,
        "codec": {"kind": "diffusers", "path": _AUTOENCODER, "factor": _FACTOR, "channels": channels},
    }


def _section(state: Mapping[str, Tensor], network: str) -> dict[str, Any]:
    width = state["blocks.0.attn.proj.weight"].shape[0]
    if "blocks.0.attn.q_norm.weight" not in state:
        raise _foreign(network, "its queries and keys are not normalized")
    heads = width // len(state["blocks.0.attn.q_norm.weight"])
    return {"family": "gat", "depth": _count(state, "blocks", network), "width": width, "heads": heads}


def _count(state: Mapping[str, Tensor], name: str, network: str) -> int:
    numbers = {int(match[1]) for each in state if (match := re.match(rf"{name}\.(\d+)\.", each))}
    if not numbers or numbers != set(range(len(numbers))):
        raise _foreign(network, f"it lacks {name} from 0 on")
    return len(numbers)


def _foreign(network: str, problem: str) -> UserError:
    return UserError("weights", None, f"are not those of a GAT {network}: {problem}", f"give a GAT {network}'s")
