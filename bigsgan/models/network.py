"""A network is a flat list of layers with an explicit carry.

``forward`` folds over the list, and a pipeline partitions the same list, so no model knows its layout. The carry holds
everything that travels between layers: a tuple of tensors in fixed order, in which every float is used later and has a
gradient path. An entry is dropped after its last use.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigsgan.images.cosines import from_cosines
from bigsgan.models.dual import Dual, differentiate, flat
from bigsgan.models.initial import filler, is_spoilt, named_fillable, parts_of, refuse_unfilled, spoil, tensors_of
from bigsgan.models.layers import Kept, SpectralLayer, StatefulLayer, TwiceDifferentiable
from bigsgan.models.ours import has_our_attributes
from bigsgan.models.recomputing import as_tuple, recomputed
from bigsgan.models.transformer import Block, Linear

Gather = Callable[[list[nn.Parameter]], AbstractContextManager]


class LayerStack(nn.Module):
    """Layers applied one after the other, each to the outputs of the one before.

    Attributes:
        layers: The flat list, by number. A part of a network keeps the numbers, and so the names, of the whole. Layers
            before a family's own have negative numbers.
        checkpointing: Whether to recompute each layer in the backward pass instead of keeping its activations.
        is_closed: Whether each layer's outputs depend on its inputs and parameters alone, and these are whole; its
            recomputation then costs the host less. No module of a layer is replaced after the construction.
    """

    def __init__(self, layers: list[nn.Module], checkpointing: bool = False, first: int = 0) -> None:
        super().__init__()
        self._first = first
        self.layers = nn.ModuleDict({str(first + i): layer for i, layer in enumerate(layers)})
        self.checkpointing = checkpointing
        self.is_closed = False
        self._have_gradients: dict[str, dict[Any, list[bool]]] = {}
        self._modules_of = {number: list(layer.modules()) for number, layer in self.layers.items()}
        self._segmented: dict[str, list[Any]] = {
            number: [module for module in modules if has_our_attributes(module) and hasattr(module, "segments")]
            for number, modules in self._modules_of.items()
        }

    def part(self, start: int, stop: int) -> LayerStack:
        """Return layers ``start`` up to ``stop`` as a network."""
        part = LayerStack(list(self.layers.values())[start:stop], self.checkpointing, self._first + start)
        part.is_closed = self.is_closed
        return part

    def wrapped(self, wrap: Callable[[nn.Module], Any]) -> LayerStack:
        """Return the same layers, each wrapped by ``wrap``."""
        return LayerStack([wrap(layer) for layer in self.layers.values()], self.checkpointing, self._first)

    def forward(self, *carry: Tensor, segments: int = 1) -> Tensor:
        """Fold over the layers; return the first tensor that the last one leaves, of a network from outside the images.

        Args:
            carry: The network's inputs.
            segments: Number of equal parts of the batch whose batch statistics are kept apart.
        """
        return self.fold(*carry, segments=segments)[0]

    def fold(self, *carry: Tensor, segments: int = 1) -> tuple[Tensor, ...]:
        """Fold over the layers of a part, and return the carry for the next part."""
        for number in self.layers:
            carry = self._maybe_checkpointed(number, self._applied(number, segments), *carry)
        return carry

    def fold_dual(self, dual: Dual, segments: int = 1) -> Dual:
        """Fold over the layers of a part as ``fold`` does, with the carry's tangents."""
        for number in self.layers:
            dual = self._maybe_checkpointed_dual(number, segments, dual)
        return dual

    def _applied(self, number: str, segments: int) -> Callable[..., tuple[Tensor, ...]]:
        return partial(self._run, number, segments) if self._segmented[number] else self.layers[number]

    def _maybe_checkpointed(self, number: str, run: Callable[..., Any], *carry: Tensor) -> Any:
        if not (self.checkpointing and self.is_closed):
            return self._maybe_checkpointed_by_torch(run, *carry)
        if not torch.is_grad_enabled():
            return run(*carry)
        held = (module._parameters.values() for module in self._modules_of[number])
        parameters = [each for each in chain.from_iterable(held) if each is not None]
        # torch computes only layers again of which the backward pass reads something; hooks would run in both graphs.
        if not parameters or any(each._backward_hooks for each in parameters):
            return self._maybe_checkpointed_by_torch(run, *carry)
        # Which outputs have a gradient is known from a first pass of the same kind.
        kind = getattr(run, "__name__", ""), *(each.requires_grad for each in (*parameters, *carry))
        known = self._have_gradients.setdefault(number, {})
        if kind not in known:
            outputs = self._maybe_checkpointed_by_torch(run, *carry)
            known[kind] = [each.requires_grad for each in as_tuple(outputs)]
            return outputs
        return recomputed(run, carry, parameters, Kept.contexts, known[kind])

    def _maybe_checkpointed_dual(self, number: str, segments: int, dual: Dual) -> Dual:
        # torch lets no tangent into the forward pass of a node of one's own.
        run = partial(differentiate, self._applied(number, segments))
        return self._maybe_checkpointed_by_torch(run, *flat(dual))

    def _maybe_checkpointed_by_torch(self, run: Callable[..., Any], *carry: Tensor) -> Any:
        if not self.checkpointing:
            return run(*carry)
        # No layer draws from torch's generators, so there is no state to restore for the recomputation.
        before = Kept.open
        try:
            return checkpoint(run, *carry, use_reentrant=False, preserve_rng_state=False, context_fn=Kept.contexts)
        finally:  # an older torch leaves the context of a layer that raises only with its frame
            Kept.open = before

    def _run(self, number: str, segments: int, *carry: Tensor) -> tuple[Tensor, ...]:
        """Apply a layer with statistics. Sets their segments each time, as passes may come before a recomputation."""
        for statistics in self._segmented[number]:
            statistics.segments = segments
        return self.layers[number](*carry)

    def with_features(self, *carry: Tensor, segments: int = 1) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and the first entry of the carry after each layer but the last."""
        firsts = []
        for number in self.layers:
            carry = self._maybe_checkpointed(number, self._applied(number, segments), *carry)
            firsts.append(carry[0])
        *features, output = firsts
        return output, features

    @property
    def predicts(self) -> bool:
        """Whether the last layer predicts a teacher's features."""
        return any(getattr(layer, "teacher", None) is not None for layer in self.layers.values())

    def with_predictions(self, *carry: Tensor, num: int, segments: int = 1) -> tuple[Tensor, Tensor]:
        """Return the output, and the last layer's predictions of a teacher's features of the first ``num`` samples."""
        *others, last = self.layers
        for number in others:
            carry = self._maybe_checkpointed(number, self._applied(number, segments), *carry)
        predictions = self._predicted(last, carry, num)
        (output,) = self._maybe_checkpointed(last, self._applied(last, segments), *carry)
        return output, predictions

    def with_predictions_dual(self, dual: Dual, num: int, segments: int = 1) -> tuple[Dual, Tensor]:
        """Do the same with the carry's tangents; predictions have none."""
        *others, last = self.layers
        for number in others:
            dual = self._maybe_checkpointed_dual(number, segments, dual)
        predictions = self._predicted(last, dual.carry, num)
        return self._maybe_checkpointed_dual(last, segments, dual), predictions

    def _predicted(self, last: str, carry: tuple[Tensor, ...], num: int) -> Tensor:
        head: Any = self.layers[last]
        return self._maybe_checkpointed(last, head.predict, *(entry[:num] for entry in carry))

    def stateful_layers(self) -> list[StatefulLayer]:
        """List the layers whose forward pass can move state."""
        return [module for module in self.modules() if isinstance(module, StatefulLayer)]

    def spectral_layers(self) -> list[SpectralLayer]:
        """List the layers with a spectrally normalized weight."""
        return [module for module in self.modules() if isinstance(module, SpectralLayer)]

    def matrices(self) -> list[nn.Parameter]:
        """List the weights of linear maps within the blocks of a transformer, which Muon may update."""
        return [matrix for _, matrix in self.named_matrices()]

    def named_matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield ``matrices`` with their names in the network."""
        for number, layer in self.layers.items():
            for name, module in layer.named_modules() if isinstance(layer, Block) else ():
                if isinstance(module, Linear) and "weight" in module._parameters:  # unless it is frozen
                    yield f"layers.{number}.{name}.weight", module.weight

    def exact_layers(self) -> list[TwiceDifferentiable]:
        """List the layers that compute in a form that can be differentiated twice."""
        return [module for module in self.modules() if isinstance(module, TwiceDifferentiable) and module.exact]


def frozen_tensors(network: nn.Module) -> list[Tensor]:
    """List what the frozen programs of layers hold that no parameter or buffer is; see models/features.py."""
    return [tensor for program in frozen_programs(network) for tensor in program or []]


def frozen_programs(network: nn.Module) -> list[list[Tensor] | None]:
    """List what each frozen program of layers holds; None for one that cannot be counted."""
    found: list[Any] = [
        getattr(module, "frozen_program", ()) for module in network.modules() if has_our_attributes(module)
    ]
    return [each for each in found if each != ()]


class LastImage(nn.Module):
    """Picks the last of a sample's images, which are stacked along the channels, and drops what comes after them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, images: Tensor, *outputs: Tensor) -> tuple[Tensor]:
        """(N, L * C, H, W), ... -> (N, C, H, W)."""
        return (images[:, -self.channels :].contiguous(),)  # a copy, so that the others' memory becomes free


