"""Checks networks from outside before a run begins: each computes a few samples on the CPU, layer by layer.

What depends on how the work is split is found here: random numbers of torch's generators, buffers that a forward pass
changes, and results of a sample that depend on the others beside it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bigsgan.checkpoint.entries import saved_buffers
from bigsgan.config import NETWORKS, Recipe
from bigsgan.config.families.outside import is_outside
from bigsgan.errors import UserError, counted, reason
from bigsgan.models.batch_norm import GlobalBatchNorm
from bigsgan.models.build import example_labels, initial_seed
from bigsgan.models.initial import with_memory
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.outside import outside_layers
from bigsgan.models.outside_layouts import NUM, Carry, check_tangents, named, refuse_routing
from bigsgan.runtime.memory import free_host_bytes, size

_TOLERANCE = 1e-3
"""Of the largest number: more than rounding changes."""

_MEET, _DRAWS = "the samples of a batch meet in", "draws random numbers"
_MOVES = "changes in each pass"

_WOKEN = 0.02
"""Standard deviation of parameters that have left 0."""


def check_outside(
    recipe: Recipe,
    num_ranks: int,
    num_sharing: int = 1,
    computes: bool = True,
    forward_mode: Collection[str] = (),
    gathered: Collection[str] = (),
    hooked: Collection[str] = (),
    repeated: Collection[str] = (),
) -> list[str]:
    """Check the networks of a recipe that are from outside, and return what is to be told of them.

    Args:
        recipe: The recipe.
        num_ranks: Ranks of the run.
        num_sharing: Ranks that share this machine's memory.
        computes: Whether the samples are computed; else this process only learns whether the networks can be imported.
        forward_mode: Networks whose penalties are computed in forward mode.
        gathered: Networks whose modules gather parameters of other ranks when they are called.
        hooked: Networks whose modules gather parameters, be it on one rank.
        repeated: Networks whose passes may be made again.

    Raises:
        UserError: A network cannot be constructed, has parameters without values, fails, returns other shapes than
            the game's, or computes what would be different on other ranks.
    """
    told = list[str]()
    for network in NETWORKS:
        if is_outside(getattr(recipe, network).family):
            with torch.device("meta"):
                stack = LayerStack(outside_layers(recipe, network))
            if computes:
                where = (network in each for each in (forward_mode, gathered, hooked))
                found, maps = _check(recipe, network, stack, num_sharing, *where)
                _refuse_inexact(recipe, network, num_ranks, network in repeated, found)
                if len(maps) > 1:
                    numbers = ", ".join(map(str, maps))
                    told.append(f"the {network} returns {len(maps)} maps of logits: {numbers} of an image")
    return told


def _check(
    recipe: Recipe,
    network: str,
    stack: LayerStack,
    num_sharing: int,
    has_tangents: bool,
    gathers: bool,
    is_hooked: bool,
) -> tuple[list[str], Sequence[int]]:
    """Compute the layers.

    Return what depends on other samples, on earlier passes or on torch's generators, and the logits in each map.
    """
    field, family = f"{network}.family", getattr(recipe, network).family
    if not any(True for _ in stack.parameters()):
        raise UserError(field, family, "has no parameters to train", "give a network with layers that have some")
    _refuse_complex(field, family, stack)
    _refuse_shared(field, family, stack)
    found, carry = list[str](), random_inputs(recipe, network, NUM)
    depends = [network == "discriminator", *(False for _ in carry[1:])]  # on D's images, or on G's parameters
    for number in range(len(stack.layers)):
        _check_memory(field, family, stack, number, num_sharing)
        layer = with_memory(stack.part(number, number + 1), "cpu")
        with _located(field):
            initialize(layer, initial_seed(recipe, network))
        try:
            outputs, about = _try(recipe, network, layer, carry)
            found += about
            if gathers or is_hooked:
                refuse_routing(network, family, layer, carry, gathers)
            depends = _dependent(layer, carry, depends, network == "generator")
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # anything: the user's code
            given = ", ".join(f"{list(each.shape)}" for each in carry)
            detail = f"{type(error).__name__}: {reason(error)}"
            problem = (
                f"cannot compute layer {number} from {given}" if len(stack.layers) > 1 else f"cannot compute {given}"
            )
            remedy = "correct it, or its arguments"
            if "on device meta" in detail:
                remedy = "register tensors that it keeps in lists or dictionaries as buffers"
            raise UserError(field, family, problem, remedy, detail) from error
        if has_tangents:
            check_tangents(field, family, layer, carry)
        with_memory(layer, "meta")
        carry = outputs
    _check_outputs(recipe, network, carry)
    if not depends[0]:
        what, where = ("images", "its parameters") if network == "generator" else ("logits", "the images")
        remedy = "compute them by torch's operations, without detach and no_grad"
        raise UserError(field, family, f"makes {what} without a gradient at {where}", remedy)
    (last,) = layer.layers.values()
    return found, getattr(last, "map_sizes", ())


def _try(recipe: Recipe, network: str, layer: LayerStack, carry: Carry) -> tuple[Carry, list[str]]:
    """Compute a layer; return its outputs, and what depends on other samples, earlier passes or random numbers."""
    field, family, found = f"{network}.family", getattr(recipe, network).family, list[str]()
    numbers = _numbers(layer)
    outputs, moved = _watched(layer, carry, found)
    if moved and not (moves_alike := not found and _move_alike(layer, carry, moved)):
        found += [f"{name} changes" for name in moved]
    if changed := [name for name, number in _numbers(layer).items() if number != numbers[name]]:
        problem = f"changes the parameter {changed[0]} of {named(layer)} in its forward pass"
        remedy = "compute from the parameter what the pass needs, and leave it to the optimizer"
        raise UserError(
            field, family, problem, remedy, "except in float32 at ZeRO 0, the optimizer's own copy undoes the change"
        )
    if not all(bool(torch.isfinite(each).all()) for each in outputs):
        problem, remedy = f"has numbers that are not finite in {named(layer)}", "correct it"
        if recipe.data.conditions_are_tokens:
            remedy = "let it attend to something where its mask is all false"
        raise UserError(field, family, problem, remedy)
    is_judge, meets, keeps = network == "discriminator", False, True
    if not any(_DRAWS in each for each in found):
        kept = attributes(layer)  # after a pass that may have cached something
        with torch.no_grad():
            layer.train().fold(*carry)
        others = {name: value for name, value in attributes(layer).items() if name not in moved}
        keeps = any(kept.get(name) != value for name, value in others.items())
        found += [f"{name} changes" for name, value in others.items() if kept.get(name) != value]
    if getattr(recipe, network).exact and not keeps:
        meets = _mixes_samples(layer, carry, is_judge, as_trained=True)
    if meets or _mixes_samples(layer, carry) or (is_judge and _mixes_samples(layer, carry, True)):
        found.append(f"{_MEET} {named(layer)}")
    if moved and moves_alike:
        found += [f"{name} {_MOVES}" for name in moved]
    return outputs, found


def _numbers(layer: LayerStack) -> dict[str, tuple[int, str]]:
    """Return what changes with a parameter's values: torch's count of changes, and their sum."""
    return {name: (each._version, repr(float(each.detach().sum()))) for name, each in layer.named_parameters()}


def attributes(owner: Any) -> dict[str, Any]:
    """Return what an object or a module keeps, by name: plain values, lengths of collections, changes of tensors."""
    found: dict[str, Any] = {}
    for prefix, part in owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]:
        tensors = dict(part.named_buffers(recurse=False)) if isinstance(part, nn.Module) else {}
        for key, value in {**getattr(part, "__dict__", {}), **tensors}.items():
            name = f"{prefix}.{key}".removeprefix(".")
            if isinstance(value, bool | int | float | str):
                found[name] = value
            elif isinstance(value, list | deque | set | dict) and not key.startswith("_"):
                found[name] = len(value)
            elif isinstance(value, Tensor):  # a new one of the same numbers is the same
                found[name] = repr(value.detach().sum())
    return found


def _refuse_inexact(recipe: Recipe, network: str, num_ranks: int, is_repeated: bool, found: list[str]) -> None:
    section: Any = getattr(recipe, network)
    engine = recipe.engine(network)
    repeats = recipe.accumulation_of(network) > 1 or engine.activation_checkpointing
    repeats = repeats or engine.pipeline_stages > 1 or is_repeated
    if not repeats:
        found = [each for each in found if not each.endswith(_MOVES)]
    if not found or not section.exact:
        return
    if network == "discriminator" and any(each.startswith(_MEET) for each in found):
        problem = "has results of an image that depend on the others beside it, which may be real or generated"
        remedy = "correct it, or set discriminator.exact=false, by which both kinds are computed apart"
        raise UserError(f"{network}.family", section.family, problem, remedy, "; ".join(found))
    if num_ranks > 1 or repeats:
        problem, remedy = "has results that depend on how ranks and micro-batches share the work", "correct it, or set "
        raise UserError(
            f"{network}.family", section.family, problem, f"{remedy}{network}.exact=false", "; ".join(found)
        )


def _refuse_complex(field: str, family: str, stack: LayerStack) -> None:
    for name, tensor in (*stack.named_parameters(), *saved_buffers(stack).items()):
        if tensor.is_complex():
            problem = f"has complex numbers in {name}"
            raise UserError(field, family, problem, "keep real and imaginary parts, and use torch.view_as_complex")


def _refuse_shared(field: str, family: str, stack: LayerStack) -> None:
    """Refuse a parameter of several layers, which would be another one in each."""
    owners: dict[int, str] = {}
    for number, layer in stack.layers.items():
        for name, parameter in layer.named_parameters():
            if owners.setdefault(id(parameter), number) != number:
                problem = f"has a parameter of layers {owners[id(parameter)]} and {number}: {name}"
                raise UserError(field, family, problem, "let one layer hold the modules that share it")


@contextmanager
def _located(field: str) -> Iterator[None]:
    """Name the network before the parameter that has no value."""
    try:
        yield
    except UserError as error:
        problem = f"has a parameter or buffer {error.field} that {error.problem}"
        remedy = f"{error.remedy}; a module must be constructed when the function is called, not before"
        raise UserError(field, None, problem, remedy, error.detail) from None


def _check_memory(field: str, family: str, stack: LayerStack, number: int, num_sharing: int) -> None:
    (layer,) = stack.part(number, number + 1).layers.values()
    needed = 2 * num_sharing * sum(each.numel() * each.itemsize for each in (*layer.parameters(), *layer.buffers()))
    free = free_host_bytes()
    if free is not None and needed > free:
        detail = f"its {num_sharing} ranks construct layer {number} with {size(needed)}, and {size(free)} are free"
        remedy = "let the function return a list of functions that make smaller layers, which are constructed in turn"
        raise UserError(field, family, "is too large to be constructed on this machine", remedy, detail)


def random_inputs(recipe: Recipe, network: str, num: int) -> Carry:
    """Return a network's inputs for so many samples, as a recipe has them; the same at each call."""
    generator, data = torch.Generator().manual_seed(0), recipe.data
    labels = example_labels(data, num)

    def images(channels: int) -> Tensor:
        # Images of one mean and contrast would have the moments of a part of them.
        contrasts, means = (torch.linspace(*ends, num).view(-1, 1, 1, 1) for ends in ((0.2, 0.7), (0.3, -0.3)))
        return (torch.rand(num, channels, *data.network_size, generator=generator) * 2 - 1) * contrasts + means

    seeds = [torch.arange(num)] if getattr(recipe, network).draws else []
    latents = torch.randn(num, recipe.latent_size, generator=generator)
    if network == "discriminator":
        inputs = [images(recipe.input_channels)] if data.paired else []
        inputs += [latents] if recipe.discriminator_reads_latents else []
        return images(recipe.judged_channels), labels, *inputs, *seeds
    times = [1 - torch.arange(num) / num] if recipe.generator.reads_times else []
    return images(recipe.input_channels) if recipe.translates else latents, labels, *times, *seeds


