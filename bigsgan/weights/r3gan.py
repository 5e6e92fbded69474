"""State dicts of R3GAN's published networks (Huang et al. 2024, arXiv 2501.05441), and the sections that they fit.

The published modules are ``MainLayers.<stage>.Layers.<layer>``: in a stage of G a transition and then its blocks, in
one of D its blocks and then a transition. Ours are one flat list. Weights are the same but for the classes' embedding,
which is a linear map of one-hot vectors there, and for the fixed kernels of resampling, which we keep nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bigsgan.errors import UserError

_LAYER = re.compile(r"MainLayers\.(\d+)\.Layers\.(\d+)\.(.+)")
_BLOCK = {
    "LinearLayer1.Layer.weight": "expand.weight",
    "NonLinearity1.Bias": "activation1.bias",
    "LinearLayer2.Layer.weight": "conv.weight",
    "NonLinearity2.Bias": "activation2.bias",
    "LinearLayer3.Layer.weight": "contract.weight",
}
_CHANGE_OF_WIDTH = "LinearLayer.Layer.weight"
"""Of a transition, unless both its stages are equally wide."""
_TRANSITION = {_CHANGE_OF_WIDTH: "conv.weight"}
_KERNEL = "Resampler.Kernel"
_GENERATOR_INPUT = {"Basis": "basis", "LinearLayer.weight": "linear.weight"}
_DISCRIMINATOR_HEAD = {"Basis.weight": "basis.weight", "LinearLayer.weight": "linear.weight"}
_EMBEDDING = "EmbeddingLayer.weight"


def generator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our generator, as its ``generator_section`` describes it.

    Args:
        state: The published generator's, with the prefix ``Model.`` or without.

    Raises:
        UserError: It is no such generator's.
    """
    state = _without_prefix(state)
    stages = _stages(state, "generator")
    first = [sum(stages[:i]) + i for i in range(len(stages))]  # of each stage, in the flat list
    names = {
        "AggregationLayer.Layer.weight": f"{sum(stages) + len(stages)}.conv.weight",
        _EMBEDDING: "0.embedding.weight",
    }
    for i, blocks in enumerate(stages):
        transition = _GENERATOR_INPUT if i == 0 else _TRANSITION
        names |= _layer_names(i, 0, first[i], transition)
        for j in range(1, blocks + 1):
            names |= _layer_names(i, j, first[i] + j, _BLOCK)
    return _renamed(state, names, "generator")


def discriminator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our discriminator, as its ``discriminator_section`` describes it.

    Args:
        state: The published discriminator's, with the prefix ``Model.`` or without.

    Raises:
        UserError: It is no such discriminator's.
    """
    state = _without_prefix(state)
    stages = _stages(state, "discriminator")
    first = [1 + sum(stages[:i]) + i for i in range(len(stages))]
    last = sum(stages) + len(stages)
    names = {"ExtractionLayer.Layer.weight": "0.conv.weight", _EMBEDDING: f"{last}.embedding.weight"}
    for i, blocks in enumerate(stages):
        for j in range(blocks):
            names |= _layer_names(i, j, first[i] + j, _BLOCK)
        transition = _DISCRIMINATOR_HEAD if i == len(stages) - 1 else _TRANSITION
        names |= _layer_names(i, blocks, first[i] + blocks, transition)
    return _renamed(state, names, "discriminator")


def generator_section(state: Mapping[str, Tensor], init_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keys of a recipe's ``generator`` section; ``bf16_stages`` leave no trace in the weights alone.

    Args:
        state: The published generator's, with the prefix ``Model.`` or without.
        init_kwargs: Of a pickle: its ``stage_types`` are those that stages compute in, in the network's order.

    Raises:
        UserError: The state dict is no such generator's, or stages compute in types that cannot be kept.
    """
    generator_state(state)  # which checks that it is whole
    state = _without_prefix(state)
    stages = _stages(state, "generator")
    embedding = state.get(_EMBEDDING)
    embedding_size = 0 if embedding is None else embedding.shape[0]
    found = _section(state, [(i, 1, blocks) for i, blocks in enumerate(stages)])
    found["latent_size"] = state["MainLayers.0.Layers.0.LinearLayer.weight"].shape[1] - embedding_size
    found |= _bf16_stages("generator", (init_kwargs or {}).get("stage_types", []))
    return {**found, **({"embedding_size": embedding_size} if embedding_size else {})}


