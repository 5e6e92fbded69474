"""State dicts of R3GAN's published networks (Huang et al. 2024, arXiv 2501.05441), and the sections that they fit.

The published modules are ``MainLayers.<stage>.Layers.<layer>``: a stage of G has a transition and then its blocks, a
stage of D has its blocks and then a transition. Ours are one flat list. Weights are the same, except the classes'
embedding, which is a linear map of one-hot vectors there, and the fixed kernels of resampling, which we do not save.
Names may have the prefix ``Model.``. ``sources.SOURCES`` lists the errors raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigsgan.errors import UserError
from bigsgan.weights.empty import call

_LAYER = re.compile(r"MainLayers\.(\d+)\.Layers\.(\d+)\.(.+)")
_BLOCK = {
    "LinearLayer1.Layer.weight": "expand.weight",
    "NonLinearity1.Bias": "activation1.bias",
    "LinearLayer2.Layer.weight": "conv.weight",
    "NonLinearity2.Bias": "activation2.bias",
    "LinearLayer3.Layer.weight": "contract.weight",
}
_CHANGE_OF_WIDTH = "LinearLayer.Layer.weight"
"""Entry of a transition, unless both its stages have the same width."""
_TRANSITION = {_CHANGE_OF_WIDTH: "conv.weight"}
_KERNEL = "Resampler.Kernel"
_GENERATOR_INPUT = {"Basis": "basis", "LinearLayer.weight": "linear.weight"}
_DISCRIMINATOR_HEAD = {"Basis.weight": "basis.weight", "LinearLayer.weight": "linear.weight"}
_EMBEDDING = "EmbeddingLayer.weight"
_TAPS = torch.tensor([1.0, 3.0, 3.0, 1.0])
"""Those that the published code makes of its default [1, 2, 1]."""


def generator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our generator, as its ``generator_section`` describes it."""
    return _renamed(*_parsed(state, "generator"), "generator")


def discriminator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our discriminator, as its ``discriminator_section`` describes it."""
    return _renamed(*_parsed(state, "discriminator"), "discriminator")


def exported(
    network: str, section: Mapping[str, Any], data: Mapping[str, int], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of ``generator_state`` and ``discriminator_state``, with the kernels of [1, 2, 1]."""
    is_g = network == "generator"
    blocks = section["blocks"] if is_g else section["blocks"][::-1]
    found = {}
    for theirs, ours in _names(blocks, network).items():
        if (tensor := state.get(f"layers.{ours}")) is not None:
            found[f"Model.{theirs}"] = tensor.T.contiguous() if theirs == _EMBEDDING else tensor
    for stage in range(1, len(blocks)) if is_g else range(len(blocks) - 1):
        layer = 0 if is_g else blocks[stage]
        found[f"Model.MainLayers.{stage}.Layers.{layer}.{_KERNEL}"] = torch.outer(_TAPS, _TAPS) / _TAPS.sum() ** 2
    return found


def opened(network: str, section: Mapping[str, Any], data: Mapping[str, int]) -> str:
    """The call of the project's class for such weights."""
    step, num = (1 if network == "generator" else -1), len(section["widths"])
    own = {"NoiseDimension": section["latent_size"]} if network == "generator" else {}
    arguments = {
        **own,
        "WidthPerStage": section["widths"][::step],
        "CardinalityPerStage": section["cardinalities"][::step],
        "BlocksPerStage": section["blocks"][::step],
        "ExpansionFactor": section["expansion"],
        "ConditionEmbeddingDimension": section["embedding_size"] if data["num_classes"] else 0,
        "c_dim": data["num_classes"],
        "img_resolution": data["resolution"],
        "FP16Stages": list(range(num))[::step][num - section["bf16_stages"] :],
    }
    return f"training.networks.{network.title()}({call(arguments)})"