@torch.no_grad()
def _watched(layer: LayerStack, carry: Carry, found: list[str]) -> tuple[Carry, list[str]]:
    """Compute a layer in training mode; note which modules draw random numbers, and return which buffers change."""
    before: dict[nn.Module, Any] = {}
    drawing: list[str] = []

    def state() -> Any:
        _, numbers, position, *_ = np.random.get_state()
        return torch.get_rng_state().numpy().tobytes(), np.asarray(numbers).tobytes(), position, random.getstate()

    def note(name: str, module: nn.Module) -> None:
        if before.pop(module) != state() and not any(each.startswith(f"{name}.") for each in drawing):
            drawing.append(name)
            found.append(f"{name} ({type(module).__name__}) {_DRAWS}")

    kept = {name: each.clone() for name, each in layer.named_buffers()}
    handles = []
    for name, module in list(layer.named_modules())[1:]:
        handles.append(module.register_forward_pre_hook(lambda module, _: before.update({module: state()})))
        handles.append(module.register_forward_hook(lambda module, *_, name=name: note(name, module)))
    outputs = layer.train().fold(*carry)
    for handle in handles:
        handle.remove()
    return tuple(outputs), [name for name, each in layer.named_buffers() if not torch.equal(each, kept[name])]


@torch.no_grad()
def _move_alike(layer: LayerStack, carry: Carry, names: list[str]) -> bool:
    """Whether these buffers change alike whatever the samples, as the vectors of spectral norm do."""
    kept, found = _kept(layer), []
    for some in (slice(1), slice(1, None)):  # of other numbers of samples, too
        layer.train().fold(*(each[some] for each in carry))
        found.append([each.clone() for name, each in layer.named_buffers() if name in names])
        _restore(kept)
    return all(map(torch.equal, *found))


