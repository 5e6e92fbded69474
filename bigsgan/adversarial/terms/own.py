"""Losses and terms from outside the package, which a recipe names.

Each is tried on a few random samples before training: a mean over samples does not depend on how ranks share a batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bigsgan.adversarial.terms.losses import LOSSES, AdversarialLoss
from bigsgan.adversarial.terms.outputs import OutputTerm
from bigsgan.adversarial.terms.term import GRADIENTS, IMAGES, LOGITS, FunctionTerm, Sum
from bigsgan.config import Recipe
from bigsgan.config.families.base import judged_outputs
from bigsgan.config.objective import OwnLoss, OwnTerm
from bigsgan.config.signature import build, checked_arguments
from bigsgan.engines.exposing import FIELD, exposed
from bigsgan.errors import UserError
from bigsgan.models.build import example_labels, network_on_meta
from bigsgan.models.initial import drawing_from
from bigsgan.models.outside import Foreign
from bigsgan.models.outside_check import attributes, random_inputs
from bigsgan.plugins import called, load

_NUM_PATCHES = 9
_CONTRASTS, _MEANS = [[[[0.7]]], [[[0.2]]]], [[[[-0.3]]], [[[0.4]]]]
"""Of the two images that terms are tried with."""
_CLOSE = 1e-3
"""Relative difference of a mean over two samples and of the mean over them one by one, from rounding."""


class Own(NamedTuple):
    """What a recipe names: the loss on logits, its own or one of ours, and its own terms."""

    loss: AdversarialLoss
    terms: list[FunctionTerm]

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device) -> Own:
        """Build them, and try those from outside.

        Raises:
            UserError: See ``adversarial_loss``, ``own_terms``, ``check_weighed`` and ``check_adaptive_weight``.
        """
        own = cls(adversarial_loss(recipe, device), own_terms(recipe, device))
        check_weighed(recipe, own.terms)
        check_adaptive_weight(recipe, own.terms)
        return own


def adversarial_loss(recipe: Recipe, device: torch.device) -> AdversarialLoss:
    """Return the loss on logits that a recipe names.

    Raises:
        UserError: It comes from outside, and cannot be built or is no mean over samples.
    """
    section = recipe.objective.loss
    if not isinstance(section, OwnLoss):
        return LOSSES[section]
    field, found = "objective.loss", _built("objective.loss", section, recipe.seed, device)
    reads = {"discriminator": LOGITS, "generator": LOGITS if section.pairs else LOGITS[:1]}
    functions, inputs = {}, _random_inputs(recipe, device)
    for network, offered in reads.items():
        method = getattr(found, network, None)
        if not callable(method):
            problem, remedy = f"has no method {network}", f"give its class a method {network}({', '.join(offered)})"
            raise UserError(f"{field}.use", section.use, problem, remedy)
        names = _reads(f"{field}.use", section.use, method, offered, f"its method {network}")
        _try(f"{field}.use", section.use, FunctionTerm(network, network, 1.0, names, method), recipe, inputs)
        functions[network] = _of_logits(method, names)
    return AdversarialLoss(**functions)


def check_weighed(recipe: Recipe, terms: Sequence[FunctionTerm]) -> None:
    """Refuse terms of G that would be weighed with the loss on logits.

    Raises:
        UserError: There is one.
    """
    section = recipe.objective.adversarial
    key = "adaptive" if section.adaptive else "normalize"
    for number, term in enumerate(terms):
        if section.weighs and term.network == "generator" and not (term.of_images or term.of_outputs):
            field, name = f"objective.terms.{number}.use", recipe.objective.terms[number].use
            problem, remedy = f"must read images or outputs of G with objective.adversarial.{key}", "remove one of both"
            raise UserError(field, name, problem, remedy, "it would be weighed too")


def check_adaptive_weight(recipe: Recipe, terms: Sequence[FunctionTerm]) -> None:
    """Refuse an adaptive weight without terms of images in each update to weigh against, or of no parameter of G.

    Raises:
        UserError: It is so.
    """
    section = recipe.objective.adversarial.adaptive
    if section is None:
        return
    network, inputs = network_on_meta(recipe, "generator"), random_inputs(recipe, "generator", 2)
    with exposed(network, section.parameter) as found:
        images = network(*(each.to("meta") for each in inputs))
    if not images.requires_grad or torch.autograd.grad(images.sum(), found.copy, allow_unused=True)[0] is None:
        problem, remedy = "is of a parameter that G's images do not depend on", "name another"
        raise UserError(FIELD, section.parameter, problem, f"{remedy}: its module must read it as it is called")
    always = any(term.of_images and term.every == 1 for term in terms)
    objective = recipe.objective
    if not (always or objective.of_targets or objective.consistency or objective.transport):
        problem, remedy = "needs a term of G's images in every update", "set objective.l1, or give a term of images"
        raise UserError("objective.adversarial.adaptive", section.parameter, problem, remedy)


class OfMeans:
    """A function of means over a micro-batch on all ranks, with gradients through the means.

    Attributes:
        means: Returns the means over this rank's samples of what it reads, a tensor of floats.
        of_means: Returns the value of means, a scalar.
        sum_over_replicas: Sums a tensor, in place, over the ranks that hold the same layers of D, or of G for terms of
            its outputs; on one rank, the identity.
    """

    def __init__(self, function: Any) -> None:
        """Take an object with a method ``means``, which is called with what that returns."""
        self.means: Callable[..., Tensor] = function.means
        self.of_means: Callable[[Tensor], Tensor] = function
        self.sum_over_replicas: Sum = lambda tensor: tensor

    def __call__(self, **read: Tensor) -> Tensor:
        """Return the value, a scalar. The gradients of the ranks, on average, are that of the micro-batch's value."""
        own = self.means(**read)
        sums = self.sum_over_replicas(torch.cat([own.detach().flatten(), own.new_ones(1)]))
        return self.of_means((sums[:-1] / sums[-1]).view_as(own) + (own - own.detach()))