def discriminator_section(state: Mapping[str, Tensor], init_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keys of a recipe's ``discriminator`` section, as ``generator_section`` finds the generator's.

    Raises:
        UserError: The state dict is no such discriminator's, or stages compute in types that cannot be kept.
    """
    discriminator_state(state)  # which checks that it is whole
    state = _without_prefix(state)
    stages = _stages(state, "discriminator")
    found = _section(state, [(i, 0, blocks) for i, blocks in enumerate(stages)][::-1])
    found |= _bf16_stages("discriminator", (init_kwargs or {}).get("stage_types", [])[::-1])
    embedding = state.get(_EMBEDDING)
    return found if embedding is None else {**found, "embedding_size": embedding.shape[0]}


def data_section(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a generator's shapes say of the images.

    Raises:
        UserError: The state dict is no such generator's.
    """
    state = _without_prefix(state)
    embedding = state.get(_EMBEDDING)
    return {
        "resolution": 4 << (len(_stages(state, "generator")) - 1),
        "image_channels": state["AggregationLayer.Layer.weight"].shape[0],
        "num_classes": 0 if embedding is None else embedding.shape[1],
    }


def _without_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("Model."): tensor for name, tensor in state.items()}


def _stages(state: Mapping[str, Tensor], network: str) -> list[int]:
    """Blocks of each of the published stages, in their order."""
    blocks: dict[int, set[int]] = {}
    for name in state:
        match = _LAYER.fullmatch(name)
        if match and match[3] in _BLOCK:
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
    start = 1 if network == "generator" else 0
    for stage, layers in blocks.items():
        if layers != set(range(start, start + len(layers))):
            raise _foreign(network, f"stage {stage} has blocks at {sorted(layers)}")
    edge = "AggregationLayer" if network == "generator" else "ExtractionLayer"
    if not blocks or set(blocks) != set(range(len(blocks))) or f"{edge}.Layer.weight" not in state:
        raise _foreign(network, f"it lacks stages from MainLayers.0 on, or {edge}")
    return [len(blocks[stage]) for stage in range(len(blocks))]


def _layer_names(stage: int, layer: int, number: int, names: Mapping[str, str]) -> dict[str, str]:
    return {f"MainLayers.{stage}.Layers.{layer}.{theirs}": f"{number}.{ours}" for theirs, ours in names.items()}


def _renamed(state: Mapping[str, Tensor], names: Mapping[str, str], network: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for theirs, tensor in state.items():
        if theirs.endswith(_KERNEL):
            continue
        if theirs not in names:
            raise _foreign(network, f"{theirs} is unknown")
        found[f"layers.{names[theirs]}"] = tensor.T.contiguous() if theirs == _EMBEDDING else tensor
    for theirs in names.keys() - state.keys() - {_EMBEDDING}:
        if not theirs.endswith(_CHANGE_OF_WIDTH):
            raise _foreign(network, f"{theirs} is missing")
    return found


def _section(state: Mapping[str, Tensor], stages: list[tuple[int, int, int]]) -> dict[str, Any]:
    """What both sections hold, of stages from coarse to fine as (their number, their first block, blocks)."""
    first = [f"MainLayers.{stage}.Layers.{layer}" for stage, layer, _ in stages]
    inside = [state[f"{name}.LinearLayer1.Layer.weight"].shape[0] for name in first]
    widths = [state[f"{name}.LinearLayer1.Layer.weight"].shape[1] for name in first]
    return {
        "family": "r3gan",
        "widths": widths,
        "cardinalities": [
            channels // state[f"{name}.LinearLayer2.Layer.weight"].shape[1]
            for name, channels in zip(first, inside, strict=True)
        ],
        "blocks": [blocks for _, _, blocks in stages],
        "expansion": inside[0] // widths[0],
    }


def _bf16_stages(network: str, types: list[str]) -> dict[str, int]:
    """How many of the finest stages compute in bf16, of the types from coarse to fine."""
    number = types.count("bfloat16")
    if types != ["float32"] * (len(types) - number) + ["bfloat16"] * number:
        problem = f"are an R3GAN {network} whose stages compute in {', '.join(types)} from coarse to fine"
        raise UserError("weights", None, problem, "give one in which only the finest stages compute in bf16")
    return {"bf16_stages": number} if number else {}


def _foreign(network: str, problem: str) -> UserError:
    return UserError("weights", None, f"are not those of an R3GAN {network}: {problem}", f"give an R3GAN {network}'s")
