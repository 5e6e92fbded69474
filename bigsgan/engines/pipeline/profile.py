"""Measures the cost of each layer on this machine: time forward and backward, and memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.engines.pipeline.partition import Boundaries
from bigsgan.models.frozen import num_frozen
from bigsgan.models.network import LayerStack, initialize
from bigsgan.runtime import comm

_REPETITIONS = 3


class LayerCost(NamedTuple):
    """The cost of one layer."""

    name: str  # class of the layer
    numel: int  # number of parameters that are trained
    forward: float = 0.0  # seconds for one sample, as in `backward`; 0 if not measured
    backward: float = 0.0
    saved_bytes: int = 0  # bytes kept for the backward pass of one sample; 0 if not measured
    frozen: int = 0  # number of parameters that are not trained


def count(network: LayerStack) -> list[LayerCost]:
    """Count the parameters of each layer, without measuring."""
    return [
        LayerCost(type(layer).__name__, sum(p.numel() for p in layer.parameters()), frozen=num_frozen(layer))
        for layer in network.layers.values()
    ]


def measure(
    network: LayerStack, boundaries: Boundaries, num_samples: int, device: torch.device, seed: int
) -> list[LayerCost]:
    """Run each layer forward and backward on the shapes that it will meet. One rank calls this.

    ``network`` is on the meta device. One layer after the other is built on ``device``, with weights from ``seed``, and
    dropped. ``boundaries`` must treat every layer as a stage.
    """
    found = []
    for number, counted in enumerate(count(network)):
        part = copy.deepcopy(network.part(number, number + 1)).to_empty(device=device)
        initialize(part, seed)
        carry = _carry(boundaries, number, num_samples, torch.Generator(device).manual_seed(seed))
        times = [_run(part, carry) for _ in range(_REPETITIONS)]
        forward, backward = (min(t[i] for t in times) / num_samples for i in (0, 1))
        found.append(counted._replace(forward=forward, backward=backward, saved_bytes=times[0][2] // num_samples))
    return found


def _carry(boundaries: Boundaries, number: int, num_samples: int, generator: torch.Generator) -> list[Tensor]:
    """Make up a carry that enters a layer."""
    carry = []
    for spec in boundaries.at(number, num_samples):
        tensor = spec.empty(generator.device)
        if spec.dtype.is_floating_point:
            tensor.normal_(generator=generator).requires_grad_()
        else:
            tensor.zero_()
        carry.append(tensor)
    return carry


def _run(part: LayerStack, carry: list[Tensor]) -> tuple[float, float, int]:
    """Return seconds forward, seconds backward, and bytes kept between them."""
    own = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for tensor in carry:
        tensor.grad = None
    comm.synchronize()
    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [t for t in part.fold(*carry) if t.requires_grad]
    comm.synchronize()
    middle = time.perf_counter()
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    comm.synchronize()
    return middle - start, time.perf_counter() - middle, sum(kept.values())


def weights(costs: Sequence[LayerCost], partition: str) -> list[float]:
    """Return the weight of each layer that ``partition``, of the recipe, balances over the stages."""
    if partition == "uniform":
        return [1.0] * len(costs)
    if partition == "parameters":
        return [float(cost.numel) for cost in costs]
    return [cost.forward + cost.backward for cost in costs]
