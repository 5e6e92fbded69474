"""State dicts of ajbrock/BigGAN-PyTorch, of BigGAN and BigGAN-deep: its files G, G_ema and D.

Weights and running statistics are taken over bit by bit. Its spectral norm has one vector, u0, and in evaluation
divides by |W v| with v = W^T u0 / |W^T u0|. Ours divides by u^T W v and stores both vectors, so v is computed here, and
u moves on by half a step, to W v / |W v|: then both divide by the same number.

Values for logs only (sv0) and further singular values (u1, ...) are left out. Networks that no section describes are
refused: those without spectral norm, and D's attention at 32x32, which the reference puts after several blocks. Where
no tensor tells, the values are those of the reference's scripts: BN_eps 1e-5 (`bigsgan import --bn-eps` changes it),
SN_eps below every norm, ReLU (its only activation), and norm_style bn. ``sources.SOURCES`` lists the errors raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.config.families.biggan import BIGGAN_DISCRIMINATOR, BIGGAN_GENERATOR, biggan_discriminator_resolutions
from bigsgan.config.families.biggan_deep import deep_discriminator_resolutions
from bigsgan.errors import UserError, counted
from bigsgan.images.size import Size
from bigsgan.models.layers import SpectralLayer
from bigsgan.models.network import LayerStack
from bigsgan.weights.empty import call, empty_network

State = Mapping[str, Tensor]

_BLOCK = {"conv_sc": "shortcut"} | {f"bn{i}": f"norm{i}" for i in range(1, 5)}
_ATTENTION = {"theta": "query", "phi": "key", "g": "value", "o": "out"}
_LEAVES = {
    "gain": "weight",
    "stored_mean": "statistics.running_mean",
    "stored_var": "statistics.running_var",
    "running_mean": "statistics.running_mean",  # with cross_replica
    "running_var": "statistics.running_var",
}
_LEFT_OUT = re.compile(r"sv\d+|u[1-9]\d*|accumulation_counter|num_batches_tracked")
_FIRST_GAIN = "blocks.0.0.bn1.gain.weight"
_STUDIOGAN_64 = (16, 8, 4, 2, 1)
"""StudioGAN's multipliers of its generator for 64x64, in place of ``BIGGAN_GENERATOR``'s."""
_TRIED, _EXACT = 8, 1e-6
"""Directions that are tried for a vector of spectral norm, and a relative distance of norms that is good enough."""
_SMALLEST = 32  # the reference's; our 16x16 cannot be told from it where all widths are equal


def generator_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``generator`` that follow from the shapes of the reference's generator or its EMA."""
    resolution, channels, depth = _generator_size(state)
    steps = BIGGAN_GENERATOR[resolution]
    attention = _attention(state, [8 << step for step in range(len(steps) - 1)], depth)
    width = state["blocks.0.0.conv2.weight"].shape[0]
    own = {} if _is_deep(state) or width == channels * steps[1] else {"multiples": list(_STUDIOGAN_64)}
    if "shared.weight" not in state:
        section = {"family": "biggan", "channels": channels, "latent_size": state["linear.weight"].shape[1], **own}
        return {**section, "hierarchical": False, "shared_embedding": False, "attention": attention}
    embedding_size, columns = state["shared.weight"].shape[1], state["linear.weight"].shape[1]
    common = {"channels": channels, "embedding_size": embedding_size, "attention": attention}
    if _is_deep(state):
        return {"family": "biggan_deep", "latent_size": columns - embedding_size, "depth": depth, **common}
    hierarchical = state[_FIRST_GAIN].shape[1] > embedding_size
    chunks = len(steps) if hierarchical else 1
    return {"family": "biggan", "latent_size": columns * chunks, "hierarchical": hierarchical, **common, **own}


def discriminator_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``discriminator`` that follow from the shapes."""
    resolution, channels, depth = _discriminator_size(state)
    sizes = (deep_discriminator_resolutions if _is_deep(state) else biggan_discriminator_resolutions)(
        Size.of(resolution)
    )
    attention = _attention(state, sizes, depth)
    section = {"family": "biggan", "channels": channels, "attention": attention}
    return {**section, "family": "biggan_deep", "depth": depth} if _is_deep(state) else section


def untold(network: str, section: Mapping[str, Any], state: State) -> tuple[str, ...]:
    """Keys of a ``network``'s section that a state dict does not tell, and arguments that no recipe has."""
    if network == "discriminator":
        return ()
    own_module = any(re.search(r"\.bn\.(stored|running)_mean$", name) for name in state)  # cross_replica or mybn
    norm_style = () if own_module else ("norm_style=bn",)  # without effect with such a module
    return norm_style if "norm_eps" in section else ("norm_eps", *norm_style)


