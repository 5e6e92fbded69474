"""Networks from outside the package: any ``torch.nn.Module``, or the layers of one.

A recipe names a function or class. What it returns is either a module, which is one layer here and is constructed as a
whole, or a list of functions without arguments that make one layer each, or a ``LayerStack`` with layers of our kind
(CONTRIBUTING.md, "Rules for layers"), which are initialized as ours are. Others are constructed on the CPU, from
generators keyed by the network's seed and their place, and their values are then copied to where the network lies.

Shapes: N samples, Z numbers in a latent, C channels, H x W pixels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.lazy import LazyModuleMixin

from bigsgan import plugins
from bigsgan.config import Recipe
from bigsgan.config.families.base import judged_outputs
from bigsgan.config.signature import checked_arguments
from bigsgan.errors import UserError, counted
from bigsgan.models.batch_norm import BatchStatistics, GlobalBatchNorm, global_batch_norms
from bigsgan.models.dual import has_tangent
from bigsgan.models.frozen import Reads, freeze, types_as_made, whole_frozen
from bigsgan.models.initial import Generators, drawing_from, make_buffer, tensors_of, with_memory
from bigsgan.models.layers import StatefulLayer, TwiceDifferentiable
from bigsgan.models.network import LayerStack
from bigsgan.models.ours import has_our_attributes, is_ours
from bigsgan.models.precision import full

Make = Callable[[], Any]

_HALF = (torch.bfloat16, torch.float16)


class Foreign(TwiceDifferentiable):
    """A layer that is any module: it takes the carry, and returns a tensor or a tuple, which is the next carry.

    Where labels are tokens (N, T, W + 1), a network's first layer gets (N, T, W) and a mask (N, T) bool in their place.
    The last layer of D may return several maps of logits, in lists or tuples, and further outputs after them. They are
    joined to one tensor (N, P + E), the logits first.

    In half precision its code reads buffers in the weights' type too, and computes under torch.autocast. Between layers
    floats have the weights' type; the network's outputs are float32. Batch norm is that of ``global_batch_norms``;
    parameters that the module does not train, and tensors that are plain attributes, are buffers.

    Attributes:
        segments: Number of equal parts of the batch that are computed one by one; only of a D with ``exact: false``.
        map_sizes: Numbers of an image's logits in each map, as of the last forward pass; none of one map.
        output_sizes: Numbers of an image in each of D's further outputs.
        frozen_reads: Of frozen tensors that are shared out; None if there are none.
        types_differ: Whether frozen tensors have other types than those in which its code reads them.
        takes_tokens: Whether it is the first layer of a network whose labels are tokens.
    """

    map_sizes: tuple[int, ...] = ()
    output_sizes: tuple[int, ...] = ()
    frozen_reads: Reads | None = None
    types_differ = False
    takes_tokens = False

    def __init__(
        self, module: nn.Module, network: str, is_last: bool, outputs: Sequence[str] = (), divides: bool = False
    ) -> None:
        """Take a layer of a network; ``outputs`` are the names of what D returns after its logits.

        ``divides`` says that its samples may meet, so that real images and G's are to be computed apart.
        """
        super().__init__()
        self.module, self._network, self._is_last, self._outputs = module, network, is_last, outputs
        self._frozen = frozenset(whole_frozen(module))
        if divides:
            self.segments = 1

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        """Apply the module to the carry."""
        segments = getattr(self, "segments", 1)
        if segments == 1:
            return self._applied(carry)
        for each in self.module.modules():
            if has_our_attributes(each) and hasattr(each, "segments"):  # which would divide each part once more
                vars(each)["segments"] = 1
        statistics = [each for each in self.module.modules() if isinstance(each, BatchStatistics)]
        moving, found = [each.moving for each in statistics], list[tuple[Tensor, ...]]()
        for number, part in enumerate(zip(*(each.chunk(segments) for each in carry), strict=True)):
            for each, moves in zip(statistics, moving, strict=True):  # as they do it where they divide a batch
                each.moving = moves and number == 0
            found.append(self._applied(part))
        for each, moves in zip(statistics, moving, strict=True):
            each.moving = moves
        return tuple(torch.cat(entries) for entries in zip(*found, strict=True))

    def _applied(self, carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        floats = (each.dtype for each in (*self.parameters(), *carry) if each.is_floating_point())
        dtype = next(floats, torch.float32)
        inputs = tuple(each.to(dtype) if each.is_floating_point() else each for each in carry)
        if self.takes_tokens:
            first, labels, *rest = inputs
            inputs = (first, labels[..., :-1], labels[..., -1] > 0, *rest)
        # torch's fast attention has neither second derivatives nor tangents.
        exact = self.exact or any(has_tangent(each) for each in inputs if each.is_floating_point())
        with sdpa_kernel(SDPBackend.MATH) if exact else nullcontext():
            found = self._computed(inputs, dtype) if inputs[0].device.type != "meta" else self._on_meta(inputs, dtype)
        if self._is_last and self._network == "discriminator":
            found = self._joined(found)
        outputs = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(each, Tensor) for each in outputs):
            kinds = ", ".join(type(each).__name__ for each in outputs)
            raise TypeError(f"it returns {kinds}, not tensors of the batch")
        to = full if self._is_last else (lambda each: each.to(dtype))
        return tuple(to(each) if each.is_floating_point() else each for each in outputs)

    def _joined(self, found: Any) -> Any:
        """Join D's maps of logits, and what comes after them."""
        logits, *others = self._divided(found)
        if (not others and isinstance(logits, Tensor)) or not (maps := _maps(logits)):
            return found
        flat = [each.reshape(len(each), -1) for each in (*maps, *others)]
        sizes = tuple(each.shape[1] for each in flat)
        self.map_sizes = () if isinstance(logits, Tensor) else sizes[: len(maps)]
        self.output_sizes = sizes[len(maps) :]
        return torch.cat([full(each) for each in flat], dim=1)

    def _divided(self, found: Any) -> list[Any]:
        """Return D's logits, or what holds them, and the outputs that have names."""
        if not self._outputs:
            return [found]
        returned = list(found) if isinstance(found, list | tuple) else [found]
        field, family, others = "discriminator.outputs", type(self.module).__name__, returned[1:]
        if len(others) != len(self._outputs):
            number = counted(len(others), "tensor")
            problem = f"must be the names of the {number} that {family} returns after the logits"
            remedy = "name each of them" if others else "remove it"
            raise UserError(field, list(self._outputs), problem, remedy)
        for name, each in zip(self._outputs, others, strict=True):
            if not isinstance(each, Tensor):
                problem = f"must be a tensor, {family} returns {type(each).__name__}"
                raise UserError(field, name, problem, "return a tensor (N, ...) for each name")
        return returned

    def _on_meta(self, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
        try:
            return self._computed(inputs, dtype)
        except UserError:
            raise
        except Exception as error:
            if type(error).__module__ == torch.utils.checkpoint.__name__:  # which ends a recomputation early by one
                raise
            problem = "cannot be computed from shapes alone, as plans and pipeline stages need"
            remedy = "let its forward pass read no values of tensors"
            name = type(self.module).__name__
            raise UserError(f"{self._network}.family", name, problem, remedy, plugins.described(error)) from error

    def _computed(self, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
        half = dtype if dtype in _HALF else None
        if self.frozen_reads is not None:
            self.frozen_reads.dtype = half
        if not half and not self.types_differ:
            return self.module(*inputs)
        own = {
            f"{prefix}.{name}" if prefix else name: (each, half or types_as_made(part).get(name, each.dtype))
            for prefix, part in self.module.named_modules()
            for name, each in part.named_buffers(recurse=False)
            if each.is_floating_point() and not isinstance(part, StatefulLayer)
        }
        copies = {name: each.to(kind) for name, (each, kind) in own.items()}
        read = dict(copies)  # into which torch puts buffers that code has replaced
        if not half:
            found = functional_call(self.module, read, inputs)
            self._write_back(own, copies, read)
            return found
        device = inputs[0].device.type  # autocast does not know the meta device, where only shapes are asked for
        with nullcontext() if device == "meta" else torch.autocast(device, dtype, cache_enabled=False):
            found = functional_call(self.module, read, inputs)
        self._write_back(own, copies, read)
        return found

    @torch.no_grad()
    def _write_back(self, owned: dict[str, Any], copies: dict[str, Tensor], found: dict[str, Tensor]) -> None:
        """Let buffers have what code has made of their copies; what it has not changed keeps its digits."""
        for name, (own, _) in owned.items():
            copy, read = copies[name], found[name]
            if not torch.compiler.is_compiling():
                if read is not copy or (copy is not own and copy._version):
                    own.copy_(read)
            elif read is not own and name not in self._frozen:  # it sees no versions
                own.copy_(torch.where(read == own.to(read.dtype), own, read.to(own.dtype)))


class Constructed(Foreign):
    """A layer that ``make`` makes: its constructor initializes it.

    Attributes:
        fills_parts: It initializes all modules below it.
    """

    fills_parts = True

    def __init__(self, make: Make, module: nn.Module, *about: Any) -> None:
        """Keep ``module``, and ``make``, which has made it and can make it again."""
        super().__init__(module, *about)
        self._make = make

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Construct the module again, on the CPU, and copy its values."""
        with drawing_from(generators("constructor")), _filling_memory():
            fresh = _on_cpu(self._make, generators)
        made, given = _tensors(self.module), _tensors(fresh)
        if others := sorted(made.keys() ^ given.keys()):
            problem, remedy = "is there at one construction and not at another", "let each construct the same"
            raise UserError(others[0], None, problem, remedy)
        for name, ours in made.items():
            theirs = given[name]
            is_whole = not (theirs.is_floating_point() or theirs.is_complex() or theirs.dtype == torch.bool)
            if not is_whole or not (theirs == torch.iinfo(theirs.dtype).max).any():
                ours.copy_(theirs)


def outside_layers(recipe: Recipe, network: str) -> list[nn.Module]:
    """Make the layers of a network from outside, on the default device.

    Raises:
        UserError: The recipe was not given by the user, there is no such function, it does not take these arguments,
            fails, or returns something else.
    """
    first, *others = _layers(recipe, network)
    if recipe.data.conditions_are_tokens:
        first = first if isinstance(first, Foreign) else Foreign(first, network, not others)
        first.takes_tokens = True
    return [first, *others]


def _layers(recipe: Recipe, network: str) -> list[nn.Module]:
    call = _call(recipe, network)
    field, family = f"{network}.family", getattr(recipe, network).family
    is_judge = network == "discriminator"
    outputs = judged_outputs(recipe.discriminator) if is_judge else []
    about = outputs, is_judge and not recipe.discriminator.exact  # type: ignore[attr-defined]

    def checked(make: Make) -> Any:
        work = partial(_constructed, lambda: _with_known_parts(field, family, make()))
        return plugins.called(field, family, work, " as it is constructed")

    made = checked(call)
    if isinstance(made, LayerStack):
        *_, last = made.layers.values()
        if outputs and _is_ours(last):
            problem, remedy = "must be empty with a last layer of bigsgan's own kind", "let it return logits alone"
            raise UserError("discriminator.outputs", outputs, problem, remedy)
        return [x if _is_ours(x) else Foreign(x, network, x is last, *about) for x in made.layers.values()]
    if isinstance(made, nn.Module):
        return [Constructed(call, made, network, True, *about)]
    layers: list[nn.Module] = []
    for number, make in enumerate(made if isinstance(made, list | tuple) else []):
        layer = checked(make) if callable(make) and not isinstance(make, nn.Module) else None
        if not isinstance(layer, nn.Module):
            problem, remedy = f"must return functions that make layers, but number {number}", "return a list of them"
            raise UserError(field, type(make if layer is None else layer).__name__, problem, remedy)
        layers.append(Constructed(make, layer, network, number == len(made) - 1, *about))
    if not layers:
        problem = "must return a torch.nn.Module, or a list of functions that make its layers"
        raise UserError(field, type(made).__name__, problem, "correct what it returns")
    return layers


def _with_known_parts(field: str, family: str, made: Any) -> Any:
    """Return what a function has made; refuse modules that no engine can train."""
    for name, part in made.named_modules() if isinstance(made, nn.Module) else ():
        kind = type(part).__name__
        if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():  # type: ignore[misc]
            problem = f"has a {kind}, whose sizes torch learns from a first batch"
            remedy = f"give it sizes, as to {kind.removeprefix('Lazy')}"
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            problem, remedy = f"has an {kind} with sparse gradients, which engines cannot average", "leave out sparse"
        elif kind == "OptimizedModule" and hasattr(part, "_orig_mod"):
            problem, remedy = "has a module of torch.compile", "leave that out, and set compile of its engine"
        elif isinstance(part, torch.jit.ScriptModule):
            problem, remedy = "has a module of torch.jit, which takes no hooks", "leave torch.jit out"
        else:
            continue
        raise UserError(field, family, problem, remedy, name)
    return made


def _maps(outputs: Any) -> list[Tensor]:
    """Return the tensors of floats that nested lists and tuples hold; none if they hold something else too."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() and outputs.dim() else []
    found = [_maps(each) for each in outputs] if isinstance(outputs, list | tuple) else []
    return [each for maps in found for each in maps] if all(found) else []


def _constructed(make: Make) -> Any:
    """Call ``make`` on the default device; on the CPU first if that is the meta device and the code cannot use it."""
    if torch.get_default_device().type != "meta":
        return _on_cpu(make)
    try:
        with warnings.catch_warnings():  # weights that a constructor loads from a file have no place on that device
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
            made = _prepared(make())
        # torch (2.14) gives its orthogonal parametrization there no base.
        if not (isinstance(made, nn.Module) and any(type(each).__name__ == "_Orthogonal" for each in made.modules())):
            return made
    except Exception:  # such as numbers of a schedule that are read from a tensor
        pass
    made = _on_cpu(make)
    return with_memory(made, "meta") if isinstance(made, nn.Module) else made


def _on_cpu(make: Make, generators: Generators | None = None) -> Any:
    """Construct on the CPU, and initialize modules of our own that are among it.

    Gradients are on: ``_prepared`` sees what follows from parameters, such as the weight of torch's older weight norm.
    """
    with torch.device("cpu"), torch.enable_grad():
        made = _prepared(make())
    if generators is not None:
        for prefix, module in made.named_modules():
            if _is_ours(module) and hasattr(module, "initialize"):
                module.initialize(lambda name, prefix=prefix: generators(f"{prefix}.{name}"))
    return made


@contextmanager
def _filling_memory() -> Iterator[None]:
    """Let memory that torch allocates inside the block hold NaN or the largest integer, so that what stays is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _prepared(made: Any) -> Any:
    """Give batch norm global statistics, and make buffers of what is not trained; weights are float32."""
    if not isinstance(made, nn.Module):
        return made
    made = global_batch_norms(made)
    for module in made.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                freeze(module, name)
            elif not parameter.numel():  # some code reads its device; engines cannot divide it
                make_buffer(module, name)
            elif parameter.is_floating_point() and parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
        for name, value in list(vars(module).items()):  # constants that would not follow the module to a device
            if isinstance(value, Tensor) and not value.requires_grad:
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
            elif isinstance(value, Tensor) and value.grad_fn:  # made again at each call; one with a graph has no copy
                setattr(module, name, value.detach())
    return made


def _is_ours(module: nn.Module) -> bool:
    return is_ours(module) and not isinstance(module, GlobalBatchNorm)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for prefix, part in module.named_modules() for name, tensor in tensors_of(part, prefix)}


def _call(recipe: Recipe, network: str) -> Make:
    """Return the call of a recipe's function, with its arguments."""
    section: Any = getattr(recipe, network)
    field, family, data = f"{network}.family", section.family, recipe.data
    function = plugins.load(field, family, "families")
    known = {
        "latent_size": recipe.latent_size,
        "num_classes": data.num_classes,
        "condition_size": data.condition_size,
        "resolution": data.network_size.value,
        "image_channels": data.channels,
    }
    return partial(function, **checked_arguments(f"{network}.arguments", family, function, section.arguments, known))