def _names(blocks: list[int], network: str) -> dict[str, str]:
    """Our names of parameters, by the published ones; ``blocks`` are the stages', in the published order."""
    if network == "generator":
        stages, first = [[_TRANSITION, *[_BLOCK] * number] for number in blocks], 0
        stages[0][0] = _GENERATOR_INPUT
    else:
        stages, first = [[*[_BLOCK] * number, _TRANSITION] for number in blocks], 1
        stages[-1][-1] = _DISCRIMINATOR_HEAD
    last = sum(map(len, stages))
    names = {"AggregationLayer.Layer.weight": f"{last}.conv.weight", _EMBEDDING: "0.embedding.weight"}
    if network == "discriminator":
        names = {"ExtractionLayer.Layer.weight": "0.conv.weight", _EMBEDDING: f"{last}.embedding.weight"}
    layers = [(f"MainLayers.{i}.Layers.{j}", each) for i, stage in enumerate(stages) for j, each in enumerate(stage)]
    for number, (layer, entries) in enumerate(layers, start=first):
        names |= {f"{layer}.{theirs}": f"{number}.{ours}" for theirs, ours in entries.items()}
    return names


def generator_section(state: Mapping[str, Tensor], init_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keys of a recipe's ``generator`` section.

    ``bf16_stages`` follow from ``stage_types`` in a pickle's ``init_kwargs``, the stages' types in network order.
    """
    state, stage_blocks = _parsed(state, "generator")
    stages = [(i, 1, blocks) for i, blocks in enumerate(stage_blocks)]
    found = _section(state, stages) | _bf16_stages("generator", (init_kwargs or {}).get("stage_types", []))
    columns = state["MainLayers.0.Layers.0.LinearLayer.weight"].shape[1]
    return {**found, "latent_size": columns - found.get("embedding_size", 0)}


def discriminator_section(state: Mapping[str, Tensor], init_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keys of a recipe's ``discriminator`` section; see ``generator_section``."""
    state, stage_blocks = _parsed(state, "discriminator")
    stages = [(i, 0, blocks) for i, blocks in enumerate(stage_blocks)][::-1]
    return _section(state, stages) | _bf16_stages("discriminator", (init_kwargs or {}).get("stage_types", [])[::-1])


def untold(network: str, section: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Keys of a ``network``'s section that a state dict does not tell."""
    return ("bf16_stages",)


def data_section(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Keys of a recipe's ``data`` that follow from a generator's shapes."""
    state, stage_blocks = _parsed(state, "generator")
    embedding = state.get(_EMBEDDING)
    return {
        "resolution": 4 << (len(stage_blocks) - 1),
        "image_channels": state["AggregationLayer.Layer.weight"].shape[0],
        "num_classes": 0 if embedding is None else embedding.shape[1],
    }


def _parsed(state: Mapping[str, Tensor], network: str) -> tuple[dict[str, Tensor], list[int]]:
    """The entries without the prefix, and the number of blocks of each published stage, in order."""
    state = {name.removeprefix("Model."): tensor for name, tensor in state.items()}
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
    return state, [len(blocks[stage]) for stage in range(len(blocks))]


def _renamed(state: Mapping[str, Tensor], blocks: list[int], network: str) -> dict[str, Tensor]:
    """Rename all entries, and refuse others and missing ones."""
    names = _names(blocks, network)
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
    """Keys of both networks' sections; stages, from coarse to fine, are (number, number of the first block, blocks)."""
    first = [f"MainLayers.{stage}.Layers.{layer}" for stage, layer, _ in stages]
    expand, conv = ([state[f"{name}.LinearLayer{i}.Layer.weight"].shape for name in first] for i in (1, 2))
    found = {
        "family": "r3gan",
        "widths": [shape[1] for shape in expand],
        "cardinalities": [inside // shape[1] for (inside, *_), shape in zip(expand, conv, strict=True)],
        "blocks": [blocks for _, _, blocks in stages],
        "expansion": expand[0][0] // expand[0][1],
    }
    return found if _EMBEDDING not in state else {**found, "embedding_size": state[_EMBEDDING].shape[0]}


def _bf16_stages(network: str, types: list[str]) -> dict[str, int]:
    """Number of the finest stages that compute in bf16, as a section's key; ``types`` go from coarse to fine."""
    number = types.count("bfloat16")
    if types != ["float32"] * (len(types) - number) + ["bfloat16"] * number:
        problem = f"are an R3GAN {network} whose stages compute in {', '.join(types)} from coarse to fine"
        raise UserError("weights", None, problem, "give one in which only the finest stages compute in bf16")
    return {"bf16_stages": number} if number else {}


def _foreign(network: str, problem: str) -> UserError:
    return UserError("weights", None, f"are not those of an R3GAN {network}: {problem}", f"give an R3GAN {network}'s")