def data_section(state: State) -> dict[str, int]:
    """Keys of a recipe's ``data`` that follow from the shapes of either network's state dict."""
    if "output_layer.2.weight" in state:
        resolution, image_channels = _generator_size(state)[0], state["output_layer.2.weight"].shape[0]
        num_classes = state["shared.weight" if "shared.weight" in state else _FIRST_GAIN].shape[0]
    else:
        first = "input_conv.weight" if _is_deep(state) else "blocks.0.0.conv1.weight"
        resolution, image_channels = _discriminator_size(state)[0], state[first].shape[1]
        num_classes = state["embed.weight"].shape[0]
    return {"resolution": resolution, "image_channels": image_channels, "num_classes": num_classes}


def generator_state(state: State) -> dict[str, Tensor]:
    """State dict of our generator with the reference's weights, for the network of ``generator_section``."""
    network = empty_network("generator", generator_section(state), data_section(state))
    return _converted(state, network, *_ends("generator", len(network.layers) - 1, _is_deep(state)))


def discriminator_state(state: State) -> dict[str, Tensor]:
    """State dict of our discriminator with the reference's weights, for the network of ``discriminator_section``."""
    network = empty_network("discriminator", discriminator_section(state), data_section(state))
    return _converted(state, network, *_ends("discriminator", len(network.layers) - 1, _is_deep(state)))


def _ends(network: str, last: int, deep: bool) -> tuple[int, dict[str, str]]:
    """Our number for the reference's first block, and our names of the modules before and after the blocks."""
    if network == "generator":
        ends = {"shared": "0.embedding", "linear": "0.linear", "output_layer.0": f"{last}.norm"}
        return 1, {**ends, "output_layer.2": f"{last}.conv"}
    return int(deep), {"input_conv": "0.conv", "linear": f"{last}.linear", "embed": f"{last}.embedding"}


def exported(network: str, section: Mapping[str, Any], data: Mapping[str, int], state: State) -> dict[str, Tensor]:
    """The inverse of ``generator_state`` and ``discriminator_state``; see ``_first_vector`` for spectral norm."""
    deep, last = section["family"] == "biggan_deep", max(int(name.split(".")[1]) for name in state)
    first, ends = _ends(network, last, deep)
    ends = {f"layers.{ours}": theirs for theirs, ours in ends.items()}
    at_once = section["depth"] if deep and network == "discriminator" else 1  # blocks that share their first number
    layers, blocks, inner = dict[str, str](), 0, 0
    for number in range(first, last):
        if any(name.startswith(f"layers.{number}.attention.") for name in state):
            inner += 1
        else:
            inner, blocks = (0 if blocks % at_once == 0 else inner + 1), blocks + 1
        layers[str(number)] = f"blocks.{(blocks - 1) // at_once}.{inner}"
    found = dict[str, Tensor]()
    for name, tensor in state.items():
        module, _, leaf = name.replace(".statistics.running_", ".stored_").rpartition(".")
        theirs = ends.get(module) or _of_block(module, layers)
        if leaf == "u":
            weight = state[f"{module}.weight"]
            found[f"{theirs}.u0"], found[f"{theirs}.sv0"] = _first_vector(weight, tensor, state[f"{module}.v"])
        elif leaf == "gamma":
            found[f"{theirs}.{leaf}"] = tensor.reshape(())
        elif leaf != "v":
            found[f"{theirs}.{'gain' if (theirs, leaf) == ('output_layer.0', 'weight') else leaf}"] = tensor
    return found


def opened(network: str, section: Mapping[str, Any], data: Mapping[str, int]) -> str:
    """The call of the reference's class for such weights."""
    letter, deep = network[0].upper(), section["family"] == "biggan_deep"
    arguments = {
        f"{letter}_ch": section["channels"],
        **({f"{letter}_depth": section["depth"]} if deep else {}),
        f"{letter}_attn": "_".join(map(str, section["attention"])) or "0",
        "resolution": data["resolution"],
        "n_classes": max(1, data["num_classes"]),
    }
    if network == "generator":
        shared = section.get("shared_embedding", True)
        arguments |= {"dim_z": section["latent_size"], "G_shared": shared, "shared_dim": section["embedding_size"]}
        arguments |= {"hier": section.get("hierarchical", True), "BN_eps": section["norm_eps"]}
    return f"BigGAN{'deep' * deep}.{network.title()}({call(arguments)})"


def _is_deep(state: State) -> bool:
    return "blocks.0.0.conv4.weight" in state


def _layers(state: State) -> list[str]:
    """Names of residual blocks and attention in the order in which they are applied.

    The first number counts blocks, or in BigGAN-deep's D resolutions; the second counts the modules within it.
    """
    found = {match[0] for name in state if (match := re.match(r"blocks\.\d+\.\d+(?=\.)", name))}
    return sorted(found, key=lambda name: [int(number) for number in name.split(".")[1:]])