def _kept(layer: LayerStack) -> list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]]:
    """Return where a layer's buffers are, themselves, and their values."""
    places = ((module._buffers, name) for module in layer.modules() for name in module._buffers)
    return [(held, name, each, each.clone()) for held, name in places if (each := held[name]) is not None]


@torch.no_grad()
def _restore(kept: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]]) -> None:
    for held, name, buffer, value in kept:
        held[name] = buffer.copy_(value)


def _mixes_samples(layer: LayerStack, carry: Carry, differentiated: bool = False, as_trained: bool = False) -> bool:
    """Return whether a sample's results depend on the others, other than by batch norm.

    ``differentiated`` inputs require gradients, as D's images do where G learns. ``as_trained`` says that it is in
    training mode, and that parameters have left 0, such as gates.
    """
    layer.train(as_trained)
    if as_trained:
        generator = torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            if not parameter.any():
                parameter.data.normal_(std=_WOKEN, generator=generator)
    carry = tuple(each.detach().requires_grad_(differentiated and each.is_floating_point()) for each in carry)
    for module in layer.modules():
        if isinstance(module, GlobalBatchNorm):
            module.eval()
            module.tracks = True
    kept = _kept(layer)
    with torch.set_grad_enabled(differentiated):
        whole = layer.fold(*carry)
        _restore(kept)
        part = layer.fold(*(each[: NUM // 2] for each in carry))
    for ours, theirs in zip(whole, part, strict=True):
        if ours.shape[:1] != (NUM,) or theirs.shape[:1] != (NUM // 2,):
            return True
        if ours.dtype == torch.bool:  # which torch cannot subtract
            ours, theirs = ours.int(), theirs.int()
        near = _TOLERANCE * float(ours.detach().abs().max())
        if not np.isfinite(near):  # of parameters that have left 0; so nothing is known
            return False
        if not torch.allclose(ours[: NUM // 2], theirs, rtol=0, atol=near, equal_nan=True):
            return True
    return False


def _dependent(layer: LayerStack, carry: Carry, depends: list[bool], on_parameters: bool) -> list[bool]:
    """Return which outputs have a gradient at what the game differentiates by, given which inputs have one."""
    trained = [each for each in layer.parameters() if each.requires_grad]
    for each in trained:
        each.requires_grad_(on_parameters)
    inputs = [
        each.detach().requires_grad_(on and each.is_floating_point()) for each, on in zip(carry, depends, strict=True)
    ]
    with torch.enable_grad():
        found = [each.requires_grad for each in layer.train().fold(*inputs)]
    for each in trained:
        each.requires_grad_(True)
    return found


def _check_outputs(recipe: Recipe, network: str, carry: Carry) -> None:
    field, family, data = f"{network}.family", getattr(recipe, network).family, recipe.data
    first, *outputs = carry
    shape, wanted = list(first.shape), [NUM, recipe.judged_channels, *data.network_size]
    named = recipe.outputs if network == "generator" else []
    if not first.is_floating_point() or (outputs and not named):
        remedy = "return images, and name what comes after them in generator.outputs"
        if network == "discriminator":
            remedy = "return logits"
        raise UserError(field, family, "must return one tensor of floats", remedy)
    if len(outputs) != len(named):
        problem = f"must be the names of the {counted(len(outputs), 'tensor')} that {family} returns after the images"
        raise UserError("generator.outputs", named, problem, "name each of them")
    for name, output in zip(named, outputs, strict=True):
        if output.shape[:1] != (NUM,):
            problem = f"must be an output of {NUM} samples, is of shape {list(output.shape)}"
            raise UserError("generator.outputs", name, problem, "return a tensor with an entry for each sample")
    if network == "generator" and shape != wanted:
        raise UserError(field, family, f"must make images {wanted} of {NUM} samples", "correct it", f"it makes {shape}")
    if network == "discriminator" and shape[:1] != [NUM]:
        raise UserError(field, family, f"must return logits of {NUM} images", "correct it", f"they are {shape}")