def own_terms(recipe: Recipe, device: torch.device) -> list[FunctionTerm]:
    """Return the terms that a recipe names.

    Raises:
        UserError: One cannot be built, reads what its network's update does not have, or is no mean over samples.
    """
    found, inputs = [], _random_inputs(recipe, device) if recipe.objective.terms else {}
    for number, section in enumerate(recipe.objective.terms):
        field, offered = f"objective.terms.{number}.use", _offered(recipe, section)
        function = _built(field.removesuffix(".use"), section, recipe.seed, device, offered)
        called_as = getattr(function, "forward", function) if isinstance(function, nn.Module) else function
        if of_means := callable(getattr(function, "means", None)):
            called_as, function = function.means, OfMeans(function)
        what = "its method means" if of_means else "its call"
        names = _reads(field, section.use, called_as, offered, what)
        judged, reads_outputs = _judged(recipe), not set(recipe.outputs).isdisjoint(names)
        if sum(any(name in kind for name in names) for kind in (IMAGES, judged, GRADIENTS)) > 1 or (
            reads_outputs and not {"real_images", *judged}.isdisjoint(names)
        ):
            remedy = "make two terms of it: they may be on different ranks, or of different passes"
            problem = "must read images and their labels, what D returns, or gradients, not several"
            if reads_outputs:
                problem = "must read outputs, images, labels or input_images, not real images or logits too"
            raise UserError(field, section.use, problem, remedy, f"{what} takes {', '.join(names)}")
        kind = OutputTerm if reads_outputs else FunctionTerm
        term = kind(section.label, section.network, section.weight, names, function, section.every)
        if set(term.differentiates) != set(section.differentiates):
            wanted, key = ", ".join(term.differentiates), f"objective.terms.{number}.differentiates"
            problem, detail = f"must be [{wanted}]", f"{what} takes {', '.join(names)}"
            raise UserError(key, section.differentiates, problem, f"set differentiates: [{wanted}]", detail)
        _try(field, section.use, term, recipe, inputs)
        found.append(term)
    return found


def _built(
    field: str, section: OwnLoss | OwnTerm, seed: int, device: torch.device, read: Sequence[str] = LOGITS
) -> Any:
    """Return what a section names: an object of a class, made with the arguments, or a function that has them.

    The weights of a module are what its constructor draws after ``seed``, and stay as they are.
    """
    found = load(f"{field}.use", section.use, "terms")
    if not inspect.isclass(found):
        names = [*IMAGES, *LOGITS, *GRADIENTS, *read]  # which it gets in each update
        arguments = checked_arguments(f"{field}.arguments", section.use, found, section.arguments, dict.fromkeys(names))
        return functools.partial(found, **{key: value for key, value in arguments.items() if key not in names})
    with drawing_from(torch.Generator().manual_seed(seed)):
        found = build(f"{field}.use", section.use, "terms", section.arguments, {})
    return found.to(device).eval().requires_grad_(False) if isinstance(found, nn.Module) else found