def _attending(state: State) -> list[int]:
    """Numbers of the residual blocks that attention follows."""
    is_block = [f"{name}.conv1.weight" in state for name in _layers(state)]
    return [sum(is_block[:i]) - 1 for i in range(len(is_block)) if not is_block[i]]


def _attention(state: State, sizes: Sequence[int], depth: int) -> list[int]:
    """Resolutions at which attention follows; ``sizes`` are those of the feature maps after ``depth`` blocks each."""
    found = []
    for block in _attending(state):
        step = block // depth
        if block % depth != depth - 1 or sizes.index(sizes[step]) != step:
            problem = f"has attention after a block that keeps its resolution, {sizes[step]}x{sizes[step]}"
            detail = f"block {block}; here attention comes once at a resolution, after the block that reaches it"
            remedy = "give a network without it; D_attn 16 of 32x32 images puts it after every block"
            raise UserError("weights", None, problem, remedy, detail)
        found.append(sizes[step])
    return found


def _generator_size(state: State) -> tuple[int, int, int]:
    def widths(multipliers: Sequence[int], depth: int) -> list[int]:
        steps = [[before] * (depth - 1) + [after] for before, after in pairwise(multipliers)]
        return [multipliers[0], *(m for step in steps for m in step)]

    names = ["linear.weight", "output_layer.2.weight", _FIRST_GAIN, "blocks.0.0.conv1.weight"]
    _require(state, "a generator", names)
    # Without a shared embedding each gain is a table with a row for each class, and has no spectral norm.
    if "shared.weight" not in state and (_is_deep(state) or any(n.endswith((".gain.u0", ".gain.u")) for n in state)):
        _require(state, "a generator", ["shared.weight"])
    if not any(name.endswith((".u0", ".u")) for name in state):
        problem = "must have spectral norm, as all BigGANs here"
        raise UserError("weights", None, problem, "give a generator trained with it (G_param SN, apply_g_sn)")
    if not any(re.match(r"blocks\..+\.(stored|running)_mean$", name) for name in state):
        problem, remedy = "must have batch norm in its blocks, as all BigGANs here", "give one with norm_style bn"
        raise UserError("weights", None, problem, remedy)
    tables = [*BIGGAN_GENERATOR.items(), *([] if _is_deep(state) else [(64, _STUDIOGAN_64)])]
    return _size(state, state["blocks.0.0.conv1.weight"].shape[1], tables, widths)


def _discriminator_size(state: State) -> tuple[int, int, int]:
    def widths(multipliers: Sequence[int], depth: int) -> list[int]:
        return [multipliers[0], *(m for m in multipliers[1:] for _ in range(depth))]

    first = "input_conv.weight" if _is_deep(state) else "blocks.0.0.conv2.weight"
    _require(state, "a discriminator", ["embed.weight", "blocks.0.0.conv1.weight", first])
    return _size(state, state[first].shape[0], list(BIGGAN_DISCRIMINATOR.items()), widths)