class FromCosines(nn.Module):
    """Undoes the cosine transform of blocks of pixels."""

    def __init__(self, block: int, scale: float) -> None:
        super().__init__()
        self.block, self.scale = block, scale

    def forward(self, latents: Tensor) -> tuple[Tensor]:
        """(N, C * B^2, H, W) -> (N, C, H * B, W * B)."""
        return (from_cosines(latents, self.block, self.scale),)


def initialize(network: nn.Module, seed: int, gather: Gather | None = None, writes: bool = True) -> None:
    """Fill parameters and buffers from generators keyed by (seed, name), so that no layout changes them.

    A module fills its own in a method ``initialize(generators)``, with an argument of this name. One without it, such
    as torch's, is filled by its ``reset_parameters()``, on the CPU. Modules come before the modules that hold them,
    which may change their values.
    Large orthogonal weights are made on the network's device, and differ between kinds of devices by rounding.

    Args:
        network: Modules with parameters and buffers of any values, such as empty memory.
        seed: The network's seed.
        gather: Context in which the given parameters are whole on this rank; for parameters that are sharded.
        writes: Whether this rank fills them; other ranks only take part in ``gather``'s collectives, and get buffers
            by a broadcast from a rank that wrote.

    Raises:
        UserError: Nothing fills a parameter or a buffer. Ranks that do not write may not know.
    """
    filled, left = set[int](), dict[int, str]()  # by identity, as modules may share tensors
    for prefix, module in reversed(list(named_fillable(network))):
        fill = filler(module)
        reached = {id(t): (name, t) for path, part in parts_of(module, prefix) for name, t in tensors_of(part, path)}
        if fill is None:
            left |= {key: name for key, (name, tensor) in reached.items() if key not in filled}
            continue
        parameters = [tensor for _, tensor in reached.values() if isinstance(tensor, nn.Parameter)]
        with gather(parameters) if gather is not None and parameters else nullcontext(), torch.no_grad():
            if writes:
                new = [tensor for key, (_, tensor) in reached.items() if key not in filled]
                for tensor in new:
                    spoil(tensor)
                fill(partial(_generator, seed, prefix))
                left |= {id(tensor): reached[id(tensor)][0] for tensor in new if is_spoilt(tensor)}
                filled |= {id(tensor) for tensor in new if not is_spoilt(tensor)}
            else:
                filled |= reached.keys()
    refuse_unfilled([name for key, name in left.items() if key not in filled][::-1])


def _generator(seed: int, prefix: str, name: str) -> torch.Generator:
    entropy = np.random.SeedSequence([seed, zlib.crc32(b"initialize"), zlib.crc32(f"{prefix}.{name}".encode())])
    return torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1)))