def _offered(recipe: Recipe, section: OwnTerm) -> tuple[str, ...]:
    """Return what the term's network can show it in an update."""
    if section.network == "discriminator":
        return (*_judged(recipe), *GRADIENTS)
    other = "latents" if recipe.translates else "input_images"
    others = (other, "latents") if recipe.reads_noise else (other,)
    images = [name for name in IMAGES if name not in others]
    return (*images, *recipe.outputs, *_judged(recipe)[:: 1 if recipe.objective.pairs else 2])


def _judged(recipe: Recipe) -> tuple[str, ...]:
    """Return what terms may read where D's logits are computed, each of G's images and of real ones in turn."""
    names = judged_outputs(recipe.discriminator)
    found = (*LOGITS, *(f"{segment}_{name}" for name in names for segment in ("fake", "real")))
    return found if recipe.has_discriminator else ()


def _reads(field: str, name: str, function: Callable[..., Any], offered: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Return the names that a function's signature has of what is offered; without a default each must be one."""
    parameters = called(field, name, lambda: inspect.signature(function)).parameters
    for key, each in parameters.items():
        if (
            key not in offered
            and each.default is each.empty
            and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ):
            problem = f"cannot be called: {what} takes {key}"
            raise UserError(field, name, problem, f"name its arguments among {', '.join(offered)}")
    found = tuple(key for key in offered if key in parameters)
    if not found:
        raise UserError(
            field, name, f"cannot be computed: {what} takes none of {', '.join(offered)}", "name one of them"
        )
    return found


def _of_logits(function: Callable[..., Tensor], names: tuple[str, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(real: Tensor, fake: Tensor) -> Tensor:
        logits = {"real_logits": real, "fake_logits": fake}
        return function(**{name: logits[name] for name in names})

    return compute


def _try(field: str, name: str, term: FunctionTerm, recipe: Recipe, inputs: Mapping[str, Tensor]) -> None:
    """Compute a term of two samples of ``_random_inputs``, together and one by one, and its gradient."""
    device = inputs["images"].device
    # What depends on the network.
    trains = inputs if term.network == "discriminator" else ("images", *_judged(recipe)[::2], *recipe.outputs)
    if term.of_outputs:
        inputs = {**inputs, **_random_outputs(recipe, device)}
    read = {key: inputs[key] if key in trains else inputs[key].detach() for key in term.reads}
    mean = term.value.means if isinstance(term.value, OfMeans) else term.value

    def of(i: int) -> Tensor:
        return mean(**{key: tensor[i : i + 1] for key, tensor in read.items()})

    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        found = called(field, name, lambda: mean(**read), " for random samples")
        _check_lasting(field, name, read, mean)
        each = called(field, name, lambda: [of(0), of(1)], " for one random sample")
        value = found
        if isinstance(term.value, OfMeans):
            _check_floats(field, name, [found, *each])
            value = called(field, name, functools.partial(term.value.of_means, found), " for means of random samples")
    if not (isinstance(value, Tensor) and value.shape == () and value.is_floating_point()):
        problem = f"must return a scalar tensor, returns {_described(value)}"
        raise UserError(field, name, problem, "return the mean over the samples")
    if not value.requires_grad:
        remedy = "compute it from the images, logits or gradients by operations of torch"
        raise UserError(field, name, "has no gradient", remedy)
    if not torch.isfinite(value):
        raise UserError(field, name, f"is {float(value)} for random samples", "keep it finite")
    of_both, by_sample = found.detach(), torch.stack(each).detach()
    average, largest = by_sample.mean(dim=0), torch.stack([of_both, *by_sample]).abs().amax(dim=0).clamp(min=_CLOSE)
    if (different := ~((of_both - average).abs() <= _CLOSE * largest)).any():  # a sample's own value may be NaN
        problem = "is no mean over samples, so that it depends on how ranks and micro-batches share a batch"
        if mean is not term.value:
            problem = "has a method means that returns no mean over samples"
        ours, theirs = (value[different].flatten()[0].item() for value in (of_both, average))
        detail = f"{ours:.6g} for two samples, {theirs:.6g} on the average of one at a time"
        raise UserError(field, name, problem, "average a value of each sample, without random numbers", detail)


def _check_lasting(field: str, name: str, read: Mapping[str, Tensor], mean: Callable[..., Any]) -> None:
    """Refuse a function that keeps anything from a call, but for what it has cached, or changes what it reads."""
    owner = getattr(mean, "__self__", mean)
    kept, numbers = attributes(owner), {key: tensor._version for key, tensor in read.items()}
    called(field, name, lambda: mean(**read), " for random samples")
    if changed := [key for key, value in attributes(owner).items() if kept.get(key) != value]:
        problem, remedy = f"keeps {changed[0]} from one call to the next", "compute it from what the call reads"
        raise UserError(field, name, problem, remedy, "checkpoints and other ranks do not have it")
    if changed := [key for key, tensor in read.items() if tensor._version != numbers[key]]:
        raise UserError(field, name, f"changes {changed[0]} in place", "let operations return new tensors")


def _check_floats(field: str, name: str, found: Sequence[Any]) -> None:
    """Refuse means that are no tensors of floats of one shape."""
    for each in found:
        if not (isinstance(each, Tensor) and each.is_floating_point() and each.shape == found[0].shape):
            problem = f"must return a tensor of floats of one shape from its method means, returns {_described(each)}"
            raise UserError(field, name, problem, "return means over the samples, stacked")


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _random_inputs(recipe: Recipe, device: torch.device) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size, made = recipe.data.network_size, recipe.generator.images_per_sample * recipe.data.channels

    def images(channels: int) -> Tensor:
        drawn = 2 * torch.rand(2, channels, *size, generator=generator) - 1
        # Of many pixels two images of one mean and contrast would have nearly the same moments as both together.
        return (drawn * torch.tensor(_CONTRASTS) + torch.tensor(_MEANS)).to(device).requires_grad_()

    def judged(*numbers: int) -> Tensor:
        return torch.randn(2, *numbers, generator=generator).to(device).requires_grad_()

    found = {
        "images": images(made),
        "real_images": images(recipe.data.channels),
        "labels": example_labels(recipe.data, 2).to(device),
    }
    sizes: Sequence[tuple[int, ...]] = [(_NUM_PATCHES,) if recipe.translates else ()]
    if judged_outputs(recipe.discriminator):
        sizes = _judged_sizes(recipe)
    found |= zip(_judged(recipe), (judged(*each) for each in sizes for _ in LOGITS), strict=False)  # none without D
    found |= {"fake_gradients": images(made), "real_gradients": images(recipe.data.channels)}
    if recipe.translates:
        return found | {"input_images": images(recipe.input_channels)}
    return found | {"latents": torch.randn(2, recipe.latent_size, generator=generator).to(device)}


def _judged_sizes(recipe: Recipe) -> Sequence[tuple[int, ...]]:
    """Return how many logits of an image D has, and how many numbers in each of its outputs beside them."""
    recipe = recipe.model_copy(update={"augmentation": None})  # which changes no sizes
    network = network_on_meta(recipe, "discriminator")
    joined = network(*(each.to("meta") for each in random_inputs(recipe, "discriminator", 2)))
    *_, last = network.layers.values()
    sizes = cast(Foreign, last).output_sizes
    return [(joined.shape[1] - sum(sizes),), *((size,) for size in sizes)]


def _random_outputs(recipe: Recipe, device: torch.device) -> dict[str, Tensor]:
    """Return random tensors like those that G returns after its images, by name; zeros for integers."""
    generator, inputs = torch.Generator().manual_seed(1), random_inputs(recipe, "generator", 2)
    _, *outputs = network_on_meta(recipe, "generator").fold(*(each.to("meta") for each in inputs))
    found = dict[str, Tensor]()
    for name, output in zip(recipe.outputs, outputs, strict=True):
        if output.is_floating_point():
            found[name] = torch.randn(output.shape, generator=generator).to(device).requires_grad_()
        else:
            found[name] = torch.zeros(output.shape, dtype=output.dtype, device=device)
    return found