def _size(
    state: State,
    first: int,
    tables: Sequence[tuple[int, Sequence[int]]],
    widths: Callable[[Sequence[int], int], list[int]],
) -> tuple[int, int, int]:
    """Find (resolution, channels, depth) in ``tables``, each a resolution and its multipliers.

    ``first`` is the number of channels of the table's first feature map; ``widths`` maps (multipliers, depth) to the
    multipliers of the feature maps between blocks.
    """
    blocks = [name for name in _layers(state) if f"{name}.conv1.weight" in state]
    last_convs = [f"{block}.{'conv4' if _is_deep(state) else 'conv2'}.weight" for block in blocks]
    _require(state, "a network", last_convs)
    outputs = [state[name].shape[0] for name in last_convs]
    for resolution, multipliers in tables:
        depth = max(len(outputs) // (len(multipliers) - 1), 1) if _is_deep(state) else 1
        expected = widths(multipliers, depth)
        channels = first // multipliers[0]
        # In BigGAN's D the first block makes the first feature map; in other networks, a layer before the blocks does.
        found = [first, *outputs] if len(outputs) == len(expected) - 1 else outputs
        if resolution >= _SMALLEST and found == [channels * m for m in expected]:
            return resolution, channels, depth
    problem = f"has blocks of {outputs} channels, which no resolution has"
    raise UserError("weights", None, problem, "give a state dict of BigGAN or BigGAN-deep as published")


def _require(state: State, what: str, names: list[str]) -> None:
    missing = [name for name in names if name not in state]
    if missing:
        problem = f"must be {what} of BigGAN-PyTorch, which has {missing[0]}"
        raise UserError("weights", None, problem, "give the state dict of the requested network")


def _converted(state: State, network: LayerStack, first: int, ends: dict[str, str]) -> dict[str, Tensor]:
    """Rename, add the spectral layers' vectors, and compare names and shapes with the network's own.

    ``first`` is our number for the reference's first block, and ``ends`` has our numbered names of the modules before
    and after the blocks.
    """
    converted: dict[str, Tensor] = {}
    numbers = {name: first + i for i, name in enumerate(_layers(state))}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        module = module.removesuffix(".bn")  # with cross_replica and mybn
        if leaf == "accumulation_counter" and tensor.any():
            problem = "is not 0: sums of standing statistics have replaced the running statistics"
            raise UserError("weights", name, problem, "give weights as training saved them")
        if _LEFT_OUT.fullmatch(leaf):
            continue
        ours = f"layers.{ends[module]}" if module in ends else _in_block(module, numbers)
        if leaf == "u0" and f"{module}.weight" in state:
            converted[f"{ours}.u"], converted[f"{ours}.v"] = _vectors(tensor, state[f"{module}.weight"])
        else:
            # The reference's gamma has no dimension, ours has one.
            converted[f"{ours}.{_LEAVES.get(leaf, leaf)}"] = tensor.reshape(-1) if tensor.dim() == 0 else tensor
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    found = {name: tensor.shape for name, tensor in converted.items()}
    if found != expected:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        problem = f"does not fit the network here at {differing[0]} and {counted(len(differing) - 1, 'other tensor')}"
        raise UserError("weights", None, problem, "give a network with the reference's default layers")
    return converted


def _in_block(module: str, numbers: Mapping[str, int]) -> str:
    """Our name of a module of a block, such as ``blocks.3.0.bn1.gain``, or of attention, ``blocks.3.1.theta``."""
    parts = module.split(".")
    layer, inner = ".".join(parts[:3]), parts[3:]
    if layer not in numbers:
        return module  # unknown: the comparison with the network's names refuses it
    is_attention = not inner or inner[0] in _ATTENTION
    renamed = [(_ATTENTION if is_attention else _BLOCK).get(part, part) for part in inner]
    return ".".join(["layers", str(numbers[layer]), *(["attention"] if is_attention else []), *renamed])


def _of_block(module: str, layers: Mapping[str, str]) -> str:
    """The reference's name of a module of ours; the inverse of ``_in_block``."""
    number, *inner = module.split(".")[1:]
    names = {ours: theirs for theirs, ours in (_ATTENTION if inner[:1] == ["attention"] else _BLOCK).items()}
    return ".".join([layers[number], *(names.get(part, part) for part in inner if part != "attention")])


def _first_vector(weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's u0 (1, rows) with which it divides by our norm s = u^T W v, and the norm (1,), as it logs it.

    With x for u0, it divides by |K x| / |W^T x|, K = W W^T. That is s where x = u + t b and t is a root of
    x^T (K^2 - s^2 K) x. For t = 0 it is at least s, as |W v'| >= |W^T u| >= s, and for most directions b alone less. Of
    a matrix for which no tried b gives a root, such as one row, u0 is u.
    """
    matrix = weight.detach().double().flatten(1)
    norm, generator = torch.dot(u.double(), matrix @ v.double()), torch.Generator().manual_seed(0)
    best, least = u, _distance(matrix, u, norm)
    for i in range(_TRIED + 1):
        if least < _EXACT:
            break
        direction = torch.randn(len(u), generator=generator, dtype=torch.float64)
        if i == _TRIED:  # slower: the one that W^T maps to v, or near it
            direction = torch.linalg.lstsq(matrix.T, v.double()[:, None], driver="gelsd").solution[:, 0]
        both = torch.stack([u.double(), direction])
        mapped = both @ matrix
        of_k = mapped @ matrix.T
        (c, b), (_, a) = (of_k @ of_k.T - norm**2 * mapped @ mapped.T).tolist()
        roots = [(sign * math.sqrt(b * b - a * c) - b) / a for sign in (1, -1)] if a and b * b >= a * c else []
        for x in (direction, *(both[0] + root * both[1] for root in roots)):
            if (distance := _distance(matrix, x := F.normalize(x, dim=0).float(), norm)) < least:
                best, least = x, distance
    return best[None], norm.float()[None]


def _distance(matrix: Tensor, x: Tensor, norm: Tensor) -> float:
    """Relative distance of the reference's norm with the vector x from another."""
    mapped = x.double() @ matrix
    return abs(torch.linalg.vector_norm(matrix @ mapped) / torch.linalg.vector_norm(mapped) / norm - 1).item()


def _vectors(u0: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of our spectral norm: (1, rows), (rows, ...) -> u (rows,) and v (columns,), float32 like the buffers."""
    matrix = weight.detach().float().flatten(1)
    v = F.normalize(torch.mv(matrix.T, u0.float().flatten()), dim=0, eps=SpectralLayer.eps)
    return F.normalize(torch.mv(matrix, v), dim=0, eps=SpectralLayer.eps), v
